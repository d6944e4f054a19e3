from __future__ import annotations

import gc
import json
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store
from tests.store.samples import GOLDEN

from tokenmill.errors import StateError, StoreError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenmill.loader.batch import Batch

LENGTHS = [[3, 5, 1, 30], [], [7, 7], [2, 2, 1, 1, 19]]
PACKINGS = ["concat", "best-fit", "pad"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return numbered_store(tmp_path_factory.mktemp("loader") / "store", LENGTHS)


def make(store: Store | Path | Mixture, **changes: Any) -> Loader:
    return Loader(store, **{"seq_len": 8, "batch_size": 2, "prefetch": 0, **changes})


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    return [next(batches) for _ in range(count)]


def cells(batches: Sequence[Batch]) -> list[list[tuple[int, int, int]]]:
    """Source, epoch and row of every row of every batch."""
    return [
        list(zip(b.sources.tolist(), b.epochs.tolist(), b.rows.tolist(), strict=True))
        for b in batches
    ]


def test_a_row_of_concat_carries_its_labels_once(store: Store) -> None:
    loader = make(store, shuffle=False)
    batch = next(iter(loader))
    assert batch.tokens.tolist() == [[*range(9)], [*range(8, 17)]]
    assert batch.tokens.dtype == np.uint16
    assert batch.input_ids.tolist() == [[*range(8)], [*range(8, 16)]]
    assert batch.labels.tolist() == [[*range(1, 9)], [*range(9, 17)]]
    assert [batch.input_ids.dtype, batch.labels.dtype] == [np.int64, np.int64]
    assert batch.loss_mask.all()


def test_borders_are_those_of_the_documents(store: Store) -> None:
    batch = next(iter(make(store, shuffle=False, boundaries="mask")))
    # Documents begin at 0, 3, 8 and 9.
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]]
    assert batch.cu_seqlens[:5].tolist() == [0, 3, 8, 9, 16]
    assert set(batch.cu_seqlens[5:].tolist()) <= {16}
    assert (batch.max_seqlen, batch.num_documents) == (8, 4)
    assert batch.attention_pairs == 6 + 15 + 1 + 28
    assert batch.labels.tolist() == [
        [1, 2, -100, 4, 5, 6, 7, -100],
        [-100, 10, 11, 12, 13, 14, 15, 16],
    ]
    assert (batch.loss_mask == (batch.labels != -100)).all()


def test_ids_in_their_stored_width_are_views(store: Store) -> None:
    batch = next(iter(make(store, dtype="stored")))
    assert batch.input_ids.dtype == np.uint16
    assert np.shares_memory(batch.input_ids, batch.tokens)
    assert np.shares_memory(batch.labels, batch.tokens)
    assert (batch.labels[:, :-1] == batch.input_ids[:, 1:]).all()


def test_the_last_row_of_concat_is_padded_and_its_padding_does_not_count(store: Store) -> None:
    assert store.num_tokens == 78
    batch = make(store, shuffle=False, epochs=1).batch(4)
    assert batch.input_ids[1].tolist() == [72, 73, 74, 75, 76, 77, 256, 256]
    assert batch.labels[1].tolist() == [73, 74, 75, 76, 77, -100, -100, -100]
    assert batch.doc_ids[1].tolist() == [0, 0, 0, 0, 0, 0, -1, -1]
    assert batch.loss_mask[1].tolist() == [True] * 5 + [False] * 3


def test_pad_has_one_document_to_a_row(store: Store) -> None:
    batches = list(make(store, packing="pad", shuffle=False, epochs=1, pad_id=9, batch_size=4))
    assert [len(batch.tokens) for batch in batches] == [4, 4, 4]
    assert batches[0].input_ids.tolist()[:2] == [[0, 1, 2, *[9] * 5], [3, 4, 5, 6, 7, *[9] * 3]]
    assert batches[0].labels.tolist()[:2] == [[1, 2, *[-100] * 6], [4, 5, 6, 7, *[-100] * 4]]
    assert batches[0].input_ids.tolist()[3] == [*range(9, 17)], "30 tokens are cut off"
    assert batches[2].rows.tolist() == [8, 9, 10, -1]
    assert (batches[2].labels[3] == -100).all()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [True, "block", False])
