"""Steps of training, on any iterable of batches on the device.

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
import os
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import psutil
import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tokenmill.errors import DeviceMemoryError, MissingExtraError, TrainingError, UsageError
from tokenmill.trainer.model import (
    EIGHT_BIT,
    PART_BYTES,
    Model,
    find_eight_bit,
    find_kernels,
    is_installed,
    learning_rates,
    make_optimizer,
    makes_loss_in_parts,
    scale_and_clip,
    try_kernels,
)
from tokenmill.trainer.options import PRESETS, padded_vocab, peak_of, preset
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.trainer.options import ModelConfig, TrainOptions

    Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


# -------------------------------------------------------------------------------------------------
# Numbers of a step, read without waiting for the device.
#
#   device: row of numbers --copy--> pinned memory, [event]        the host goes on
#   steps later:                     the event has passed: read
#
# Nothing here makes the host wait. A reading that is not there yet is taken at the next look; only
# `read(wait=True)`, at the end of a run or before a checkpoint, waits. Time between two marks is
# the device's own: the host is ahead of it by a step or two.

# A moment: an event of the device, or seconds where it is the CPU.
Mark: TypeAlias = Any
SLOTS = 8  # readings that may be under way
# Documents of a micro-batch that there is room for: as many, or one in so many tokens.
LEAST_DOCUMENTS = 64
FEW_TOKENS = 32


class Row(NamedTuple):
    """What a step leaves on the device, in this order."""

    loss: float  # mean over the tokens that count, of all ranks
    tokens: float  # that count
    grad_norm: float  # before clipping
    learning_rate: float
    stop: float  # how many ranks were asked to stop


class Reading(NamedTuple):
    """The numbers of one step, on the host."""

    step: int
    row: Row
    steps: int  # that were made since the mark before
    seconds: float  # that they took, on the device
    pairs: int  # of tokens of which one looked at the other in them, on this rank


class LateReader:
    """Has rows of numbers on the host when they have arrived."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._slots = torch.zeros(SLOTS, len(Row._fields), pin_memory=self._is_cuda)
        # A view that is made once: reading it later needs no tensor.
        self._view: NDArray[np.float32] = self._slots.numpy()
        self._next = 0
        # Step, slot, steps since the mark before, that mark, the mark of this step, and pairs.
        self._pending: deque[tuple[int, int, int, Mark, Mark, int]] = deque()
        self._start: Mark | None = None
        self._start_step = 0

    def begin(self, step: int) -> None:
        """Measure time from here on: what came before was no part of the steps."""
        self._start, self._start_step = self._mark(), step

    def send(self, step: int, row: torch.Tensor, *, pairs: int = 0) -> None:
        """Start copying the row of a step to the host."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        self._slots[slot].copy_(row, non_blocking=True)
        end = self._mark()
        start = end if self._start is None else self._start
        self._pending.append((step, slot, step - self._start_step, start, end, pairs))
        self._start, self._start_step = end, step

    def read(self, *, wait: bool = False) -> Iterator[Reading]:
        """What has arrived; with `wait`, all that was sent."""
        # A slot that is about to be used again has to be read first.
        while self._pending:
            step, slot, steps, start, end, pairs = self._pending[0]
            if self._is_cuda and not end.query():
                if not wait and len(self._pending) < SLOTS:
                    return
                end.synchronize()
            self._pending.popleft()
            seconds = 0.0 if start is end else self._seconds(start, end)
            yield Reading(step, Row(*self._view[slot].tolist()), steps, seconds, pairs)

    def _seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end) / 1000 if self._is_cuda else end - start)

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Trainer:
    """A model, its optimizer, and where its batches come from.

    >>> trainer = Trainer(settle(options, vocab_size=50_257), batches=feeder)
    >>> for _ in range(100):
    ...     trainer.step()
    >>> trainer.row        # loss, tokens, norm and rate of the last step, on the device
    """

    def __init__(self, setup: Setup, *, batches: Iterable[Any] = ()) -> None:
        """A batch has `input_ids` and `labels`, and for documents `position_ids`, `cu_seqlens` and
        `attention_pairs`."""
        kind = setup.options.optimizer
        self.optimizer_kind = find_eight_bit() if kind == "adamw8bit" else kind
        self.setup = setup
        # Steps that were made.
        self.step_number = 0
        # Asked of this rank; `row.stop` says what all ranks were asked.
        self.stop_wanted = False
        self.feed(batches)
        options, device = setup.options, setup.device
        torch.manual_seed(options.seed)
        with device:
            self.model = Model(
                setup.config,
                vocab_size=setup.vocab_size,
                seq_len=setup.seq_len,
                dtype=setup.dtype,
                recomputed=setup.recomputed,
                kernel=setup.kernel,
            )
        self._parameters = list(self.model.parameters())
        self._numbers = learning_rates(
            options.schedule, peak=setup.learning_rate, steps=options.steps, warmup=setup.warmup
        )
        self._rates = torch.from_numpy(self._numbers).to(device)
        self._rate = torch.zeros((), device=device)
        self.optimizer = self._make_optimizer()
        self._totals = torch.zeros(3, device=device)
        # Of tokens of which one looks at the other: what attention did since this was set to 0.
        self.pairs = 0
        self.row = torch.zeros(len(Row._fields), device=device)
        forward: torch.nn.Module = self.model
        if setup.compiles:
            forward = cast("torch.nn.Module", torch.compile(self.model, dynamic=False))
        # Without the other ranks: for evaluation.
        self.local_forward: Forward = forward
        self.forward: Forward = forward
        if setup.ranks.world_size > 1:
            self.forward = DistributedDataParallel(
                forward,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(
            self.model,
            kind=self.optimizer_kind,
            learning_rate=self._rate,
            weight_decay=self.setup.options.weight_decay,
        )

    def feed(self, batches: Iterable[Any]) -> None:
        """Take the batches of coming steps from here."""
        self._batches: Iterator[Any] = iter(batches)

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
        # Gradients go to the other ranks with the last micro-batch of a step.
        apart: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if isinstance(self.forward, DistributedDataParallel) and not is_last:
            apart = self.forward.no_sync()
        with apart:
            loss, count = self.forward(*inputs_of(batch, self.setup))
            (loss / self.setup.batch_tokens).backward()
        self._totals[0].add_(loss.detach())
        self._totals[1].add_(count)
        if self.setup.has_documents:
            self.pairs += batch.attention_pairs
        else:
            rows, length = batch.input_ids.shape
            self.pairs += rows * length * (length + 1) // 2

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
        now = min(self.step_number, len(self._rates) - 1)
        self._rate.copy_(self._rates[now])
        if self.optimizer_kind == "bitsandbytes":
            self._set_rate(float(self._numbers[now]))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._totals[0] / count
        row = Row(loss, self._totals[1], norm, self._rate, self._totals[2])  # type: ignore[arg-type]
        torch.stack(cast("tuple[torch.Tensor, ...]", row), out=self.row)

    def state(self) -> dict[str, object]:
        """All that changes in a step; weights and optimizer state are not copies."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any], *, step: int) -> None:
        """Go on from a state after so many steps; ValueError, and nothing is changed, if not."""
        _require_like(state["model"], self.model.state_dict(), what="the model")
        self._take_kind_of(state["optimizer"])
        groups = self.optimizer.state_dict()["param_groups"]
        self._require_optimizer(state["optimizer"], groups, step=step)
        self.model.load_state_dict(state["model"])
        # Rates and the like are those of this run; what it was told then may have changed.
        self.optimizer.load_state_dict(
            {"state": state["optimizer"]["state"], "param_groups": groups}
        )
        if self.optimizer_kind != "bitsandbytes":
            self._set_rate(self._rate)  # what was loaded is a copy
        self.step_number = step

    def _set_rate(self, rate: torch.Tensor | float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _take_kind_of(self, saved: Any) -> None:
        """Go on with the package that made an 8-bit state, where both are installed."""
        states = saved.get("state") if isinstance(saved, dict) else None
        first = next(iter(states.values()), None) if isinstance(states, dict) else None
        if self.optimizer_kind not in EIGHT_BIT or not isinstance(first, dict):
            return
        kind = "torchao" if "exp_avg" in first else "bitsandbytes"
        if kind == self.optimizer_kind:
            return
        if not is_installed(kind):
            purpose = "the 8-bit AdamW of this checkpoint"
            raise MissingExtraError(kind, extra=kind, purpose=purpose)
        self.optimizer_kind = kind
        self.optimizer = self._make_optimizer()

    def _require_optimizer(self, saved: Any, groups: list[Any], *, step: int) -> None:
        """ValueError unless the optimizer has moments like its parameters, of that very step."""
        ours = [number for group in groups for number in group["params"]]
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        blocks = {}
        if self.optimizer_kind == "bitsandbytes":
            blocks = self.optimizer.state_dict()["state"]
        try:
            found = [number for group in saved["param_groups"] for number in group["params"]]
            moments = saved["state"]
            if found != ours or list(moments) != ours:
                raise ValueError("the optimizer has other parameters")
            for number, parameter in zip(ours, parameters, strict=True):
                said = _flat(moments[number])
                count = said.pop("step")
                is_number = isinstance(count, int) if blocks else _is_one_number(count)
                if not is_number or count != step:
                    raise ValueError(f"the optimizer is not at step {step:,}")
                like = dict.fromkeys(("exp_avg", "exp_avg_sq"), parameter)
                if blocks:
                    like = _flat(blocks[number])
                    del like["step"]
                _require_like(said, like, what="the optimizer")
        except (TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the optimizer has no state of AdamW: {error}") from error


def _is_one_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a parameter's state; bitsandbytes keeps most of them one level down."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


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


def inputs_of(batch: Any, setup: Setup) -> list[torch.Tensor]:
    """The tensors of a batch in the order in which the model takes them."""
    found = [getattr(batch, name) for name in setup.fields]
    if setup.has_documents:
        starts, tokens = found[-1], batch.input_ids.numel()
        documents = getattr(batch, "num_documents", None) or len(starts) - 1
        longest = getattr(batch, "max_seqlen", None) or setup.seq_len
        # What the compiler sees is always of one size, unless documents are very short.
        room = max(LEAST_DOCUMENTS, tokens // FEW_TOKENS)
        while room < len(starts) - 1:
            room *= 2
        found[-1] = functional.pad(starts, (0, room + 1 - len(starts)), value=tokens)
        found.append(torch.tensor([documents, longest]))
    return found


def freeze_collector(resources: contextlib.ExitStack) -> None:
    """Keep Python's garbage collector out of the steps: it stops all threads when it likes.

    To be called once everything that stays has been made; `resources` puts it back.
    """
    gc.collect()
    gc.freeze()
    resources.callback(gc.unfreeze)
    if gc.isenabled():
        gc.disable()
        resources.callback(gc.enable)


# -------------------------------------------------------------------------------------------------
# What a run takes of the device's memory, and what to do when that is too much.
#
# Parameters, gradients and optimizer state are exact. Activations are an estimate of what the
# backward pass keeps: per token and block, 18 numbers for each of the model's width (the inputs of
# the matrices, of both norms, of attention and of GELU) where it is compiled, more where norms and
# rotations are not; the logits come on top, and in bf16 a copy of the matrices.

# Of the optimizer, for each parameter; the scales of 8-bit blocks are under 2% more.
STATE_BYTES = {"adamw": 8, "adamw8bit": 2}
NUMBERS_OF_A_BLOCK = 18
NOT_COMPILED = {4: 2, 2: 6}  # numbers on top of them where it is not, by their bytes
CPU_WORDS = ("can't allocate memory", "not enough memory")


class MemoryNeed(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # of a micro-batch, estimated
    micro_batch: int

    @classmethod
    def of(cls, setup: Setup) -> MemoryNeed:
        """Of a model, and the way it is trained."""
        config, size, rows = setup.config, setup.dtype.itemsize, setup.micro_batch
        parameters = 4 * config.num_parameters(setup.vocab_size)
        numbers = NUMBERS_OF_A_BLOCK + (0 if setup.compiles else NOT_COMPILED[size])
        block = numbers * config.width * size
        # Logits, whose gradient takes their place; where they are not one with the loss, three
        # copies in float32.
        logits = padded_vocab(setup.vocab_size) * (size if setup.compiles else 12)
        is_in_parts = makes_loss_in_parts(setup.device, setup.dtype) and not setup.compiles
        # Of a block that is computed again its input stays; one at a time is there whole.
        whole = config.num_layers - setup.recomputed + bool(setup.recomputed)
        per_token = whole * block + setup.recomputed * config.width * size
        per_token += 0 if is_in_parts else logits
        if setup.has_documents and setup.kernel is None:
            per_token += setup.seq_len * 5 * config.num_heads  # a mask
        copies = parameters // 4 * size if size < 4 else 0
        # Buckets of DDP are the gradients themselves; the copy under way is one bucket more.
        gradients = parameters + (25_000_000 if setup.ranks.world_size > 1 else 0)
        if is_in_parts:  # its parts, and the gradient that is made with them
            gradients += PART_BYTES + 4 * padded_vocab(setup.vocab_size) * config.width
        optimizer = parameters // 4 * STATE_BYTES[setup.options.optimizer]
        return cls(
            parameters + copies, gradients, optimizer, rows * setup.seq_len * per_token, rows
        )

    @property
    def fixed_bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def activation_bytes(self) -> int:
        """Of one row."""
        return self.activations // self.micro_batch

    def describe(self) -> str:
        """The parts, and their sum."""
        return (
            f"about {format_size(self.fixed_bytes + self.activations)}: parameters"
            f" {format_size(self.parameters)}, gradients {format_size(self.gradients)}, optimizer"
            f" state {format_size(self.optimizer)}, activations about"
            f" {format_size(self.activations)} for a micro-batch of {self.micro_batch}"
        )


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes of a device that nobody uses, and all of them; on the CPU, those of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def peak_bytes(device: torch.device) -> int:
    """Most that this process has used: on a GPU for tensors, on a CPU in all, as of now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on a GPU or on the CPU."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_WORDS)


def require_memory(setup: Setup) -> None:
    """Refuse before anything is made what cannot fit, by the parts of the estimate that are sure.

    A machine that has run out of its memory ends some process, or hardly answers any more; a GPU
    says so itself, and there only what is exact counts.
    """
    need, (free, total) = setup.need, memory_of(setup.device)
    is_cpu = setup.device.type == "cpu"
    if need.fixed_bytes + need.activations <= free if is_cpu else need.fixed_bytes <= total:
        return
    name = "this machine" if is_cpu else torch.cuda.get_device_name(setup.device)
    room = free if is_cpu else SHARE_OF_MEMORY * total
    fitting = [each for each in PRESETS if _fits(setup, each, room)]
    ways = advice(setup)
    if not fitting:
        ways = [f"no model that takes rows of {setup.seq_len:,} fits: use a shorter --seq-len"]
    elif setup.options.model not in fitting:
        ways = [f"use --model {fitting[-1]}, which fits"]
    raise DeviceMemoryError(
        f"this run needs {need.describe()}; {name} has {format_size(total)} in all,"
        f" {format_size(free)} free",
        hint="; or ".join(ways),
    )


def _fits(setup: Setup, model: str, room: float) -> bool:
    """Whether a row of this run at a time would fit with another model."""
    config = preset(model)
    if config.max_seq_len < setup.seq_len:
        return False
    need = replace(setup, config=config, micro_batch=1).need
    return need.fixed_bytes + need.activations <= room


def step_seconds(setup: Setup) -> float | None:
    """About how long a step will take; None where that is not known."""
    rate = (peak_flops(setup.device, setup.dtype) or 0) * USUAL_SHARE
    if setup.device.type == "cpu":
        # What one thread multiplies in a second of its own, whatever else the machine does; of all
        # of them together a model gets about half.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        matrix, taken = torch.ones(512, 512), list[float]()
        while len(taken) < 3 or sum(taken) < 0.1:
            begun = time.thread_time()
            torch.mm(matrix, matrix)
            taken.append(time.thread_time() - begun)
        torch.set_num_threads(threads)
        rate = USUAL_SHARE * threads * 2 * 512**3 / min(taken)
    flops = setup.config.flops_per_token(setup.seq_len, setup.vocab_size)
    tokens = setup.batch_tokens // setup.ranks.world_size
    return tokens * flops / rate if rate else None


def memory_error(setup: Setup) -> DeviceMemoryError:
    """What was needed, what there is, and what to do about it."""
    device = setup.device
    name = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return DeviceMemoryError(
        f"out of memory on {name}, which has {format_size(memory_of(device)[1])} in all;"
        f" this run needs {setup.need.describe()}",
        hint="; or ".join(advice(setup)),
    )


def advice(setup: Setup) -> list[str]:
    """Ways to need less, what costs nothing first, each with what it saves."""
    need, found = setup.need, []
    if setup.micro_batch > 1:
        # Its largest divisor but itself.
        micro = next(n for n in range(setup.micro_batch // 2, 0, -1) if setup.micro_batch % n == 0)
        more = setup.accumulate * setup.micro_batch // micro
        saved = need.activations - need.activation_bytes * micro
        found.append(
            f"use --micro-batch {micro} --accumulate {more}, the same step in smaller parts"
            f" (saves about {format_size(saved)})"
        )
    if setup.recomputed < setup.config.num_layers:
        lean = replace(setup, recomputed=setup.config.num_layers).need
        found.append(
            f"use --checkpointing, a third more work (saves about"
            f" {format_size(need.activations - lean.activations)})"
        )
    if setup.options.optimizer == "adamw":
        saved = need.optimizer - need.optimizer * STATE_BYTES["adamw8bit"] // STATE_BYTES["adamw"]
        found.append(f"use --optimizer adamw8bit (saves {format_size(saved)})")
    return found or ["use a smaller --model or a shorter --seq-len: there is nothing left to save"]


# -------------------------------------------------------------------------------------------------
# What follows from the options, the store and this machine: all numbers of a run, settled.
#
# The tokens of a step are seq_len * micro_batch * accumulate * ranks. Two of the three numbers
# after seq_len follow from the others; what cannot come out even is refused with the nearest
# numbers that do.

# Of a micro-batch: layers are computed again rather than have fewer at once.
ENOUGH_TOKENS = 8_192
# Of a micro-batch that nobody chose: enough to keep the device busy.
MOST_MICRO_TOKENS = {"cuda": 65_536, "cpu": 8_192}
# Of the free memory, that a run may fill whose micro-batch nobody chose, by the estimate.
SHARE_OF_MEMORY = 0.85
NO_CUDNN = (
    "attention within documents may be faster with one more package: pip install 'tokenmill[cudnn]'"
)
# Of what a device can do at most, that a model gets.
USUAL_SHARE = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRanks:
    """This process among those that train together, as torchrun tells it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> TrainRanks:
        """One of one where nobody says otherwise."""
        names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
        if not all(name in os.environ for name in names.values()):
            return cls()
        return cls(**{name: int(os.environ[variable]) for name, variable in names.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run, settled."""

    options: TrainOptions
    config: ModelConfig
    vocab_size: int
    ranks: TrainRanks
    device: torch.device
    dtype: torch.dtype
    compiles: bool
    recomputed: int  # layers whose activations are computed again
    kernel: str | None  # of attention within documents; None: a mask, or the whole row
    micro_batch: int
    accumulate: int
    learning_rate: float
    warmup: int

    @property
    def seq_len(self) -> int:
        return self.options.seq_len

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        rows = self.micro_batch * self.accumulate * self.ranks.world_size
        return rows * self.seq_len

    @property
    def fields(self) -> tuple[str, ...]:
        """What is needed of a batch."""
        documents = ("position_ids", "cu_seqlens") if self.has_documents else ()
        return ("input_ids", "labels", *documents)

    @property
    def has_documents(self) -> bool:
        """Whether attention stays within them."""
        return self.options.attention == "documents"

    @property
    def need(self) -> MemoryNeed:
        return MemoryNeed.of(self)


def settle(options: TrainOptions, *, vocab_size: int, ranks: TrainRanks | None = None) -> Setup:
    """All numbers of a run."""
    ranks = TrainRanks.from_environment() if ranks is None else ranks
    config = preset(options.model)
    device = find_device(options.device, local_rank=ranks.local_rank)
    is_half = options.precision == "bf16"
    if options.precision == "auto":
        is_half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    bare = Setup(
        options=options,
        config=config,
        vocab_size=vocab_size,
        ranks=ranks,
        device=device,
        dtype=torch.bfloat16 if is_half else torch.float32,
        compiles=device.type == "cuda" if options.compile is None else options.compile,
        recomputed=config.num_layers if options.checkpointing else 0,
        kernel=None,
        micro_batch=1,
        accumulate=1,
        learning_rate=options.learning_rate or config.learning_rate,
        warmup=min(options.steps - 1, options.steps // 50 + 1)
        if options.warmup is None
        else options.warmup,
    )
    if bare.has_documents:
        bare = replace(bare, kernel=next(iter(find_kernels(device, bare.dtype)), None))
    if options.checkpointing is None:
        bare = replace(bare, recomputed=fitting_layers(bare))
    micro_batch, accumulate = divide(bare)
    return replace(bare, micro_batch=micro_batch, accumulate=accumulate)


def choose_kernel(
    setup: Setup, lengths: Callable[[], NDArray[np.integer]]
) -> tuple[Setup, str, list[str]]:
    """With the fastest kernel for documents of such lengths, by a short trial on a GPU.

    And what is to be told: which one it is, and why another is not.
    """
    if setup.kernel is None or setup.device.type == "cpu":
        return setup, "a mask" if setup.kernel is None else "one after the other", []
    names, heads = find_kernels(setup.device, setup.dtype), setup.config.num_heads
    trials, problems = try_kernels(
        names, lengths=lengths(), heads=heads, width=setup.config.width // heads
    )
    kernel = trials[0].kernel if trials else None
    took = ", ".join(f"{each.kernel} {each.milliseconds:.2f} ms" for each in trials)
    said = f"{kernel} (a layer took {took})" if trials else "a mask"
    if "cudnn" not in names:
        problems.append(NO_CUDNN)
    return replace(setup, kernel=kernel), said, problems


def find_device(name: str, *, local_rank: int = 0) -> torch.device:
    """The device of that name; auto is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device={name!r} is not known", hint="use auto, cuda or cpu") from None
    if device.type not in MOST_MICRO_TOKENS:
        raise UsageError(
            f"device={name!r} is not one this trainer runs on", hint="use auto, cuda or cpu"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                f"device={name!r}, and torch {torch.__version__} finds no CUDA device",
                hint="use --device cpu, or auto for whatever there is",
            )
        return torch.device("cuda", local_rank if device.index is None else device.index)
    return device


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a device can do at most in a second; None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def divide(setup: Setup) -> tuple[int, int]:
    """Rows of a micro-batch and how many of them make a step, on one rank."""
    options = setup.options
    micro, accumulate = options.micro_batch, options.accumulate
    if options.batch_tokens is None and micro is not None and accumulate is not None:
        return micro, accumulate
    unit = setup.seq_len * setup.ranks.world_size * (micro or 1) * (accumulate or 1)
    tokens = options.batch_tokens
    if tokens is None:  # nobody asked for the preset's number: come near it
        tokens = max(1, setup.config.batch_tokens // unit) * unit
    both = micro is not None and accumulate is not None
    if tokens % unit or (both and tokens != unit):
        parts = [f"--seq-len {setup.seq_len}"]
        parts += [f"--micro-batch {micro}"] if micro else []
        parts += [f"--accumulate {accumulate}"] if accumulate else []
        parts += [f"{setup.ranks.world_size} ranks"] if setup.ranks.world_size > 1 else []
        lower = tokens // unit * unit
        near = [unit] if both else [number for number in (lower, lower + unit) if number]
        raise UsageError(
            f"--batch-tokens {tokens} does not come out even with {', '.join(parts)}:"
            f" it must be {'' if both else 'a multiple of '}{unit}",
            hint="use " + " or ".join(f"--batch-tokens {number}" for number in near),
        )
    rows = tokens // (setup.seq_len * setup.ranks.world_size)
    if micro is None:
        micro = rows // accumulate if accumulate else fitting_rows(setup, rows)
    return micro, rows // micro


def fitting_layers(setup: Setup, *, free: int | None = None) -> int:
    """The fewest layers to compute again, so that enough rows fit; all, if they still do not."""
    room = SHARE_OF_MEMORY * (memory_of(setup.device)[0] if free is None else free)
    tokens = min(ENOUGH_TOKENS, setup.options.batch_tokens or setup.config.batch_tokens)
    rows = setup.options.micro_batch or max(1, tokens // setup.seq_len)
    layers = setup.config.num_layers
    for recomputed in range(layers):
        need = replace(setup, recomputed=recomputed, micro_batch=rows).need
        if need.fixed_bytes + need.activations <= room:
            return recomputed
    return layers


def fitting_rows(setup: Setup, rows: int, *, free: int | None = None) -> int:
    """Rows of a micro-batch, a divisor of a rank's rows: as many as should fit, and are of use."""
    most = max(1, MOST_MICRO_TOKENS[setup.device.type] // setup.seq_len)
    need = setup.need
    free = memory_of(setup.device)[0] if free is None else free
    room = SHARE_OF_MEMORY * free - need.fixed_bytes
    most = max(1, min(most, int(room / need.activation_bytes), rows))
    return next(number for number in range(most, 0, -1) if rows % number == 0)
