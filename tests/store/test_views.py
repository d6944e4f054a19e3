"""Views against brute force: whatever is read of one is what its documents say, one by one."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from fractions import Fraction
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import write_store

import tokenmill
from tokenmill.errors import StateError, StoreError, UsageError
from tokenmill.interop.base import HOMES
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage
from tokenmill.loader.order import exact_weight
from tokenmill.store.documents import Grouping
from tokenmill.store.reader import Store
from tokenmill.store.stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
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


@pytest.fixture(params=["with few runs", "with many"], scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "with many":
            patch.setattr("tokenmill.store.stream.FEW_RUNS", 0)
        yield


@pytest.mark.usefixtures("runs")
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


@pytest.mark.usefixtures("runs")
def test_no_piece_goes_beyond_a_view_to_documents_that_are_gone(store: Store) -> None:
    stream = open_stream(store.without([4, 5, 6, 7, 8, 9, 10, 11, 12, 13]))
    assert stream.read(np.array([0, 8]), np.array([9, 1]), pad=0).tolist() == [*range(9), 8]
    for start, length in ((8, 2), (9, 1), (9, 4), (2, 8)):
        with pytest.raises(StoreError, match="is after the last of its 9 tokens"):
            stream.read(np.array([0, start]), np.array([1, length]), pad=0)


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


@pytest.mark.parametrize("given", [[True, False], np.arange(14) > 3, [1.5], ["3"]])
def test_only_whole_numbers_say_which_documents_are_left_out(store: Store, given: Any) -> None:
    with pytest.raises(UsageError, match="left out by their numbers") as caught:
        store.without(given)
    assert "np.flatnonzero(mask)" in str(caught.value.hint)
    for numbers in ([2, 5], {5, 2}, np.array([5, 2], np.uint16), iter((2, 5)), range(2, 6, 3)):
        assert len(store.without(numbers)) == 12
    assert len(store.without([])) == len(store.without(np.zeros(0))) == 14


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


def test_a_split_without_documents_is_told_before_anything_is_written(
    built: Path, tmp_path: Path
) -> None:
    store, out = Store(built, split="train"), tmp_path / "val.view"
    with pytest.raises(UsageError, match=r"no document of the split 'train' of .* would be"):
        store.without(range(len(store)), out=out)
    for place in (out, None):
        with pytest.raises(UsageError, match=r"no document of the split 'train' of .* would be"):
            store.select("split == 'val'", out=place)
    assert not out.exists()
    whole = Store(built, split=None).select("split == 'val'", out=out)
    assert [*whole.manifest.splits] == ["val"]


def test_a_condition_on_what_is_not_known_names_what_is(built: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no column 'lang', which where= asks for.*source"):
        tokenmill.select(built, where="lang == 'en'", out=tmp_path / "x.view")
    with pytest.raises(UsageError, match="no document"):
        tokenmill.select(built, where="tokens > 1000000", out=tmp_path / "x.view")
    assert not (tmp_path / "x.view").exists()


def rows_of_store(store: Store) -> list[tuple[str, int]]:
    origins = [store.source(number) for number in range(len(store))]
    return [(origin.path, origin.row) for origin in origins]


def test_columns_come_from_a_table_by_a_field_of_the_sources(built: Path, tmp_path: Path) -> None:
    lines = [
        {"id": f"{kind}-{part}-{k}", "quality": k / 60, "lang": "en" if k % 3 else None, "n": k % 3}
        for kind in ("web", "code")
        for part in range(2)
        for k in range(60)
    ]
    random.Random(3).shuffle(lines)
    table = tmp_path / "scores.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = tokenmill.annotate(built, table, key="id")
    assert {column.name: column.type for column in result.columns} == {
        "quality": "number",
        "lang": "text",
        "n": "integer",
    }
    assert (result.without_row, result.unused_rows) == (0, 0)
    base = Store(built)
    view = base.select("quality >= 0.5 and lang == 'en'")
    kept = [k for k, (_, row) in enumerate(rows_of_store(base)) if row >= 30 and row % 3]
    check_reading(view, base, kept)
    nothing = base.select("lang is null")
    kept = [k for k, (_, row) in enumerate(rows_of_store(base)) if row % 3 == 0]
    check_reading(nothing, base, kept)
    # A view knows the columns of its store.
    check_reading(
        view.select("n = 2"),
        view,
        [k for k, (_, row) in enumerate(rows_of_store(view)) if row % 3 == 2],
    )
    tokenmill.select(built, repeat="n", out=tmp_path / "often.view")
    often = Store(tmp_path / "often.view")
    rows = rows_of_store(base)
    passes = [[k for k, (_, row) in enumerate(rows) if row % 3 > copy] for copy in range(2)]
    check_reading(often, base, [*passes[0], *passes[1]])
    assert [often.source(k) for k in range(len(often))] == [
        base.source(k) for part in passes for k in part
    ]
    with pytest.raises(UsageError, match="several times already"):
        tokenmill.select(tmp_path / "often.view", repeat="n", out=tmp_path / "x.view")


def test_columns_come_from_the_sources_alone(built: Path) -> None:
    result = tokenmill.annotate(built, columns="name=id")
    assert [column.name for column in result.columns] == ["name"]
    assert result.columns[0].values == 240
    view = Store(built).select("name in ('web-0-5', 'code-1-7')")
    assert {view.source(k).row for k in range(len(view))} <= {5, 7}
    with pytest.raises(UsageError, match=r"no row of the sources of .* has a field 'other'"):
        tokenmill.annotate(built, columns="other")


@pytest.mark.parametrize(
    ("lines", "how", "complaint"),
    [
        (
            ["id,q", "code-0-1,1", "code-0-1,2"],
            {"key": "id"},
            r"2 rows of .* have the 'id' 'code-0-1'",
        ),
        (["id,q", "code-0-1,1"], {"key": "id"}, r"\d+ of \d+ documents have no row"),
        (["id,q", "other,1"], {"key": "id"}, "no document of .* has the 'id' of any"),
        (["id,q", "code-0-1,1"], {"key": "name"}, "has no column 'name'"),
        (["id,q", "code-0-1,1"], {}, "no key says which"),
        (["id,tokens", "code-0-1,1"], {"key": "id"}, "'tokens' is the name of a column that every"),
        (
            ["id,q", "code-0-1,1", ",2"],
            {"key": "id", "missing": "null"},
            "no document|has no 'id' in 1 row",
        ),
        (["document,q", "0.5,1"], {"key": "document"}, "a key is of type double"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    built: Path, tmp_path: Path, lines: list[str], how: dict[str, Any], complaint: str
) -> None:
    table = tmp_path / "scores.csv"
    table.write_text("\n".join(lines) + "\n")
    before = sorted((built / "annotations").glob("*")) if (built / "annotations").exists() else []
    with pytest.raises(UsageError, match=complaint):
        tokenmill.annotate(built, table, **how)
    after = sorted((built / "annotations").glob("*")) if (built / "annotations").exists() else []
    assert before == after


def test_values_may_be_missing_where_that_is_said(built: Path, tmp_path: Path) -> None:
    table = tmp_path / "scores.csv"
    table.write_text("document,some\n3,1.5\n5,2.5\n100000,4\n")
    result = tokenmill.annotate(built, table, key="document", missing="null")
    base = Store(built)
    assert result.unused_rows == 1
    assert result.without_row == len(Store(built, split=None)) - 2
    with pytest.raises(UsageError, match="holds a number, and the condition compares it with text"):
        base.select("some == 'x'")
    rows = rows_of_store(base)
    kept = [k for k, row in enumerate(rows) if row in (rows[3], rows[5]) and rows.count(row) == 1]
    if kept:
        check_reading(base.select("some > 1"), base, kept)


def test_ids_are_banned_by_any_key(built: Path, tmp_path: Path) -> None:
    tokenmill.annotate(built, columns="id")
    base = Store(built)
    rows = rows_of_store(base)
    (path, row), (other, _) = rows[7], rows[0]
    name = path.replace("\\", "/").rsplit("/", 2)
    banned: dict[str, tuple[str, Any]] = {
        "id": (f"{name[1]}-{name[2][0]}-{row}", lambda each: each == (path, row)),
        "source": (other, lambda each: each[0] == other),
        "source,row": (f"{path}:{row}", lambda each: each == (path, row)),
        "document": ("7", lambda each: each == (path, row)),
    }
    for key, (line, is_banned) in banned.items():
        listed = tmp_path / "optout.txt"
        listed.write_text(f"{line}\n\n{line}\n")
        result = tokenmill.ban(built, ids=listed, key=key, out=tmp_path / "kept.view")
        view = Store(tmp_path / "kept.view")
        check_reading(view, base, [k for k, each in enumerate(rows) if not is_banned(each)])
        assert result.gone[0].reason == f"its {key} is listed in {listed}"
        listed.write_text(f"{line}\nunknown\n")
        with pytest.raises(UsageError, match=r"1 line of .* of no document of .*'unknown'"):
            tokenmill.ban(built, ids=listed, key=key, out=tmp_path / "kept.view")
        counted = tokenmill.ban(
            built, ids=listed, key=key, missing="count", out=tmp_path / "kept.view"
        )
        assert (result.unknown, counted.unknown) == (0, 1)
        assert len(Store(tmp_path / "kept.view")) == len(view)
        listed.write_text(f"{line}\r\n", encoding="utf-8-sig")  # as some editors write it
        tokenmill.ban(built, ids=listed, key=key, out=tmp_path / "kept.view")
        assert len(Store(tmp_path / "kept.view")) == len(view)
    with pytest.raises(UsageError, match="has no column 'url'"):
        tokenmill.ban(built, ids=listed, key="url", out=tmp_path / "kept.view")


@pytest.mark.parametrize("missing", ["error", "count"])
def test_numbers_of_a_split_that_is_not_there_are_refused(
    built: Path, tmp_path: Path, missing: str
) -> None:
    out, table = tmp_path / "kept.view", tmp_path / "table.csv"
    table.write_text("document,grade\n1,2\n")
    for name in (
        lambda: tokenmill.ban(built, ids=[1], split="test", missing=missing, out=out),
        lambda: tokenmill.forget(built, ids=[1], split="test", missing=missing, dry_run=True),
        lambda: tokenmill.annotate(built, table, key="document", split="test", missing="null"),
    ):
        with pytest.raises(UsageError, match="has no split 'test', of whose documents") as caught:
            name()
        assert "train, val" in str(caught.value.hint)
    assert not out.exists()


@pytest.mark.parametrize("regex", [False, True])
def test_documents_that_hold_a_text_are_banned_with_the_reason(
    built: Path, tmp_path: Path, regex: bool
) -> None:
    base = Store(built)
    rows, texts = rows_of_store(base), dict[tuple[str, int], str]()
    for number, row in enumerate(rows):
        texts[row] = texts.get(row, "") + base.decode(number)
    # One that is in two pieces of a row, and in no document alone.
    whole = next(text for text in texts.values() if len(text) > 30)
    patterns = [whole[15:25], "aab"]
    assert not any(patterns[0] in base.decode(k) for k in range(len(base)))
    listed = tmp_path / "patterns.txt"
    listed.write_text("\n".join(patterns))
    tokenmill.ban(built, match=listed, regex=regex, out=tmp_path / "clean.view")
    view = Store(tmp_path / "clean.view")
    kept = [k for k, row in enumerate(rows) if not any(each in texts[row] for each in patterns)]
    assert 0 < len(kept) < len(base)
    check_reading(view, base, kept)
    assert view.view is not None
    reasons = [each.reason for each in view.view.facts.gone]
    assert reasons == [f"it {'matches' if regex else 'holds'} {each!r}" for each in patterns]
    every = Store(built, split=None)
    gone = {n: reason for a, b, reason in view.view.gone_runs().tolist() for n in range(a, b)}
    assert len(gone) == len(every) - len(Store(tmp_path / "clean.view", split=None))
    for number in gone:
        origin = every.source(number)
        text = texts.get((origin.path, origin.row))
        if text is not None:
            assert patterns[gone[number]] in text
    listed.write_text("zzzz\n")
    with pytest.raises(UsageError, match="in no document"):
        tokenmill.ban(built, match=listed, regex=regex, out=tmp_path / "x.view")
    listed.write_text("[")
    if regex:
        with pytest.raises(UsageError, match="is no regular expression"):
            tokenmill.ban(built, match=listed, regex=True, out=tmp_path / "x.view")


@pytest.mark.parametrize("most_records", [1 << 22, 16])
def test_each_text_is_kept_once_and_in_the_first_store_that_has_it(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_records: int
) -> None:
    monkeypatch.setattr("tokenmill.selection._MOST_RECORDS", most_records)
    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["abc", "new " * 9, "abc", "a"])
    )
    # Cut in other pieces, and with a token in front.
    tokenmill.build(tmp_path / "more.jsonl", tokenizer="bytes", out=tmp_path / "more", max_length=9)
    result = tokenmill.dedup([tmp_path / "more", built], out=tmp_path / "unique")
    seen: set[str] = set()
    gone = 0
    for view, name in zip(result.views, ("more", "store"), strict=True):
        path = tmp_path / "more" if name == "more" else built
        base = Store(path, split=None)
        rows, texts = rows_of_store(base), dict[tuple[str, int], str]()
        for number, row in enumerate(rows):
            texts[row] = texts.get(row, "") + base.decode(number)
        first = set()
        for row, text in texts.items():
            first |= set() if text in seen else {row}
            seen.add(text)
        kept = [number for number, row in enumerate(rows) if row in first]
        gone += len(base) - len(kept)
        check_reading(Store(tmp_path / "unique" / f"{name}.view", split=None), base, kept)
        assert view.documents == len(kept)
    assert gone
    assert result.of_documents - result.documents == gone
    alone = tokenmill.dedup(tmp_path / "more", out=tmp_path / "alone.view")
    assert alone.documents == result.views[0].documents


@pytest.fixture(scope="module")
def grouped(built: Path) -> Path:
    """The store, whose documents have a language, a mark and a flag; some have no mark."""
    rows = rows_of_store(Store(built, split=None))
    table = [
        {
            "source": path,
            "row": row,
            "tongue": ["de", "en", "en", "ja"][row % 4],
            "mark": None if row % 5 == 0 else row % 3,
            "is_good": row % 2 == 0,
            "quality": row / 60,
        }
        for path, row in dict.fromkeys(rows)
    ]
    path = built.parent / "groups.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in table))
    tokenmill.annotate(built, path, key="source,row")
    return built


def value_of(store: Store, number: int, by: str) -> str:
    origin = store.source(number)
    row = origin.row
    return {
        "source": origin.path,
        "folder": origin.path.rpartition("/")[0],
        "tongue": ["de", "en", "en", "ja"][row % 4],
        "mark": "null" if row % 5 == 0 else str(row % 3),
        "is_good": str(row % 2 == 0).lower(),
    }[by]


@pytest.mark.parametrize("by", ["source", "folder", "tongue", "mark", "is_good"])
def test_groups_of_documents_are_counted_and_are_views(grouped: Path, by: str) -> None:
    for whole in (Store(grouped), Store(grouped).select("tokens < 30")):
        kept: dict[str, list[int]] = {}
        for number in range(len(whole)):
            kept.setdefault(value_of(whole, number, by), []).append(number)
        grouping = Grouping(whole, by)
        assert {each.name: each.documents for each in grouping.groups} == {
            name: len(numbers) for name, numbers in kept.items()
        }
        assert sum(each.tokens for each in grouping.groups) == whole.num_tokens
        views = grouping.views()
        assert list(views) == [each.name for each in grouping.groups]
        for each in grouping.groups:
            check_reading(views[each.name], whole, kept[each.name])
            assert each.tokens == views[each.name].num_tokens
            assert each.share == each.tokens / whole.num_tokens
            again = pickle.loads(pickle.dumps(views[each.name]))
            assert again.told() == views[each.name].told()


def test_a_store_is_mixed_by_what_its_documents_are(grouped: Path) -> None:
    store = Store(grouped)
    sizes = {each.name: each.tokens for each in Grouping(store, "source").groups}
    natural = Mixture.from_store(store, by="source")
    assert dict(zip(natural.names, natural.stages[0].weights, strict=True)) == sizes
    weights = {"code/0.jsonl": 0.25, "*/web/*": 0.5, "*": 0.25}
    mixture = Mixture.from_store(
        store,
        by="source",
        weights=weights,
        stages=[Stage(tokens=100), Stage(weights={"*code*": 0, "*": 1})],
        max_epochs={"*code*": 2},
    )
    shares = dict(zip(mixture.names, map(exact_weight, mixture.stages[0].weights), strict=True))
    code, web = ([name for name in sizes if kind in name] for kind in ("code", "web"))
    assert {shares[name] for name in code} == {Fraction(1, 4)}
    whole = sum(sizes[name] for name in web)
    assert [shares[name] for name in web] == [Fraction(sizes[name], 2 * whole) for name in web]
    later = dict(zip(mixture.names, mixture.stages[1].weights, strict=True))
    assert [later[name] for name in code] == [0, 0]
    caps = dict(zip(mixture.names, mixture.max_epochs, strict=True))
    assert [caps[name] for name in (*code, *web)] == [2, 2, None, None]
    flags = Mixture.from_store(store, by="is_good", weights={"true": 3, "false": 1})
    assert dict(zip(flags.names, flags.stages[0].weights, strict=True)) == {"true": 3, "false": 1}
    for wrong, message in (
        ({"code/0.jsonl": 1}, r"leave out .*web.*of the column 'source'"),
        ({"book": 1, "*": 1}, "no document has 'book' in the column 'source'"),
        ({"*": 1, "*/web/*": 1}, r"'\*/web/\*' match nothing that names before leave"),
        ({}, "leave out"),
        ({"*": -1}, "no share of anything"),
    ):
        with pytest.raises(UsageError, match=message):
            Mixture.from_store(store, by="source", weights=wrong)
    for by, message in (
        ("quality", "holds a number for each document"),
        ("tokens", "holds a number for each document"),
        ("lang2", "has no column 'lang2' to group documents by; there are: split, source, folder"),
    ):
        with pytest.raises(UsageError, match=message):
            Mixture.from_store(store, by=by)


def test_a_mixture_of_a_store_trains_traces_and_resumes(grouped: Path, tmp_path: Path) -> None:
    short = Store(grouped).select("tokens < 30", out=tmp_path / "short.view")
    how: dict[str, Any] = {"seq_len": 16, "batch_size": 4, "seed": 5}
    for whole in (Store(grouped), Store(grouped).select("row > 2"), short):

        def opened(whole: Store = whole) -> Loader:
            mixture = Mixture.from_store(whole, by="tongue", weights={"de": 0.5, "*": 0.5})
            return Loader(mixture, **how)

        loader = opened()
        expected = [loader.batch(step).input_ids.tolist() for step in range(12)]
        loader.seek(7)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = opened()
        resumed.load_state_dict(state)
        found = [batch.input_ids.tolist() for batch in islice(resumed, 5)]
        assert found == expected[7:]
        with pytest.raises(StateError, match="the rows would be others"):
            other = Mixture.from_store(
                whole.without([3]), by="tongue", weights={"de": 0.5, "*": 0.5}
            )
            Loader(other, **how).load_state_dict(state)
        saved = tmp_path / "state.json"
        saved.write_text(json.dumps({"state": state, "recipe": loader.recipe()}))
        shown: dict[int, set[tuple[int | None, int]]] = {}
        for step in range(7):
            for row in loader.rows(step):
                for part in row.parts:
                    base = loader.mixture.stores[loader.mixture.names.index(row.source)]
                    _, number = base.in_base(part.document)
                    shown.setdefault(number, set()).add((step, part.at))
        base = Store(grouped)
        inside = {whole.in_base(k)[1] for k in range(len(whole))}
        for number in (*sorted(shown)[:5], *sorted(inside)[-5:]):
            found_of = tokenmill.trace(grouped, state=saved, doc=number, limit=1000)
            places = {(s.step, s.at) for each in found_of.documents for s in each.shown}
            assert places == shown.get(number, set())
            assert found_of.documents[0].source == base.source(number)
        if outside := set(range(len(base))) - inside:
            with pytest.raises(UsageError, match="is not in what the run"):
                tokenmill.trace(grouped, state=saved, doc=min(outside))
        if whole.view is not None and whole.view.is_saved:
            traced = tokenmill.trace(whole.path, state=saved, doc=2, limit=1000)
            again = tokenmill.trace(grouped, state=saved, doc=whole.in_base(2)[1], limit=1000)
            assert traced.documents[0].shown == again.documents[0].shown
    never = Store(grouped).without([1, 2])
    loader = Loader(Mixture.from_store(never, by="tongue"), **how)
    saved.write_text(json.dumps({"state": loader.state_dict(), "recipe": loader.recipe()}))
    with pytest.raises(UsageError, match="in no file"):
        tokenmill.trace(grouped, state=saved, doc=3)


def copy_of(built: Path, to: Path) -> Path:
    return shutil.copytree(built, to / "store")


def test_verify_looks_at_a_view_and_at_its_store(grouped: Path, tmp_path: Path) -> None:
    store = copy_of(grouped, tmp_path)
    Store(store).without([2, 3], out=tmp_path / "kept.view")
    path = tmp_path / "more.view"
    Store(tmp_path / "kept.view").select("tokens > 5", out=path)
    good = tokenmill.verify(path, sample=20)
    assert good.ok
    assert (good.notes, good.documents_reencoded) == ((), 20)
    assert good.totals is not None
    assert good.totals.documents == len(Store(path, split=None))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    bad = tokenmill.verify(path)
    assert [each.file for each in bad.findings] == ["more.view"]
    assert "damaged" in bad.findings[0].problem
    column = store / "annotations" / "tongue.column"
    column.write_bytes(column.read_bytes().replace(b"ja", b"jb", 1))
    shard = next((store / "shards").glob("*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    found = tokenmill.verify(tmp_path / "kept.view").findings
    assert {each.file for each in found} >= {f"shards/{shard.name}", "annotations/tongue.column"}
    store.rename(tmp_path / "gone")
    (finding,) = tokenmill.verify(tmp_path / "kept.view").findings
    assert "there is none" in finding.problem
    for command in ("prune", "verify"):
        with pytest.raises(StoreError, match="is a file"):
            getattr(tokenmill, command)(__file__)


def test_a_view_is_of_what_its_store_held_before_it_grew(
    built: Path, grouped: Path, tmp_path: Path
) -> None:
    store, path = copy_of(grouped, tmp_path), tmp_path / "kept.view"
    before = Store(store).select("tongue == 'de'", out=path)
    held = documents_of(before)
    state = Loader(before, seq_len=8, batch_size=2).state_dict()
    more = built.parent / "data" / "code" / "2.jsonl"
    more.write_text(json.dumps({"id": "new", "text": "more of it"}) + "\n")
    try:
        tokenmill.build(built.parent / "data", tokenizer="bytes", out=store, val=0.2, max_length=20)
        assert len(Store(store, split=None)) > len(Store(built, split=None))
        again = Store(path)
        assert documents_of(again) == held
        Loader(again, seq_len=8, batch_size=2).load_state_dict(state)
        assert documents_of(again.select("tongue == 'de'")) == held
        assert tokenmill.verify(path, sample=0).ok
        with pytest.raises(StoreError, match="made of another state of its store"):
            Store(store).select("tongue == 'de'")
        tokenmill.prune(store)
        with pytest.raises(StoreError, match="was made of another state of the store"):
            Store(path)
    finally:
        more.unlink()


@pytest.fixture(scope="module")
def filtered(built: Path) -> tuple[Path, Path]:
    """A view, and a store that was built of its text."""
    for path in (built.parent / "data").rglob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if len(json.loads(line)["text"]) + 1 < 30]
        fewer = built.parent / "fewer" / path.relative_to(built.parent / "data")
        fewer.parent.mkdir(parents=True, exist_ok=True)
        fewer.write_text("".join(kept))
    store = built.parent / "fewer-store"
    tokenmill.build(
        built.parent / "fewer", tokenizer="bytes", out=store, val=0.2, max_length=20, serial=True
    )
    Store(built).select("tokens < 30", out=built.parent / "fewer.view")
    return built.parent / "fewer.view", store


@pytest.mark.parametrize("to", HOMES)
def test_an_export_of_a_view_is_that_of_a_store_of_its_text(
    filtered: tuple[Path, Path], tmp_path: Path, to: str
) -> None:
    rows = to in ("mds", "litdata", "arrow", "parquet", "pt", "npz")
    trees = []
    for source in filtered:
        out = tmp_path / source.stem / "out"
        tokenmill.export(source, to=to, out=out, seq_len=16 if rows else None)
        store = Store(source, split=None)
        # Of which store they are is in some files of describing.
        contents = {store.of_split(split).content for split in store.manifest.splits}
        names = [str(out)]
        for content in contents:
            names += [content, content[:16], str(float(int(content[:8], 16)))]
        found = {}
        for path in sorted(out.rglob("*")):
            data = path.read_bytes() if path.is_file() else b""
            for name in names:
                data = data.replace(name.encode(), b"-")
            if ".tokenmill-export" not in path.parts:
                found[path.relative_to(out).as_posix()] = data
        trees.append(found)
    view, alone = trees
    assert view.keys() == alone.keys()
    assert [name for name in view if view[name] != alone[name]] == []