def test_every_epoch_has_every_row_once(store: Store, packing: str, shuffle: bool | str) -> None:
    loader = make(store, packing=packing, shuffle=shuffle, epochs=2, batch_size=3)
    seen = [cell for batch in cells(list(loader)) for cell in batch if cell[2] >= 0]
    (layout,) = loader.layouts()
    assert sorted(seen) == [(0, e, row) for e in (0, 1) for row in range(layout.num_rows)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), max_size=8), min_size=1, max_size=4),
    seq_len=st.integers(1, 24),
    packing=st.sampled_from(PACKINGS),
    mask=st.booleans(),
    batch_size=st.integers(1, 4),
)
def test_all_fields_follow_from_documents(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    seq_len: int,
    packing: str,
    mask: bool,
    batch_size: int,
) -> None:
    if not any(map(sum, lengths)):
        lengths = [*lengths, [1]]
    store = numbered_store(tmp_path_factory.mktemp("fields") / "store", lengths)
    document_of = [k for k, n in enumerate(store.lengths().tolist()) for _ in range(n)]
    pad = len(document_of) + 1
    loader = Loader(
        store,
        seq_len=seq_len,
        batch_size=batch_size,
        packing=packing,
        boundaries="mask" if mask else "keep",
        epochs=1,
        pad_id=pad,
        prefetch=0,
    )
    targets: list[int] = []
    for batch in loader:
        check_fields(batch, document_of, pad=pad, mask=mask)
        targets += batch.labels[batch.loss_mask].tolist()
    if mask or packing != "best-fit":
        assert len(targets) == len(set(targets)), "no label is learnt from twice"
    account = loader.layouts()[0].account()
    if mask:
        assert len(targets) == account.targets
    if packing == "concat" and not mask:
        assert sorted(targets) == list(range(1, len(document_of)))


def check_fields(batch: Batch, document_of: list[int], *, pad: int, mask: bool) -> None:
    """Compare every field with what a walk over the tokens gives."""
    rows, seq_len = batch.input_ids.shape
    starts = [0]
    for r in range(rows):
        tokens = batch.tokens[r].tolist()
        owners = [-1 if t == pad else document_of[t] for t in tokens]
        # A document may follow itself in a row only as consecutive tokens.
        new = [t == 0 or owners[t] != owners[t - 1] for t in range(seq_len + 1)]
        number, place = -1, 0
        for t in range(seq_len):
            number, place = (number + 1, 0) if new[t] else (number, place + 1)
            if new[t]:
                starts.append(r * seq_len + t)
            assert batch.position_ids[r, t] == place
            assert batch.doc_ids[r, t] == (-1 if owners[t] < 0 else number)
            counts = owners[t + 1] >= 0 and not (mask and new[t + 1])
            assert batch.loss_mask[r, t] == counts
            assert batch.labels[r, t] == (tokens[t + 1] if counts else -100)
    borders = sorted(set(starts))
    assert batch.cu_seqlens[: len(borders)].tolist() == borders
    assert set(batch.cu_seqlens[len(borders) :].tolist()) == {rows * seq_len}


@settings(deadline=None, max_examples=40)
@given(
    packing=st.sampled_from(PACKINGS),
    shuffle=st.sampled_from([True, "block", False]),
    batch=st.sampled_from([(24, 1), (12, 2), (8, 3), (6, 4), (3, 8)]),
    again=st.sampled_from([(24, 1), (12, 2), (8, 3), (6, 4), (3, 8), (5, 2), (1, 1)]),
    at=st.integers(0, 6),
)
def test_resume_on_any_world_size_goes_on_with_the_next_row(
    store: Store,
    packing: str,
    shuffle: bool | str,
    batch: tuple[int, int],
    again: tuple[int, int],
    at: int,
) -> None:
    def ranks(size: int, world: int) -> list[Loader]:
        return [
            make(store, batch_size=size, rank=r, world_size=world, packing=packing, shuffle=shuffle)
            for r in range(world)
        ]

    whole = stream_of(ranks(1, 1), 400)
    before = ranks(*batch)
    read = stream_of(before, at)
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    after = ranks(*again)
    for loader in after:
        loader.load_state_dict(json.loads(json.dumps(states[0])))
    read += stream_of(after, 5)
    assert read == whole[: len(read)]


