"""The trainer on a CUDA device: nothing waits, documents stay apart, memory errors have advice.

Run by hand, on a machine that has one: python -m pytest -m gpu tests/trainer
"""

from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.trainer.runs import SEQ_LEN, VOCAB, counting_store, losses_of, make_setup, make_trainer

import tokenmill
from tokenmill.errors import DeviceMemoryError
from tokenmill.stalls import StallMeter
from tokenmill.trainer.loop import LateReader, Trainer
from tokenmill.trainer.model import Model, find_kernels, try_kernels
from tokenmill.trainer.options import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenmill.store.reader import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def default_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return counting_store(tmp_path_factory.mktemp("store") / "store")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ["flash", "documents"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_in_a_step_waits_for_the_device(
    store: Store, compiled: bool, attention: str, checkpointing: bool
) -> None:
    setup = make_setup(
        device="cuda",
        micro_batch=8,
        accumulate=2,
        compile=compiled,
        attention=attention,
        checkpointing=checkpointing,
    )
    trainer, reader, meter = make_trainer(store, setup), LateReader(setup.device), StallMeter()
    trainer.feed(meter.watch(trainer._batches))
    for _ in range(20):  # compiled, and every lane of the feeder has its memory
        trainer.step()
    reader.begin(20)
    torch.cuda.set_sync_debug_mode("error")
    readings = []
    for step in range(21, 61):
        trainer.step()
        if step % 5 == 0:
            readings += list(reader.read())
            reader.send(step, trainer.row)
            meter.report()
    torch.cuda.set_sync_debug_mode("default")
    readings += list(reader.read(wait=True))
    assert [reading.step for reading in readings] == list(range(25, 61, 5))
    assert all(reading.seconds > 0 and reading.steps == 5 for reading in readings)
    assert readings[-1].row.loss < readings[0].row.loss


def test_a_compiled_model_is_the_plain_one(store: Store) -> None:
    said: dict[str, Any] = {"device": "cuda", "micro_batch": 8, "accumulate": 1}
    plain = losses_of(make_trainer(store, make_setup(compile=False, **said)), 10)
    compiled = losses_of(make_trainer(store, make_setup(compile=True, **said)), 10)
    assert compiled == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("kernel", find_kernels(torch.device("cuda"), torch.bfloat16))
def test_a_kernel_is_the_mask_of_documents(kernel: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        half = Model(
            PRESETS["mini"],
            vocab_size=VOCAB,
            seq_len=SEQ_LEN,
            dtype=torch.bfloat16,
            kernel=kernel,
        )
        full = Model(PRESETS["mini"], vocab_size=VOCAB, seq_len=SEQ_LEN)
    full.load_state_dict(half.state_dict())
    ids = torch.randint(0, VOCAB, (2, SEQ_LEN), device="cuda")
    borders = [0, 10, 32, 35, 64, 64, 64]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
    lengths = (10, 22, 3, 29)
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths]).view(2, SEQ_LEN)
    extent = torch.tensor([4, 29])
    loss, count = half(ids, ids, positions, cu_seqlens, extent)
    mask, mask_count = full(ids, ids, positions, cu_seqlens)  # float32: by a mask
    assert count == mask_count == 2 * SEQ_LEN
    assert float(loss.detach()) == pytest.approx(float(mask.detach()), rel=0.01)
    loss.backward()
    mask.backward()
    for ours, theirs in zip(half.parameters(), full.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        similar = torch.nn.functional.cosine_similarity(
            ours.grad.flatten(), theirs.grad.flatten(), dim=0
        )
        assert similar > 0.98


def test_kernels_are_tried_and_the_fastest_comes_first() -> None:
    names = find_kernels(torch.device("cuda"), torch.bfloat16)
    lengths = np.array([1000, 24, 3000, 72])
    found, problems = try_kernels(names, lengths=lengths, heads=4, width=64)
    assert not problems
    assert {each.kernel for each in found} == set(names)
    assert [each.milliseconds for each in found] == sorted(each.milliseconds for each in found)


def test_a_run_on_a_gpu_resumes(store: Store, tmp_path: Path) -> None:
    said: Any = {"model": "tiny", "seq_len": SEQ_LEN, "batch_tokens": 8 * SEQ_LEN, "log_every": 5}
    first = tokenmill.train(store, out=tmp_path / "run", steps=20, **said)
    second = tokenmill.train(store, out=tmp_path / "run", steps=40, resume=True, **said)
    assert second.resumed_from == 20
    assert second.loss < first.loss
    assert second.memory_bytes > 0


def test_running_out_of_memory_gives_advice(store: Store, tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match="out of memory on") as caught:
        tokenmill.train(
            store,
            model="large",
            seq_len=1024,
            micro_batch=4096,
            accumulate=1,
            compile=False,
            out=tmp_path / "run",
        )
    assert "--micro-batch 2048 --accumulate 2" in str(caught.value.hint)
    assert "--optimizer adamw8bit" in str(caught.value.hint)
    torch.cuda.empty_cache()


def test_a_cached_batch_is_learned_by_the_small_model() -> None:
    setup = make_setup(device="cuda", model="small", seq_len=256, micro_batch=4, accumulate=1)
    ids = torch.randint(0, VOCAB, (4, 256), device="cuda")
    trainer = Trainer(setup, batches=repeat(SimpleNamespace(input_ids=ids, labels=ids)))
    losses = losses_of(trainer, 15)
    assert losses[-1] < losses[0] / 2
