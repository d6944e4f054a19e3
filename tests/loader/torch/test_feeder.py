"""The feeder on a CPU; what needs a CUDA device is in test_feeder_gpu.py."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.loader.stores import numbered_store
from tests.loader.torch.feeding import (
    ALL_FIELDS,
    LAYOUTS,
    assert_same,
    feeder_threads,
    make_loader,
    make_store,
    tokenmill_threads,
)

from tokenmill.errors import UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage
from tokenmill.torch import MOST_STEPS, DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    assert not tokenmill_threads()
    yield
    gc.collect()
    assert not tokenmill_threads()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def feed(loader: Loader, **options: Any) -> DeviceFeeder:
    return DeviceFeeder(loader, device="cpu", **options)


def wait_until_full(feeder: DeviceFeeder) -> None:
    """Let the thread read ahead as far as it may, or to the end."""
    ends = time.monotonic() + 10
    while feeder.num_ready < feeder.depth and feeder_threads() and time.monotonic() < ends:
        time.sleep(0.001)
    assert feeder.num_ready == feeder.depth or not feeder_threads()


@pytest.mark.parametrize("reuse_buffers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fed_tensors_are_the_loaders_batches(
    store: Path, layout: dict[str, Any], reuse_buffers: bool
) -> None:
    expected = list(make_loader(store, **layout))
    assert len(expected) > 10
    feeder = feed(
        make_loader(store, **layout),
        fields=ALL_FIELDS,
        reuse_buffers=reuse_buffers,
    )
    steps = []
    for batch, numpy_batch in zip(feeder, expected, strict=True):
        assert_same(batch, numpy_batch, ALL_FIELDS)
        shape = batch.max_seqlen, batch.num_documents, batch.attention_pairs
        assert shape == numpy_batch.attention_shape[1:]
        steps.append(batch.step)
    assert steps == list(range(len(expected)))


@pytest.mark.parametrize("reuse_buffers", [False, True])
@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_mixtures_are_fed_through_stages_that_change_the_shape(
    store: Path, tmp_path: Path, packing: str, reuse_buffers: bool
) -> None:
    other = tmp_path / "other"
    numbered_store(other, [[3] * 30, [50, 2]])
    mixture = Mixture(
        {"a": (store, 0.7), "b": (other, 0.3)},
        stages=[Stage(tokens=200), Stage(tokens=300, seq_len=16, weights={"a": 0.2, "b": 0.8})],
        max_epochs=3,
    )

    def make() -> Loader:
        return Loader(mixture, seq_len=8, batch_size=4, packing=packing, boundaries="mask")

    expected = list(make())
    assert {batch.input_ids.shape for batch in expected} == {(4, 8), (2, 16)}
    feeder = feed(make(), fields=ALL_FIELDS, reuse_buffers=reuse_buffers)
    for batch, numpy_batch in zip(feeder, expected, strict=True):
        assert_same(batch, numpy_batch, ALL_FIELDS)
        assert batch.max_seqlen == numpy_batch.max_seqlen


@pytest.mark.parametrize("last", ["pad", "keep", "drop"])
def test_the_last_batch_is_fed_as_the_loader_gives_it(store: Path, last: str) -> None:
    for rank in range(2):
        options = {"rank": rank, "world_size": 2, "last": last, "batch_size": 3, "epochs": 1}
        expected = list(make_loader(store, **options))
        feeder = feed(make_loader(store, **options), fields=ALL_FIELDS)
        for batch, numpy_batch in zip(feeder, expected, strict=True):
            assert_same(batch, numpy_batch, ALL_FIELDS)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_come_in_the_dtype_that_was_asked_for_at_any_depth(
    store: Path, depth: int, dtype: torch.dtype
) -> None:
    loader = make_loader(store, **LAYOUTS[1], dtype="stored")
    expected = make_loader(store, **LAYOUTS[1])
    fields = ("labels", "input_ids")
    for batch in feed(loader, depth=depth, dtype=dtype, fields=fields):
        assert {tensor.dtype for tensor in batch.values()} == {dtype}
        assert_same(batch, expected.batch(loader.step - 1), fields)


def test_fields_without_ids_are_fed_too(store: Path) -> None:
    loader = make_loader(store, packing="pad", pad_id=256)
    feeder = feed(loader, fields=("doc_ids",))
    assert_same(next(iter(feeder)), loader.batch(0), ("doc_ids",))


def test_batches_stay_as_they_are_unless_buffers_are_reused(store: Path) -> None:
    expected = list(make_loader(store, **LAYOUTS[1]))
    kept = list(feed(make_loader(store, **LAYOUTS[1]), fields=ALL_FIELDS))
    for batch, numpy_batch in zip(kept, expected, strict=True):
        assert_same(batch, numpy_batch, ALL_FIELDS)


def test_batches_are_kept_while_the_only_lane_is_used_many_times(store: Path) -> None:
    expected = list(make_loader(store, epochs=20, **LAYOUTS[1]))
    assert len(expected) > 10 * MOST_STEPS
    loader = make_loader(store, epochs=20, **LAYOUTS[1])
    kept = list(feed(loader, fields=ALL_FIELDS, depth=1))
    for batch, numpy_batch in zip(kept, expected, strict=True):
        assert_same(batch, numpy_batch, ALL_FIELDS)


def test_writing_to_a_batch_leaves_those_that_were_sent_with_it_alone(store: Path) -> None:
    loader = make_loader(store, **LAYOUTS[1])
    batches = list(feed(loader))
    weights = torch.ones(60_000, 2, requires_grad=True)
    loss = torch.nn.functional.embedding(batches[8].input_ids, weights).sum()
    for other in (batches[7], batches[9]):  # of one parcel: 7 to 14
        for tensor in other.values():
            tensor.zero_()
    loss.backward()  # would be refused if its saved ids counted as changed
    assert_same(batches[8], make_loader(store, **LAYOUTS[1]).batch(8), ("input_ids", "labels"))


def test_reused_buffers_lie_at_one_place(store: Path) -> None:
    loader = make_loader(store, **LAYOUTS[1])
    feeder = feed(loader, fields=ALL_FIELDS, reuse_buffers=True)
    places: dict[str, set[tuple[int, torch.Size]]] = {name: set() for name in ALL_FIELDS}
    for batch in feeder:
        for name, tensor in batch.items():
            places[name].add((tensor.data_ptr(), tensor.shape))
    assert loader.step > 2
    # Each size of cu_seqlens has a place of its own.
    sizes = {shape for _, shape in places["cu_seqlens"]}
    assert len(sizes) == 2
    assert [len(places[name]) for name in ALL_FIELDS] == [1, 1, 1, 1, 2, 1]


def test_the_state_is_what_was_consumed_however_much_was_read(store: Path) -> None:
    expected = [batch.input_ids for batch in make_loader(store)]
    for consumed in range(len(expected)):
        loader = make_loader(store)
        feeder = feed(loader, depth=4)
        batches = iter(feeder)
        for _ in range(consumed):
            next(batches)
        wait_until_full(feeder)
        state = feeder.state_dict()
        plain = make_loader(store)
        plain.seek(consumed)
        assert state == loader.state_dict() == plain.state_dict()

        other = feed(make_loader(store))
        other.load_state_dict(state)
        rest = [batch.input_ids.tolist() for batch in other]
        assert rest == [ids.tolist() for ids in expected[consumed:]]
        feeder.close()


def test_iterating_again_goes_on_and_begins_anew_after_the_end(store: Path) -> None:
    loader = make_loader(store)
    feeder = feed(loader)
    steps: list[int | None] = []
    for _ in range(3):
        for batch in feeder:
            steps.append(batch.step)
            if len(steps) % 4 == 0:
                break
        assert not feeder_threads()
    assert steps == list(range(12))
    rest = [batch.step for batch in feeder]
    assert rest == list(range(12, len(loader)))
    assert [batch.step for batch in feeder] == [*steps, *rest]


def test_a_state_of_the_end_has_nothing_after_it(store: Path) -> None:
    feeder = feed(make_loader(store))
    list(feeder)
    feeder.load_state_dict(feeder.state_dict())
    assert list(feeder) == []


def test_an_iterator_follows_its_loader(store: Path) -> None:
    loader = make_loader(store)
    feeder = feed(loader)
    batches = iter(feeder)
    start = feeder.state_dict()
    assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    loader.seek(9)
    assert [next(batches).step for _ in range(2)] == [9, 10]
    feeder.load_state_dict(start)
    assert [next(batches).step for _ in range(2)] == [0, 1]
    assert len(feeder_threads()) == 1
    feeder.close()


@pytest.mark.parametrize("reuse_buffers", [False, True])
def test_a_seek_inside_a_parcel_is_followed(store: Path, reuse_buffers: bool) -> None:
    loader = make_loader(store)
    expected = list(make_loader(store))
    batches = iter(feed(loader, reuse_buffers=reuse_buffers))
    for first, last in [(0, 9), (11, 12), (8, 10), (8, len(expected))]:
        loader.seek(first)
        for step in range(first, last):
            batch = next(batches)
            assert batch.step == step
            assert_same(batch, expected[step], ("input_ids", "labels"))
    assert next(batches, None) is None


def test_a_state_of_another_batch_size_is_followed_even_at_the_same_step(store: Path) -> None:
    large = make_loader(store, batch_size=4)
    large.seek(3)
    loader = make_loader(store)
    feeder = feed(loader)
    batches = iter(feeder)
    assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    feeder.load_state_dict(large.state_dict())
    assert loader.step == 3
    rows = next(batches).input_ids.tolist() + next(batches).input_ids.tolist()
    assert rows == large.batch(3).input_ids.tolist()
    feeder.close()


def test_reading_ahead_begins_before_the_first_batch_is_asked_for(store: Path) -> None:
    feeder = feed(make_loader(store))
    batches = iter(feeder)
    wait_until_full(feeder)
    next(batches)
    waited = feeder.last_wait_seconds
    assert 0 <= waited == feeder.wait_seconds
    next(batches)
    assert feeder.wait_seconds == waited + feeder.last_wait_seconds
    feeder.close()


def test_an_endless_loader_crosses_epochs(store: Path) -> None:
    loader = make_loader(store, epochs=None)
    expected = make_loader(store, epochs=None)
    for batch in feed(loader):
        assert_same(batch, expected.batch(loader.step - 1), ("input_ids", "labels"))
        if loader.step == 60:
            break
    assert loader.step == 60


def test_a_dropped_iterator_takes_its_thread_along(store: Path) -> None:
    feeder = feed(make_loader(store))
    batches = iter(feeder)
    next(batches)
    assert len(feeder_threads()) == 1
    del batches
    assert not feeder_threads()
    unused = iter(feeder)
    assert len(feeder_threads()) == 1
    del unused
    assert not feeder_threads()


def test_a_dropped_feeder_takes_its_thread_along(store: Path) -> None:
    for batch in feed(make_loader(store, epochs=None)):
        assert batch.step == 0
        break
    assert not feeder_threads()


def test_an_iterator_in_a_cycle_is_collected_with_its_thread(store: Path) -> None:
    cycle: list[object] = [iter(feed(make_loader(store, epochs=None)))]
    cycle.append(cycle)
    assert len(feeder_threads()) == 1
    del cycle
    gc.collect()
    assert not feeder_threads()


def test_an_exception_in_the_loop_ends_the_thread(store: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        feed(make_loader(store, epochs=None)) as feeder,
    ):
        for _ in feeder:
            raise ZeroDivisionError
    assert not feeder_threads()


def test_a_closed_feeder_says_so_and_can_be_iterated_again(store: Path) -> None:
    loader = make_loader(store)
    feeder = feed(loader)
    batches = iter(feeder)
    next(batches)
    feeder.close()
    feeder.close()
    assert not feeder_threads()
    with pytest.raises(UsageError, match="was closed, or iterated anew"):
        next(batches)
    assert next(iter(feeder)).step == 1


def test_two_iterators_do_not_share_one_loader(store: Path) -> None:
    feeder = feed(make_loader(store))
    first = iter(feeder)
    next(first)
    second = iter(feeder)
    with pytest.raises(UsageError, match="iterated anew"):
        next(first)
    assert next(second).step == 1
    feeder.close()


def test_an_error_in_the_thread_is_raised_where_the_batch_is_asked_for(tmp_path: Path) -> None:
    store = tmp_path / "store"
    numbered_store(store, [[40] * 4, [40] * 4])
    loader = make_loader(store, shuffle=False, epochs=1)
    second = sorted(store.rglob("*.bin"))[1]
    second.unlink()
    steps: list[int | None] = []
    with pytest.raises(Exception, match=second.stem) as caught:
        steps.extend(batch.step for batch in feed(loader))
    assert steps == list(range(len(steps)))
    assert len(steps) >= 5
    assert loader.step == len(steps)
    functions = [entry.name for entry in caught.traceback]
    assert "_produce" in functions
    assert not feeder_threads()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"depth": 0}, "depth=0"),
        ({"device": "meta"}, "no way to the device 'meta'"),
        ({"fields": ("ids",)}, "no fields"),
        pytest.param(
            {"device": "cuda"},
            "finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
    ],
)
def test_wrong_options_are_refused(store: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        DeviceFeeder(make_loader(store), **options)


SCRIPT = """
import gc, os, signal, sys, threading, time
from tokenmill.loader.loader import Loader
from tokenmill.torch import MOST_STEPS, DeviceFeeder

