"""What follows from the options, the store and this machine: all numbers of a run, settled.

    batch_tokens = seq_len * micro_batch * accumulate * ranks

Two of the three numbers on the right and the left follow from the others; what cannot come out even
is refused with the nearest numbers that do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tokenmill.errors import UsageError
from tokenmill.trainer.memory import MemoryNeed, free_bytes
from tokenmill.trainer.peaks import peak_of
from tokenmill.trainer.presets import preset

if TYPE_CHECKING:
    from tokenmill.trainer.options import TrainOptions
    from tokenmill.trainer.presets import ModelConfig

LONG_ROW = 8192
"""From so many tokens a row on, activations are computed again unless one says otherwise."""
MOST_MICRO_TOKENS = {"cuda": 65_536, "cpu": 8_192}
"""Of a micro-batch that nobody chose: enough to keep the device busy."""
SHARE_OF_MEMORY = 0.8
"""Of the free memory, that a run may fill whose micro-batch nobody chose, by the estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those that train together, as torchrun tells it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """One of one where nobody says otherwise."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not all(name in os.environ for name in names):
            return cls()
        rank, world_size, local_rank = (int(os.environ[name]) for name in names)
        return cls(rank=rank, world_size=world_size, local_rank=local_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run, settled."""

    options: TrainOptions
    config: ModelConfig
    vocab_size: int
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    compiles: bool
    checkpointing: bool
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
        borders = ("position_ids", "cu_seqlens") if self.options.attention == "documents" else ()
        return ("input_ids", "labels", *borders)

    @property
    def need(self) -> MemoryNeed:
        return memory_need(self)


def settle(options: TrainOptions, *, vocab_size: int, ranks: Ranks | None = None) -> Setup:
    """All numbers of a run."""
    ranks = Ranks.from_environment() if ranks is None else ranks
    config = preset(options.model)
    device = find_device(options.device, local_rank=ranks.local_rank)
    bare = Setup(
        options=options,
        config=config,
        vocab_size=vocab_size,
        ranks=ranks,
        device=device,
        dtype=find_dtype(options.precision, device),
        compiles=device.type == "cuda" if options.compile is None else options.compile,
        checkpointing=_or(options.checkpointing, options.seq_len >= LONG_ROW),
        micro_batch=1,
        accumulate=1,
        learning_rate=options.learning_rate or config.learning_rate,
        warmup=min(options.steps - 1, options.steps // 50 + 1)
        if options.warmup is None
        else options.warmup,
    )
    micro_batch, accumulate = divide(bare)
    return replace_batch(bare, micro_batch=micro_batch, accumulate=accumulate)


def replace_batch(setup: Setup, *, micro_batch: int, accumulate: int) -> Setup:
    """The same with another division of its steps."""
    return replace(setup, micro_batch=micro_batch, accumulate=accumulate)


def _or(value: bool | None, otherwise: bool) -> bool:
    return otherwise if value is None else value


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


def find_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What the model computes in."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if precision == "auto":
        return torch.bfloat16 if has_bf16 else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32


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
        raise _uneven(setup, tokens, unit, both=both)
    rows = tokens // (setup.seq_len * setup.ranks.world_size)
    if micro is None:
        micro = rows // accumulate if accumulate else fitting_rows(setup, rows)
    return micro, rows // micro


def _uneven(setup: Setup, tokens: int, unit: int, *, both: bool) -> UsageError:
    options = setup.options
    parts = [f"--seq-len {setup.seq_len}"]
    parts += [f"--micro-batch {options.micro_batch}"] if options.micro_batch else []
    parts += [f"--accumulate {options.accumulate}"] if options.accumulate else []
    parts += [f"{setup.ranks.world_size} ranks"] if setup.ranks.world_size > 1 else []
    lower, upper = tokens // unit * unit, (tokens // unit + 1) * unit
    near = [unit] if both else [number for number in (lower, upper) if number]
    return UsageError(
        f"--batch-tokens {tokens} does not come out even with {', '.join(parts)}:"
        f" it must be {'' if both else 'a multiple of '}{unit}",
        hint="use " + " or ".join(f"--batch-tokens {number}" for number in near),
    )


def fitting_rows(setup: Setup, rows: int, *, free: int | None = None) -> int:
    """Rows of a micro-batch, a divisor of a rank's rows: as many as should fit, and are of use."""
    most = max(1, MOST_MICRO_TOKENS[setup.device.type] // setup.seq_len)
    need = memory_need(setup)
    free = free_bytes(setup.device) if free is None else free
    room = SHARE_OF_MEMORY * free - need.fixed_bytes
    most = max(1, min(most, int(room / need.activation_bytes), rows))
    return next(number for number in range(most, 0, -1) if rows % number == 0)


def memory_need(setup: Setup) -> MemoryNeed:
    """What a run takes on one rank."""
    return MemoryNeed.of(
        setup.config,
        vocab_size=setup.vocab_size,
        seq_len=setup.seq_len,
        micro_batch=setup.micro_batch,
        element_bytes=setup.dtype.itemsize,
        optimizer=setup.options.optimizer,
        checkpointing=setup.checkpointing,
        is_distributed=setup.ranks.world_size > 1,
        has_mask=setup.options.attention == "documents" and setup.device.type == "cpu",
    )