def stream_of(loaders: Sequence[Loader], steps: int) -> list[tuple[int, int, int]]:
    """The rows of so many global batches, rank after rank."""
    iterators = [iter(loader) for loader in loaders]
    batches = [next(iterator) for _ in range(steps) for iterator in iterators]
    return [cell for batch in cells(batches) for cell in batch]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetching_and_random_access_give_the_same_batches(store: Store, prefetch: int) -> None:
    loader = make(store, prefetch=prefetch, epochs=7)
    batches = list(loader)
    assert [batch.step for batch in batches] == list(range(len(loader)))
    for batch in batches:
        alone = loader.batch(batch.step)
        assert alone.tokens.tolist() == batch.tokens.tolist()
        assert alone.position_ids.tolist() == batch.position_ids.tolist()
    strided = [batch.step for batch in loader.batches(first=3, stride=4)]
    assert strided == list(range(3, len(loader), 4))


def test_the_last_batch_is_padded_kept_or_dropped_by_choice(store: Store) -> None:
    sizes = {
        last: [len(b.tokens) for b in make(store, batch_size=4, epochs=1, last=last)]
        for last in ("pad", "keep", "drop")
    }
    assert sizes == {"pad": [4, 4, 4], "keep": [4, 4, 2], "drop": [4, 4]}
    padded = make(store, batch_size=4, epochs=1).batch(2)
    assert (padded.rows == -1).tolist() == [False, False, True, True]
    assert (padded.labels[2:] == -100).all()
    empty = make(store, batch_size=6, world_size=2, rank=1, epochs=1, last="keep").batch(0)
    assert empty.input_ids.shape == (4, 8)
    none = make(store, batch_size=10, world_size=2, rank=1, epochs=1, last="keep").batch(0)
    assert none.input_ids.shape == none.position_ids.shape == none.labels.shape == (0, 8)


def test_a_finite_loader_begins_anew_and_an_endless_one_goes_on(store: Store) -> None:
    finite = make(store, epochs=1)
    assert cells(list(finite)) == cells(list(finite))
    assert len(finite) == finite.num_steps == 5
    endless = make(store)
    first = cells(take(iter(endless), 3))
    second = cells(take(iter(endless), 3))
    assert first + second == cells(take(make(store).batches(), 6))
    with pytest.raises(TypeError, match="never ends"):
        len(endless)


def test_a_run_that_ended_stays_ended_when_it_is_resumed(store: Store) -> None:
    finite = make(store, epochs=1)
    assert len(list(finite)) == 5
    again = make(store, epochs=1)
    again.load_state_dict(finite.state_dict())
    assert list(again) == []


def test_state_is_what_was_consumed_not_what_was_read_ahead(store: Store) -> None:
    loader = make(store, prefetch=4)
    take(iter(loader), 3)
    assert loader.step == loader.state_dict()["step"] == 3
    assert loader.state_dict()["seen"] == {"": {"rows": 6, "tokens": 48, "epochs": 0.6}}


def test_the_state_of_something_else_is_refused(store: Store, tmp_path: Path) -> None:
    loader = make(store)
    take(iter(loader), 2)
    state = loader.state_dict()
    other_store = numbered_store(tmp_path / "other", [[*LENGTHS[0], 1], *LENGTHS[1:]])
    for changed, reason in (
        (make(other_store), "the store does not hold what it held"),
        (make(store, seed=1), "seed=0, and this loader has seed=1"),
        (make(store, packing="pad"), "packing"),
        (make(store, shuffle=False), "shuffle"),
        (make(store, seq_len=16), "seq_len=8, and this loader has seq_len=16"),
    ):
        with pytest.raises(StateError, match=reason):
            changed.load_state_dict(state)
    for damaged, reason in (
        ({**state, "version": 99}, "version 99"),
        ({**state, "order": 0}, "order 0"),
        ({**state, "step": 3}, "was changed after it was saved"),
        ({k: v for k, v in state.items() if k != "position"}, "position is missing or unknown"),
        ({**state, "seed": {1}}, "holds what no loader saves"),
        ([], "no state of a loader"),
    ):
        with pytest.raises(StateError, match=reason):
            loader.load_state_dict(damaged)  # type: ignore[arg-type]
    assert loader.step == 2, "a refused state changes nothing"


