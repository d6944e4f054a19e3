"""Steps of training, on any iterable of batches that lie on the device.

    micro-batch -> summed loss -> backward     `accumulate` times, gradients add up
    ranks add their losses and counts
    gradients * (1 / tokens that counted), clipped -> AdamW

A loss is divided by the number of labels that count, over all micro-batches and ranks: with masks
and padding a mean of means would be another number. The count is known only at the end, so the
gradients are made with a constant in its place, and put right in the pass that clips them.

Nothing in a step makes the host wait for the device: no number is read back, and no branch depends
on one. Tests hold this, on the CPU and with CUDA's sync debug mode.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tokenmill.errors import TrainingError
from tokenmill.trainer.metrics import Row
from tokenmill.trainer.model import Model
from tokenmill.trainer.optimizer import make_optimizer, require_eight_bit, scale_and_clip
from tokenmill.trainer.schedule import learning_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tokenmill.trainer.setup import Setup

    Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]

FREEZE_AFTER = 3
"""Steps until all that lives as long as the run has been made."""


class TrainingBatch(Protocol):
    """What a step needs of a batch; `position_ids` and `cu_seqlens` too for documents."""

    @property
    def input_ids(self) -> torch.Tensor: ...

    @property
    def labels(self) -> torch.Tensor: ...


class Trainer:
    """A model, its optimizer, and where its batches come from.

    >>> trainer = Trainer(settle(options, vocab_size=50_257), batches=feeder)
    >>> for _ in range(100):
    ...     trainer.step()
    >>> trainer.row        # loss, tokens, norm and rate of the last step, on the device
    """

    def __init__(self, setup: Setup, *, batches: Iterable[TrainingBatch] = ()) -> None:
        if setup.options.optimizer == "adamw8bit":
            require_eight_bit()
        self.setup = setup
        self.step_number = 0
        """Steps that were made."""
        self.stop_wanted = False
        """Asked of this rank; the last number of `row` says what all ranks were asked."""
        self.feed(batches)
        self.model = self._make_model()
        self._parameters = list(self.model.parameters())
        options, device = setup.options, setup.device
        rates = learning_rates(
            options.schedule, peak=setup.learning_rate, steps=options.steps, warmup=setup.warmup
        )
        self._rates = torch.from_numpy(rates).to(device)
        self._rate = torch.zeros((), device=device)
        self.optimizer = make_optimizer(
            self.model,
            kind=options.optimizer,
            learning_rate=self._rate,
            weight_decay=options.weight_decay,
        )
        self._totals = torch.zeros(3, device=device)
        self.row = torch.zeros(len(Row._fields), device=device)
        self.forward = self._make_forward()

    def feed(self, batches: Iterable[TrainingBatch]) -> None:
        """Take the batches of coming steps from here."""
        self._batches: Iterator[TrainingBatch] = iter(batches)

    def _make_model(self) -> Model:
        setup = self.setup
        torch.manual_seed(setup.options.seed)
        with setup.device:
            return Model(
                setup.config,
                vocab_size=setup.vocab_size,
                seq_len=setup.seq_len,
                dtype=setup.dtype,
                checkpointing=setup.checkpointing,
                has_documents=setup.options.attention == "documents",
            )

    def _make_forward(self) -> Forward:
        forward: torch.nn.Module = self.model
        if self.setup.compiles:
            forward = cast("torch.nn.Module", torch.compile(self.model, dynamic=False))
        self.local_forward: Forward = forward
        """Without the other ranks: for evaluation."""
        if self.setup.ranks.world_size == 1:
            return forward
        device = self.setup.device
        return DistributedDataParallel(
            forward,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )

    def step(self) -> None:
        """One step of the optimizer."""
        self._totals.zero_()
        last = self.setup.accumulate - 1
        for number in range(last + 1):
            self._add_micro_batch(is_last=number == last)
        self._update()
        self.step_number += 1

    def _add_micro_batch(self, *, is_last: bool) -> None:
        batch = next(self._batches, None)
        if batch is None:
            raise TrainingError(
                f"the batches ended in step {self.step_number + 1:,}",
                hint="give the trainer batches that do not end, or make fewer steps",
            )
        with self._alone(not is_last):
            loss, count = self.forward(*inputs_of(batch, self.setup.fields))
            (loss / self.setup.batch_tokens).backward()
        self._totals[0].add_(loss.detach())
        self._totals[1].add_(count)

    def _alone(self, alone: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients go to the other ranks with the last micro-batch of a step."""
        if alone and isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def _update(self) -> None:
        ranks = self.setup.ranks.world_size
        if ranks > 1:
            if self.stop_wanted:
                self._totals[2].fill_(1.0)
            distributed.all_reduce(self._totals)
        count = self._totals[1].clamp(min=1.0)
        norm = scale_and_clip(
            self._parameters,
            # DDP gives the mean of the ranks' gradients, and we want their sum.
            factor=self.setup.batch_tokens * ranks / count,
            most=self.setup.options.clip,
        )
        self._rate.copy_(self._rates[min(self.step_number, len(self._rates) - 1)])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        row = Row(self._totals[0] / count, self._totals[1], norm, self._rate, self._totals[2])  # type: ignore[arg-type]
        torch.stack(cast("tuple[torch.Tensor, ...]", row), out=self.row)

    def state(self) -> dict[str, object]:
        """All that changes in a step; weights and optimizer state are not copies."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any], *, step: int) -> None:
        """Go on from a state after so many steps; ValueError, and nothing is changed, if not."""
        _require_like(state["model"], self.model.state_dict(), what="the model")
        groups = self.optimizer.state_dict()["param_groups"]
        self._require_optimizer(state["optimizer"], groups, step=step)
        self.model.load_state_dict(state["model"])
        # Rates and the like are those of this run; what it was told then may have changed.
        self.optimizer.load_state_dict(
            {"state": state["optimizer"]["state"], "param_groups": groups}
        )
        for group in self.optimizer.param_groups:  # what was loaded is a copy
            group["lr"] = self._rate
        self.step_number = step

    def _require_optimizer(self, saved: Any, groups: list[Any], *, step: int) -> None:
        """ValueError unless the optimizer has moments like its parameters, of that very step."""
        ours = [number for group in groups for number in group["params"]]
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        try:
            found = [number for group in saved["param_groups"] for number in group["params"]]
            moments = saved["state"]
            if found != ours or list(moments) != ours:
                raise ValueError("the optimizer has other parameters")
            for number, parameter in zip(ours, parameters, strict=True):
                said = moments[number]
                count = said["step"]
                if not isinstance(count, torch.Tensor) or count.numel() != 1 or count != step:
                    raise ValueError(f"the optimizer is not at step {step:,}")
                like = dict.fromkeys(("exp_avg", "exp_avg_sq"), parameter)
                _require_like(said, {**like, "step": count}, what="the optimizer")
        except (TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the optimizer has no state of AdamW: {error}") from error


def _require_like(found: Any, expected: Mapping[str, torch.Tensor], *, what: str) -> None:
    """ValueError unless both have the same names, with tensors of the same shapes and types."""
    if not isinstance(found, dict) or set(found) != set(expected):
        raise ValueError(f"{what} has other names")
    for name, ours in expected.items():
        each = found[name]
        if not isinstance(each, torch.Tensor) or _kind(each) != _kind(ours):
            has = _kind(each) if isinstance(each, torch.Tensor) else type(each).__name__
            raise ValueError(f"{name!r} of {what} is {has}, and this run has {_kind(ours)}")


def _kind(tensor: torch.Tensor) -> str:
    """What a tensor must have in common with one whose place it takes."""
    has_gaps = tensor.layout != torch.strided or not tensor.is_contiguous()
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}{' with gaps' * has_gaps}"


def inputs_of(batch: TrainingBatch, fields: tuple[str, ...]) -> list[torch.Tensor]:
    """The tensors of a batch in the order in which the model takes them."""
    return [getattr(batch, name) for name in fields]


class Collector:
    """Python's garbage collector, kept out of the steps: it stops all threads when it likes."""

    def __init__(self) -> None:
        self._was_enabled = gc.isenabled()
        self._is_frozen = False

    def after_step(self, steps_of_this_process: int) -> None:
        """Collect and freeze once everything that stays has been made."""
        if steps_of_this_process == FREEZE_AFTER and not self._is_frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_frozen = True

    def pause(self) -> None:
        """A good time to collect: nothing is being waited for."""
        if self._is_frozen:
            gc.collect()

    def close(self) -> None:
        """As it was before."""
        if self._is_frozen:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