loader = Loader(sys.argv[1], seq_len=8, batch_size=2)
feeder = DeviceFeeder(loader, device="cpu")
"""


def run_script(body: str, store: Path, *, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body), str(store)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expect, done.stderr
    assert "Fatal" not in done.stderr
    return done.stdout


def test_ctrl_c_while_waiting_or_working_leaves_no_thread(store: Path) -> None:
    out = run_script(
        """
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for batch in feeder:
                time.sleep(0.0001)
        except KeyboardInterrupt:
            print("interrupted at", loader.step > 0)
        gc.collect()
        print([thread.name for thread in threading.enumerate()])
        batch = next(iter(feeder))
        print(batch.step == loader.step - 1)
        """,
        store,
    )
    assert out.splitlines() == ["interrupted at True", "['MainThread']", "True"]


def test_the_interpreter_exits_with_an_iterator_in_use(store: Path) -> None:
    out = run_script("batches = iter(feeder); print(next(batches).step)", store)
    assert out == "0\n"


def test_the_interpreter_exits_by_an_exception_in_the_loop(store: Path) -> None:
    run_script("for batch in feeder: 1 / 0", store, expect=1)


def test_a_forked_process_is_told_instead_of_waiting_forever(store: Path) -> None:
    out = run_script(
        """
        batches = iter(feeder)
        for _ in range(10):
            next(batches)
        child = os.fork()
        if child == 0:
            try:
                for _ in range(200):  # what was sent before is there
                    next(batches)
            except Exception as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(next(batches).step)
        """,
        store,
    )
    assert "this process was forked" in out.splitlines()[0]
    assert out.splitlines()[1] == "10"
