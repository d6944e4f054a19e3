"""Views against brute force: whatever is read of one is what its documents say, one by one."""

from __future__ import annotations

import json
import pickle
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import write_store

import tokenmill
from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.store.reader import Store
from tokenmill.store.stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHARDS = [[3, 5, 0, 1, 4], [], [7, 2], [2, 2, 6, 1, 1, 0], [9]]


def masked_store(root: Path) -> Store:
    """A store with masks; ids and masks follow from the place in the stream."""
    position, shards, masks = 0, [], []
    for lengths in SHARDS:
        ends = np.cumsum([position, *lengths]).tolist()
        shards.append([[*range(a, b)] for a, b in pairwise(ends)])
        masks.append([[place % 3 % 2 for place in document] for document in shards[-1]])
        position = ends[-1]
    return write_store(root, shards, masks=masks)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return masked_store(tmp_path_factory.mktemp("views") / "store")


def documents_of(store: Store) -> list[list[int]]:
    return [document.tolist() for document in store]


def check_reading(view: Store, base: Store, kept: Sequence[int]) -> None:
    """Every way to read of a view gives what its documents say."""
    expected = [base[number].tolist() for number in kept]
    assert documents_of(view) == expected
    assert [view[number].tolist() for number in range(len(view))] == expected
    assert view.lengths().tolist() == [len(document) for document in expected]
    assert view.num_tokens == sum(map(len, expected))
    if base.has_mask:
        masks = [base.mask(number) for number in kept]
        found = [view.mask(number) for number in range(len(view))]
        assert [m.tolist() for m in found if m is not None] == [
            m.tolist() for m in masks if m is not None
        ]
        assert view.num_counted == sum(int(m.sum()) for m in masks if m is not None)
        assert view.num_silent == sum(not m.any() for m in masks if m is not None)


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 13), min_size=1), st.data())
def test_a_view_reads_as_its_documents_do(store: Store, chosen: set[int], data: Any) -> None:
    kept = sorted(chosen)
    view = store.without(set(range(14)) - chosen)
    check_reading(view, store, kept)
    if not view.num_tokens:
        return
    stream = open_stream(view)
    flat = [token for number in kept for token in store[number].tolist()]
    start = data.draw(st.integers(0, len(flat) - 1))
    length = data.draw(st.integers(1, len(flat) - start))
    starts, lengths = np.array([-1, start, start]), np.array([2, length, 1])
    wanted = [999, 999, *flat[start : start + length], flat[start]]
    assert stream.read(starts, lengths, pad=999).tolist() == wanted
    spans = stream.locate(starts, lengths)
    assert stream.read_mask(spans).tolist() == [
        place < 999 and bool(place % 3 % 2) for place in wanted
    ]
    cut_starts, cut = stream.cut_at_documents(starts, lengths)
    assert stream.read(cut_starts, cut, pad=999).tolist() == wanted
    begins = {sum(len(store[n]) for n in kept[:k]) for k in range(len(kept) + 1)}
    inside = [b for b in range(start + 1, start + length) if b in begins]
    assert cut_starts.tolist() == [-1, start, *inside, start]
    number = stream.document_at(start)
    first, size = stream.document_span(number)
    assert first <= start < first + size
    assert flat[first : first + size] == view[number].tolist()


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_a_loader_feeds_the_rows_of_a_store_with_those_documents(
    store: Store, tmp_path: Path, packing: str
) -> None:
    kept = [0, 1, 4, 5, 6, 9, 13]
    view = store.without(set(range(14)) - set(kept))
    masks = [store.mask(n) for n in kept]
    alone = write_store(
        tmp_path / "alone",
        [[store[n].tolist() for n in kept]],
        masks=[[m.tolist() for m in masks if m is not None]],
    )
    how: dict[str, Any] = {"seq_len": 4, "batch_size": 2, "packing": packing, "epochs": 2}
    both = [list(Loader(each, seed=3, **how)) for each in (view, alone)]
    assert len(both[0]) == len(both[1])
    for mine, other in zip(*both, strict=True):
        for name in ("input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens"):
            assert np.array_equal(getattr(mine, name), getattr(other, name)), name
    account = [tokenmill.layout(each, seq_len=4).accounts for each in (view, alone)]
    assert account[0] == account[1]


def test_a_view_in_a_file_is_the_one_in_memory(store: Store, tmp_path: Path) -> None:
    made = store.without([1, 2, 9])
    saved = store.without([1, 2, 9], out=tmp_path / "kept.view")
    assert saved.path == tmp_path / "kept.view"
    assert made.content == saved.content != store.content
    for view in (made, saved, Store(tmp_path / "kept.view"), *map(_again, (made, saved))):
        assert documents_of(view) == documents_of(made)
        assert (view.content, view.split) == (made.content, "train")
    state = Loader(made, seq_len=4, batch_size=2).state_dict()
    Loader(saved, seq_len=4, batch_size=2).load_state_dict(state)
    with pytest.raises(tokenmill.TokenmillError, match="does not hold what it held"):
        Loader(store, seq_len=4, batch_size=2).load_state_dict(state)