def test_a_state_that_makes_no_sense_is_refused_as_a_state(store: Store) -> None:
    state = make(store).state_dict()
    for stage in (-5, 7, "x"):
        with pytest.raises(StateError):
            make(store).load_state_dict(
                {**state, "position": {**state["position"], "stage": stage}}
            )


def test_a_run_may_be_made_longer_when_it_is_resumed(store: Store) -> None:
    short, long = make(store, epochs=1), make(store, epochs=3)
    assert len(list(short)) == 5
    long.load_state_dict(short.state_dict())
    assert cells(list(long)) == cells(list(make(store, epochs=3).batches(first=5)))


def test_an_iteration_keeps_its_plan_when_the_loader_is_moved(store: Store) -> None:
    begun = make(store, batch_size=3)
    take(iter(begun), 4)
    resumed = make(store, batch_size=2)
    resumed.load_state_dict(begun.state_dict())
    expected = cells(take(resumed.batches(), 2500))
    moved = resumed.batches()
    first = take(moved, 1)
    resumed.seek(0)
    assert cells(first) + cells(take(moved, 2499)) == expected


def test_a_split_that_is_not_the_open_one_is_refused(tmp_path: Path) -> None:
    layout = GOLDEN.write(tmp_path / "store")
    val = Store(layout.root, split="val")
    assert make(val, seq_len=2).mixture.stores[0].split == "val"
    with pytest.raises(UsageError, match="has the splits 'train', 'val', and none was asked for"):
        make(layout.root, seq_len=2)
    assert make(layout.root, seq_len=2, split="train").mixture.stores[0].split == "train"
    assert make(layout.root, seq_len=2, split="val").mixture.stores[0].split == "val"
    with pytest.raises(UsageError, match="split='train' was asked for"):
        make(val, seq_len=2, split="train")
    with pytest.raises(UsageError, match="says nothing of a mixture"):
        make(Mixture({"a": (val, 1)}), seq_len=2, split="val")


def test_a_damaged_plan_is_an_error_not_other_tokens(tmp_path: Path) -> None:
    store = numbered_store(tmp_path / "store", LENGTHS)
    loader = make(store, packing="best-fit", epochs=1)
    (path,) = (tmp_path / "store/layouts").iterdir()
    data = bytearray(path.read_bytes())
    items = loader.layouts()[0]._items  # type: ignore[attr-defined]
    at = data.index(items.tobytes())
    data[at + 7] ^= 0x10  # the position of the first item: far behind the end
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is after the last of its 78 tokens"):
        list(make(Store(tmp_path / "store"), packing="best-fit", epochs=1))


def test_a_dropped_loader_frees_its_maps_at_once(store: Store) -> None:
    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(store.path))

    if sys.platform != "linux":
        pytest.skip("needs /proc/self/maps")
    before = num_maps()
    gc.disable()
    try:
        for _ in range(5):
            make(store).batch(0)
        assert num_maps() <= before + len(store.shards)
    finally:
        gc.enable()


def test_rows_of_a_step_name_documents_and_input_rows(store: Store) -> None:
    loader = make(store, shuffle=False)
    first, second = loader.rows(0)
    assert (first.source, first.epoch, first.row) == ("", 0, 0)
    assert [(p.document, p.first_token, p.tokens, p.at) for p in first.parts] == [
        (0, 0, 3, 0),
        (1, 0, 5, 3),
        (2, 0, 1, 8),
    ]
    assert [(p.document, p.first_token, p.tokens, p.at) for p in second.parts] == [
        (2, 0, 1, 0),
        (3, 0, 8, 1),
    ]
    assert (second.parts[1].source.path, second.parts[1].source.row) == ("part-0.jsonl", 3)
    for step in (5, 700):
        batch = loader.batch(step)
        for origin, tokens in zip(loader.rows(step), batch.tokens.tolist(), strict=True):
            for part in origin.parts:
                document = store[part.document][part.first_token :][: part.tokens]
                assert tokens[part.at : part.at + part.tokens] == document.tolist()


