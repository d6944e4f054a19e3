"""The feeder on a CUDA device: the same tensors, no waiting, and no memory rewritten too early.

Run by hand, on a machine that has one: python -m pytest -m gpu tests/loader/torch
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.loader.torch.feeding import (
    ALL_FIELDS,
    LAYOUTS,
    assert_same,
    make_loader,
    make_store,
    tokenmill_threads,
)

from tokenmill.torch import DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLEEP_CYCLES = 20_000_000
"""About ten milliseconds of device time: far longer than the host needs for a batch."""
MODES = [
    pytest.param({}, id="fresh"),
    pytest.param({"reuse_buffers": True}, id="reused"),
]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    assert not tokenmill_threads()


@pytest.fixture(params=[False, True], ids=["plain", "masked"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_store(tmp_path, has_mask=request.param)


def sleep_on(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)


def copy_stream(feeder: DeviceFeeder) -> torch.cuda.Stream:
    stream = feeder._stream
    assert isinstance(stream, torch.cuda.Stream)
    return stream


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fed_tensors_are_the_loaders_batches(
    store: Path, layout: dict[str, Any], mode: dict[str, Any]
) -> None:
    expected = list(make_loader(store, **layout))
    feeder = DeviceFeeder(make_loader(store, **layout), fields=ALL_FIELDS, **mode)
    assert feeder.device.type == "cuda"
    for batch, numpy_batch in zip(feeder, expected, strict=True):
        assert {tensor.device for tensor in batch.values()} == {feeder.device}
        assert_same(batch, numpy_batch, ALL_FIELDS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS[1:3])
def test_consuming_never_waits_for_the_device(
    store: Path, layout: dict[str, Any], mode: dict[str, Any]
) -> None:
    loader = make_loader(store, epochs=None, **layout)
    feeder = DeviceFeeder(loader, fields=ALL_FIELDS, **mode)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    expected = 0
    for batch in feeder:
        if batch.step == 10:  # buffers are allocated and kernels are loaded by now
            torch.cuda.set_sync_debug_mode("error")
        total += batch.input_ids.sum() + batch.position_ids.sum()
        if batch.step == 59:
            break
    torch.cuda.set_sync_debug_mode("default")
    for step in range(60):
        numpy_batch = loader.batch(step)
        expected += int(numpy_batch.input_ids.sum()) + int(numpy_batch.position_ids.sum())
    assert int(total) == expected


@pytest.mark.parametrize("mode", MODES)
def test_pinned_memory_is_not_rewritten_before_its_copy(store: Path, mode: dict[str, Any]) -> None:
    layout = LAYOUTS[1]
    feeder = DeviceFeeder(
        make_loader(store, epochs=None, **layout), fields=ALL_FIELDS, depth=2, **mode
    )
    expected = make_loader(store, epochs=None, **layout)
    results = []
    for batch in feeder:
        sleep_on(copy_stream(feeder))
        results.append({name: tensor.clone() for name, tensor in batch.items()})
        if len(results) == 60:  # several parcels of every lane
            break
    for step, result in enumerate(results):
        assert_same(result, expected.batch(step), ALL_FIELDS)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_not_overwritten_before_it_is_read(store: Path, mode: dict[str, Any]) -> None:
    layout = LAYOUTS[1]
    feeder = DeviceFeeder(
        make_loader(store, epochs=None, **layout), fields=ALL_FIELDS, depth=2, **mode
    )
    expected = make_loader(store, epochs=None, **layout)
    results = []
    for batch in feeder:
        # The host goes on at once; the device reads the batch long after.
        sleep_on(torch.cuda.current_stream())
        results.append({name: tensor.clone() for name, tensor in batch.items()})
        if len(results) == 60:  # several parcels of every lane
            break
    for step, result in enumerate(results):
        assert_same(result, expected.batch(step), ALL_FIELDS)


@pytest.mark.parametrize("mode", MODES)
def test_batches_can_be_consumed_on_another_stream(store: Path, mode: dict[str, Any]) -> None:
    loader = make_loader(store, **LAYOUTS[2])
    expected = list(make_loader(store, **LAYOUTS[2]))
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in DeviceFeeder(loader, fields=ALL_FIELDS, **mode):
            sleep_on(torch.cuda.current_stream())
            results.append({name: tensor.clone() for name, tensor in batch.items()})
    torch.cuda.synchronize()
    for result, numpy_batch in zip(results, expected, strict=True):
        assert_same(result, numpy_batch, ALL_FIELDS)


@pytest.mark.parametrize("mode", MODES)
def test_the_stream_may_change_inside_a_parcel(store: Path, mode: dict[str, Any]) -> None:
    loader = make_loader(store, epochs=8, **LAYOUTS[1])
    expected = list(make_loader(store, epochs=8, **LAYOUTS[1]))
    feeder = DeviceFeeder(loader, fields=ALL_FIELDS, **mode)
    batches, streams = iter(feeder), [torch.cuda.Stream() for _ in range(3)]
    results = []
    for step in range(len(expected)):
        before, stream = streams[step // 2 % 3 - 1], streams[step // 2 % 3]
        stream.wait_stream(before)  # buffers that are reused belong to the stream before
        with torch.cuda.stream(stream):
            batch = next(batches)
            sleep_on(copy_stream(feeder))
            results.append({name: tensor.clone() for name, tensor in batch.items()})
            del batch
    torch.cuda.synchronize()
    for result, numpy_batch in zip(results, expected, strict=True):
        assert_same(result, numpy_batch, ALL_FIELDS)


@pytest.mark.parametrize("mode", MODES)
def test_parcels_that_are_dropped_by_a_seek_are_not_read_any_more(
    store: Path, mode: dict[str, Any]
) -> None:
    loader = make_loader(store, epochs=None, **LAYOUTS[1])
    expected = make_loader(store, epochs=None, **LAYOUTS[1])
    batches = iter(DeviceFeeder(loader, fields=ALL_FIELDS, **mode))
    steps = [*range(10), *range(12, 14), *range(8, 30), *range(3)]
    results = []
    for step in steps:
        if loader.step != step:
            loader.seek(step)
        sleep_on(torch.cuda.current_stream())  # reads begin long after the seek
        results.append({name: tensor.clone() for name, tensor in next(batches).items()})
    for step, result in zip(steps, results, strict=True):
        assert_same(result, expected.batch(step), ALL_FIELDS)


@pytest.mark.parametrize("depth", [1, 3])
def test_kept_batches_stay_as_they_are(store: Path, depth: int) -> None:
    expected = list(make_loader(store, epochs=20, **LAYOUTS[1]))
    loader = make_loader(store, epochs=20, **LAYOUTS[1])
    kept = list(DeviceFeeder(loader, fields=ALL_FIELDS, depth=depth))
    assert len(kept) > 150
    for batch, numpy_batch in zip(kept, expected, strict=True):
        assert_same(batch, numpy_batch, ALL_FIELDS)


def test_reused_buffers_feed_a_cuda_graph(store: Path) -> None:
    loader = make_loader(store, epochs=None, **LAYOUTS[1])
    expected = make_loader(store, epochs=None, **LAYOUTS[1])
    feeder = DeviceFeeder(loader, reuse_buffers=True)
    batches = iter(feeder)
    first = next(batches)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # The feeder's thread goes on meanwhile: calls of other threads must not spoil the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = first.input_ids * 100_000 + first.labels
    for _ in range(50):
        batch = next(batches)
        assert batch.step is not None
        graph.replay()
        numpy_batch = expected.batch(batch.step)
        wanted = numpy_batch.input_ids * 100_000 + numpy_batch.labels
        assert result.cpu().numpy().tolist() == wanted.tolist()