def _again(view: Store) -> Store:
    found: Store = pickle.loads(pickle.dumps(view))
    return found


def test_a_view_of_a_view_is_one_of_the_store(store: Store, tmp_path: Path) -> None:
    once = store.without([0, 5, 6], out=tmp_path / "once.view")
    kept = [number for number in range(14) if number not in (0, 5, 6)]
    twice = once.without([1, 4, 5])
    kept = [number for place, number in enumerate(kept) if place not in (1, 4, 5)]
    check_reading(twice, store, kept)
    assert [twice.in_base(k)[1] for k in range(len(twice))] == kept
    assert twice.view is not None
    assert [step["documents"] for step in twice.view.facts.made] == [3, 3]
    assert sum(each.documents for each in twice.view.facts.gone) == 6


def test_a_view_moves_with_its_store(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    masked_store(tmp_path / "a" / "store").without([0], out=tmp_path / "a" / "kept.view")
    (tmp_path / "a").rename(tmp_path / "b")
    assert len(Store(tmp_path / "b" / "kept.view")) == 13
    (tmp_path / "b" / "kept.view").rename(tmp_path / "kept.view")
    with pytest.raises(StoreError, match="there is none"):
        Store(tmp_path / "kept.view")


def test_every_damaged_byte_of_a_view_is_found(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "kept.view"
    store.without([1, 2, 9], out=path)
    data = path.read_bytes()
    dice = random.Random(1)
    for place in [*range(40), *dice.sample(range(40, len(data)), 60)]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(StoreError):
            documents_of(Store(path))
    for size in (0, 20, 100, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(StoreError):
            Store(path)


def test_a_view_is_refused_beside_another_store(tmp_path: Path) -> None:
    masked_store(tmp_path / "store").without([0], out=tmp_path / "kept.view")
    (tmp_path / "store").rename(tmp_path / "old")
    write_store(tmp_path / "store", [[[1, 2], [3]]])
    with pytest.raises(StoreError, match="made of another state of the store"):
        Store(tmp_path / "kept.view")


def test_what_makes_no_view_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no document of .* would be left"):
        store.without(range(14))
    with pytest.raises(UsageError, match="there is no document 14"):
        store.without([14])
    other = tmp_path / "notes.txt"
    other.write_text("notes")
    with pytest.raises(UsageError, match="is no view, and would be overwritten"):
        store.without([1], out=other)
    with pytest.raises(StoreError, match="is a file, and no view"):
        Store(other)
    with pytest.raises(UsageError, match="is a folder"):
        store.without([1], out=tmp_path)
    assert other.read_text() == "notes"


# Of a real build: provenance, splits, pieces.


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    dice = random.Random(2)
    for kind in ("code", "web"):
        (folder / "data" / kind).mkdir(parents=True)
        for part in range(2):
            rows = [
                {"id": f"{kind}-{part}-{k}", "text": "".join(dice.choices("abcd ", k=k % 50 + 1))}
                for k in range(60)
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "data" / kind / f"{part}.jsonl").write_text(lines)
    tokenmill.build(
        folder / "data", tokenizer="bytes", out=folder / "store", val=0.2, max_length=20
    )
    return folder / "store"


@pytest.mark.parametrize("split", ["train", "val", None])
def test_select_keeps_whole_rows_by_what_is_known_of_them(
    built: Path, tmp_path: Path, split: str | None
) -> None:
    where = "source like '%code%' and tokens < 40 and row >= 3"
    result = tokenmill.select(built, where=where, out=tmp_path / "code.view")
    base, view = Store(built, split=split), Store(tmp_path / "code.view", split=split)
    origins = [base.source(number) for number in range(len(base))]
    tokens: dict[tuple[str, int], int] = {}
    for number, origin in enumerate(origins):
        key = origin.path, origin.row
        tokens[key] = tokens.get(key, 0) + len(base[number])
    kept = [
        number
        for number, origin in enumerate(origins)
        if "code" in origin.path and tokens[origin.path, origin.row] < 40 and origin.row >= 3
    ]
    assert any(origins[number].pieces > 1 for number in kept)
    check_reading(view, base, kept)
    assert [view.source(k) for k in range(len(view))] == [origins[number] for number in kept]
    assert [view.decode(k) for k in range(len(view))] == [base.decode(k) for k in kept]
    if split is None:
        assert (result.documents, result.of_documents) == (len(view), len(base))
        (gone,) = result.gone
        assert (gone.documents, gone.reason) == (
            len(base) - len(view),
            "not: source like '%code%' and tokens < 40 and row >= 3",
        )


def test_a_condition_on_what_is_not_known_names_what_is(built: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no column 'lang', which --where asks for.*source"):
        tokenmill.select(built, where="lang == 'en'", out=tmp_path / "x.view")
    with pytest.raises(UsageError, match="no document"):
        tokenmill.select(built, where="tokens > 1000000", out=tmp_path / "x.view")
    assert not (tmp_path / "x.view").exists()