def test_shapes_never_change_but_those_of_cu_seqlens_which_are_few(tmp_path: Path) -> None:
    lengths = [[length] for length in np.random.default_rng(0).geometric(1 / 40, 1200).tolist()]
    store = numbered_store(tmp_path / "store", lengths)
    for packing in PACKINGS:
        loader = make(store, packing=packing, seq_len=256, batch_size=4)
        batches = take(iter(loader), 50)
        sizes = [len(batch.cu_seqlens) for batch in batches]
        for batch, size in zip(batches, sizes, strict=True):
            possible = [each for each in loader.cu_seqlens_sizes() if each > batch.num_documents]
            assert size == possible[0]
        # Rows of best-fit that hold the shortest documents alone have many more than others.
        assert len(set(sizes)) <= (6 if packing == "best-fit" else 4)
        assert sum(size in loader.cu_seqlens_sizes()[:3] for size in sizes) >= 40
        most = loader.cu_seqlens_sizes()[-1]
        assert most > 4 * {"concat": 256, "best-fit": 256, "pad": 2}[packing]


def test_what_a_batch_says_of_its_documents_is_counted_in_them(tmp_path: Path) -> None:
    store = numbered_store(tmp_path / "store", [[3, 700, 1, 0, 9, 400, 2, 130, 5, 60], [1] * 900])
    longest = set()
    for packing in PACKINGS:
        loader = make(store, packing=packing, seq_len=300, batch_size=2, epochs=1, last="keep")
        for batch in loader:
            lengths = [length for length in np.diff(batch.cu_seqlens).tolist() if length]
            assert sum(lengths) == batch.input_ids.size
            assert batch.num_documents == len(lengths)
            assert batch.attention_pairs == sum(n * (n + 1) // 2 for n in lengths)
            assert batch.max_seqlen in (128, 256, 300)
            assert max(lengths) <= batch.max_seqlen
            assert batch.max_seqlen == 128 or max(lengths) > batch.max_seqlen // 2
            longest.add(batch.max_seqlen)
            copy = pickle.loads(pickle.dumps(batch))
            assert copy.attention_shape == batch.attention_shape
    assert longest == {128, 256, 300}


def test_sizes_of_cu_seqlens_can_be_given(store: Store) -> None:
    loader = make(store, cu_seqlens_capacity=[4, 3])
    assert loader.cu_seqlens_sizes() == (3, 4)
    batches = take(iter(loader), 30)
    assert {len(batch.cu_seqlens) for batch in batches} == {3, 4, 8}
    assert len(make(store, cu_seqlens_capacity=40).batch(0).cu_seqlens) == 40
    for wrong in (1, [], [8, 1], 2.5, "8"):
        with pytest.raises(UsageError, match="cu_seqlens_capacity="):
            make(store, cu_seqlens_capacity=wrong)


def test_a_loader_and_its_batches_survive_pickling(store: Store) -> None:
    loader = make(store, packing="best-fit")
    take(iter(loader), 2)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.state_dict() == loader.state_dict()
    batch = pickle.loads(pickle.dumps(next(iter(copy))))
    assert batch.doc_ids.tolist() == loader.batch(2).doc_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"rank": 1}, "rank=1 is not one of the 1 ranks"),
        ({"packing": "first-fit"}, "there is no packing 'first-fit'"),
        ({"boundaries": "cut"}, "boundaries='cut'"),
        ({"last": "wrap"}, "last='wrap'"),
        ({"dtype": "uint8"}, "dtype='uint8'"),
        ({"pad_id": 60_000}, "pad_id=60000"),
        ({"seed": "a"}, "seed='a'"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"epochs": 0}, "epochs=0 is not a number above 0"),
        ({"epochs": 0.01}, "make no batch"),
        ({"epochs": 1, "batch_size": 50, "last": "drop"}, "make no batch of 50 with last='drop'"),
        ({"seq_len": 2**40}, "more than any document can have"),
        ({"dtype": []}, "dtype="),
    ],
)
def test_what_makes_no_sense_is_refused(
    store: Store, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        make(store, **changes)
