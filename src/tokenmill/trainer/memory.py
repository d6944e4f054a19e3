"""What a run takes of the device's memory, and what to do when that is too much.

Parameters, gradients and optimizer state are exact. Activations are an estimate of what the
backward pass keeps: per token and block, 18 numbers for each of the model's width (the inputs of
the matrices, of both norms, of attention and of GELU); the logits come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch

from tokenmill.config import format_size
from tokenmill.errors import DeviceMemoryError
from tokenmill.trainer.presets import padded_vocab

if TYPE_CHECKING:
    from tokenmill.trainer.presets import ModelConfig
    from tokenmill.trainer.setup import Setup

STATE_BYTES = {"adamw": 8, "adamw8bit": 2}
"""Of the optimizer, for each parameter; the scales of 8-bit blocks are under 2% more."""
NUMBERS_OF_A_BLOCK = 18
CPU_WORDS = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of a micro-batch, estimated."""
    micro_batch: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        vocab_size: int,
        seq_len: int,
        micro_batch: int,
        element_bytes: int,
        optimizer: str,
        checkpointing: bool,
        is_distributed: bool,
        has_mask: bool,
    ) -> MemoryNeed:
        """Of a model, and the way it is trained."""
        parameters = 4 * config.num_parameters(vocab_size)
        block = NUMBERS_OF_A_BLOCK * config.width * element_bytes
        kept = config.width * element_bytes if checkpointing else block
        # Logits and their gradient, and one copy in float32 as the loss wants it.
        logits = padded_vocab(vocab_size) * (2 * element_bytes + 4)
        per_token = config.num_layers * kept + (block if checkpointing else 0) + logits
        mask = seq_len * 5 * config.num_heads if has_mask else 0
        return cls(
            parameters=parameters,
            # Buckets of DDP are the gradients themselves; the copy under way is one bucket more.
            gradients=parameters + (25_000_000 if is_distributed else 0),
            optimizer=parameters // 4 * STATE_BYTES[optimizer],
            activations=micro_batch * seq_len * (per_token + mask),
            micro_batch=micro_batch,
        )

    @property
    def fixed_bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def activation_bytes(self) -> int:
        """Of one row."""
        return self.activations // self.micro_batch

    def describe(self) -> str:
        """The parts in one line."""
        return (
            f"parameters {format_size(self.parameters)}, gradients {format_size(self.gradients)},"
            f" optimizer state {format_size(self.optimizer)}, activations about"
            f" {format_size(self.activations)} for a micro-batch of {self.micro_batch}"
        )


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses; on the CPU, that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def total_bytes(device: torch.device) -> int:
    """Memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


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


def memory_error(setup: Setup) -> DeviceMemoryError:
    """What was needed, what there is, and what to do about it."""
    need, device = setup.need, setup.device
    name = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return DeviceMemoryError(
        f"out of memory on {name}, which has {format_size(total_bytes(device))} in all;"
        f" this run needs {describe_need(need)}",
        hint="; or ".join(advice(setup)),
    )


def describe_need(need: MemoryNeed) -> str:
    """The parts, and their sum."""
    total = need.fixed_bytes + need.activations
    return f"about {format_size(total)}: {need.describe()}"


def advice(setup: Setup) -> list[str]:
    """Ways to need less, what costs nothing first, each with what it saves."""
    need, found = setup.need, []
    if setup.micro_batch > 1:
        micro = _largest_divisor(setup.micro_batch)
        more = setup.accumulate * setup.micro_batch // micro
        saved = need.activations - need.activation_bytes * micro
        found.append(
            f"use --micro-batch {micro} --accumulate {more}, the same step in smaller parts"
            f" (saves about {format_size(saved)})"
        )
    if not setup.checkpointing:
        lean = replace_checkpointing(setup).need
        found.append(
            f"use --checkpointing, a third more work (saves about"
            f" {format_size(need.activations - lean.activations)})"
        )
    if setup.options.optimizer == "adamw":
        saved = need.optimizer - need.optimizer * STATE_BYTES["adamw8bit"] // STATE_BYTES["adamw"]
        found.append(f"use --optimizer adamw8bit (saves {format_size(saved)})")
    return found or ["use a smaller --model or a shorter --seq-len: there is nothing left to save"]


def replace_checkpointing(setup: Setup) -> Setup:
    """The same run with activations computed again."""
    return replace(setup, checkpointing=True)


def _largest_divisor(number: int) -> int:
    """The largest divisor that is at most half of it."""
    return next(each for each in range(number // 2, 0, -1) if number % each == 0)
