"""Steps: what they learn, that they add up, and that nothing in them waits for the device."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.trainer.runs import SEQ_LEN, counting_store, losses_of, make_setup, make_trainer
from torch.overrides import TorchFunctionMode

from tokenmill.errors import TrainingError
from tokenmill.loader.loader import Loader
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer.loop import LateReader, Trainer, freeze_collector, inputs_of
from tokenmill.trainer.model import scale_and_clip
from tokenmill.trainer.run import Checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenmill.store.reader import Store

WAITING = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.nonzero,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
    torch.nonzero,
    torch.equal,
    torch.allclose,
}
"""All that would make a host wait for a GPU, had the tensor been there."""


class NothingWaits(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls += 1
        assert func not in WAITING, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return counting_store(tmp_path_factory.mktemp("store") / "store")


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    """Those of one step, as the optimizer gets them."""
    found: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: found.extend(
            p.grad.clone() for p in trainer.model.parameters() if p.grad is not None
        )
    )
    trainer.step()
    assert found
    return found


def test_a_repeated_store_is_learned(store: Store) -> None:
    setup = make_setup(steps=60, micro_batch=16, accumulate=1)
    losses = losses_of(make_trainer(store, setup), 60)
    assert losses[0] > 4.5
    assert losses[-1] < 1.0


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize("attention", ["flash", "documents"])
def test_a_step_is_the_same_however_it_is_divided(
    store: Store, packing: str, attention: str
) -> None:
    """With padding and masks, micro-batches have different numbers of labels that count."""
    said: dict[str, Any] = {
        "packing": packing,
        "boundaries": "mask",
        "attention": attention,
        "clip": 1e9,
    }
    steps = []
    for micro_batch, accumulate in ((8, 1), (4, 2), (2, 4)):
        setup = make_setup(micro_batch=micro_batch, accumulate=accumulate, **said)
        trainer = make_trainer(store, setup)
        steps.append((gradients(trainer), trainer.row))
    whole, row = steps[0]
    assert 0 < row[1] < 8 * SEQ_LEN  # some do not count
    for parts, other_row in steps[1:]:
        torch.testing.assert_close(other_row, row, rtol=1e-4, atol=1e-6)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-7)


def test_loss_and_gradient_are_those_of_all_labels_that_count(store: Store) -> None:
    setup = make_setup(micro_batch=4, accumulate=2, packing="pad", clip=1e9)
    trainer = make_trainer(store, setup)
    batches = [next(trainer._batches) for _ in range(2)]
    ids = torch.cat([batch.input_ids for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    loss, count = trainer.model(ids, labels)
    wanted = torch.autograd.grad(loss / count, list(trainer.model.parameters()))
    expected = [float(loss.detach() / count), float(count)]
    trainer.feed(batches)
    found = gradients(trainer)
    assert trainer.row[:2].tolist() == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)


def test_a_step_without_a_label_changes_nothing_but_decay() -> None:
    setup = make_setup(micro_batch=1, accumulate=1, weight_decay=0.0)
    nothing = SimpleNamespace(
        input_ids=torch.zeros(1, SEQ_LEN, dtype=torch.int64),
        labels=torch.full((1, SEQ_LEN), -100),
    )
    trainer = Trainer(setup, batches=repeat(nothing))
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.step()
    assert trainer.row[:3].tolist() == [0, 0, 0]
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_gradients_are_scaled_and_clipped_in_one_pass() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    norm = scale_and_clip([parameter], factor=torch.tensor(2.0), most=100.0)
    assert norm == 10
    assert parameter.grad.tolist() == [6, 8]
    norm = scale_and_clip([parameter], factor=torch.tensor(1.0), most=1.0)
    assert norm == 10
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])


def test_decay_is_on_matrices_alone() -> None:
    trainer = Trainer(make_setup())
    decayed, plain = trainer.optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("attention", ["flash", "documents"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_in_a_step_waits_for_the_device(
    store: Store, attention: str, checkpointing: bool
) -> None:
    setup = make_setup(
        micro_batch=4, accumulate=2, attention=attention, checkpointing=checkpointing
    )
    trainer, reader = make_trainer(store, setup), LateReader(setup.device)
    trainer.step()  # what is made once may look at numbers
    with NothingWaits() as mode:
        for step in range(3):
            list(reader.read())
            trainer.step()
            reader.send(step, trainer.row)
    assert mode.calls > 100
    with NothingWaits(), pytest.raises(AssertionError, match="wait for the device"):
        trainer.row[0].item()


def test_numbers_are_read_after_they_were_sent() -> None:
    reader = LateReader(torch.device("cpu"))
    start = time.perf_counter()
    reader.begin(0)
    time.sleep(0.02)
    reader.send(10, torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]), pairs=2**60 + 1)
    reader.send(30, torch.tensor([5.0, 6.0, 7.0, 8.0, 1.0]))
    whole = time.perf_counter() - start
    first, second = reader.read()
    assert (first.step, first.steps, first.row.loss, first.row.stop) == (10, 10, 1, 0)
    assert (second.step, second.steps, second.row.learning_rate) == (30, 20, 8)
    assert (first.pairs, second.pairs) == (2**60 + 1, 0)
    assert 0.02 <= first.seconds < first.seconds + second.seconds <= whole
    assert list(reader.read(wait=True)) == []


@pytest.mark.parametrize("attention", ["flash", "documents"])
def test_pairs_of_tokens_are_counted_as_attention_computes_them(
    store: Store, attention: str
) -> None:
    setup = make_setup(micro_batch=2, accumulate=3, attention=attention)
    loader = Loader(store, seq_len=SEQ_LEN, batch_size=2)
    fields = ("input_ids", "labels", "position_ids", "cu_seqlens")
    seen = list(itertools.islice(DeviceFeeder(loader, device="cpu", fields=fields), 6))
    trainer = Trainer(setup, batches=seen)
    trainer.step()
    trainer.step()
    documents = [SEQ_LEN] * 12
    if attention == "documents":
        documents = [n for batch in seen for n in batch.cu_seqlens.diff().tolist()]
    # Each token looks at itself and at those before it.
    assert trainer.pairs == sum(k + 1 for length in documents for k in range(length))


def test_boundaries_have_one_shape_however_many_documents_there_are() -> None:
    setup = make_setup(micro_batch=2, accumulate=1, attention="documents")
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int64)

    def inputs(entries: int, **said: int) -> list[torch.Tensor]:
        starts = torch.arange(entries, dtype=torch.int32).clamp(max=64)
        return inputs_of(
            SimpleNamespace(input_ids=ids, labels=ids, position_ids=ids, cu_seqlens=starts, **said),
            setup,
        )

    few, many = inputs(3, num_documents=2, max_seqlen=7), inputs(65)
    assert few[3].shape == many[3].shape == (65,)
    assert few[3].tolist() == [0, 1, 2] + [64] * 62
    assert few[4].tolist() == [2, 7]
    assert many[4].tolist() == [64, SEQ_LEN]
    assert inputs(66)[3].shape == (129,)


def test_batches_may_come_from_anywhere_and_may_end() -> None:
    setup = make_setup(micro_batch=2, accumulate=2)
    ids = torch.randint(0, 60, (2, SEQ_LEN))
    batch = SimpleNamespace(input_ids=ids, labels=ids)
    trainer = Trainer(setup, batches=[batch] * 3)
    trainer.step()
    with pytest.raises(TrainingError, match="ended in step 2"):
        trainer.step()


def test_a_state_that_was_saved_goes_on_as_if_nothing_happened(
    store: Store, tmp_path: Path
) -> None:
    setup = make_setup(micro_batch=4, accumulate=1)
    straight = make_trainer(store, setup)
    expected = losses_of(straight, 8)

    first = make_trainer(store, setup)
    losses = losses_of(first, 4)
    checkpoints = Checkpoints(tmp_path, keep=1)
    facts: dict[str, object] = {"loader": {}, "essentials": {}}
    checkpoints.write(step=4, tensors=first.state(), facts=facts)
    saved = checkpoints.newest()
    assert saved is not None
    second = make_trainer(store, replace(setup, options=replace(setup.options, seed=9)))
    for _ in range(4):
        next(second._batches)
    second.load_state({name: saved.load(name) for name in ("model", "optimizer")}, step=4)
    assert losses + losses_of(second, 4) == expected


def test_the_collector_is_kept_out_of_the_steps() -> None:
    assert gc.isenabled()
    with contextlib.ExitStack() as resources:
        freeze_collector(resources)
        assert not gc.isenabled()
        assert gc.get_freeze_count()
    assert gc.isenabled()
    assert not gc.get_freeze_count()
