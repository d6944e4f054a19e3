"""What a training run is told: the one home of every option, for the command and for Python.

Checked here as far as it can be without looking at the store or the device; what follows from them
is worked out in setup.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypedDict

from tokenmill.errors import UsageError
from tokenmill.trainer.presets import preset

if TYPE_CHECKING:
    import os

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("auto", "bf16", "fp32"),
    "attention": ("flash", "documents"),
    "optimizer": ("adamw", "adamw8bit"),
    "schedule": ("cosine", "wsd"),
    "packing": ("concat", "best-fit", "pad"),
    "boundaries": ("keep", "mask"),
}
DEFAULT_SEQ_LEN = 1024


class TrainKeywords(TypedDict, total=False):
    """The options of `train`, as keywords: the same names as the fields of `TrainOptions`."""

    model: str
    steps: int
    seq_len: int
    batch_tokens: int | None
    micro_batch: int | None
    accumulate: int | None
    precision: str
    compile: bool | None
    checkpointing: bool | None
    attention: str
    device: str
    optimizer: str
    learning_rate: float | None
    schedule: str
    warmup: int | None
    weight_decay: float
    clip: float
    packing: str
    boundaries: str
    shuffle: bool | str
    seed: int
    out: str | os.PathLike[str]
    resume: bool
    save_every: int | None
    keep: int
    eval_every: int | None
    eval_rows: int
    log_every: int
    tensorboard: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Everything a run is told but its store. None means: follows from the rest."""

    model: str = "small"
    """Name of a preset."""
    steps: int = 1000
    """Optimizer steps of the whole run, those before a resume counted."""
    seq_len: int = DEFAULT_SEQ_LEN
    batch_tokens: int | None = None
    """Of one step, over all ranks; None takes the preset's."""
    micro_batch: int | None = None
    """Rows that go through the model at once, on one rank; None takes what should fit."""
    accumulate: int | None = None
    """Micro-batches of a step, on one rank."""
    precision: str = "auto"
    """bf16, fp32; auto is bf16 where the device has it."""
    compile: bool | None = None
    """None compiles on a GPU."""
    checkpointing: bool | None = None
    """Compute activations again instead of keeping them; None does from 8,192 tokens a row on."""
    attention: str = "flash"
    """flash looks across borders of documents, documents does not."""
    device: str = "auto"
    optimizer: str = "adamw"
    learning_rate: float | None = None
    """The highest; None takes the preset's."""
    schedule: str = "cosine"
    warmup: int | None = None
    """Steps; None takes a fiftieth of them."""
    weight_decay: float = 0.1
    """On matrices alone."""
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    packing: str = "concat"
    boundaries: str = "keep"
    shuffle: bool | str = True
    seed: int = 0
    out: str | os.PathLike[str] = "run"
    """Folder for checkpoints and metrics."""
    resume: bool = False
    save_every: int | None = None
    """Steps between checkpoints; None takes a tenth of the run, 100 at least. The end has one."""
    keep: int = 2
    """Checkpoints that stay; older ones are removed once a new one is whole."""
    eval_every: int | None = None
    """Steps between evaluations; None takes a tenth of the run, 100 at least. The end has one."""
    eval_rows: int = 256
    """Rows of the split val that are looked at, the same every time."""
    log_every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise UsageError(
                    f"{name}={value!r} is not known", hint=f"use one of: {', '.join(known)}"
                )
        for name in ("steps", "seq_len", "keep", "eval_rows", "log_every"):
            _require_whole(name, getattr(self, name))
        for name in ("batch_tokens", "micro_batch", "accumulate", "save_every", "eval_every"):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name))
        self._check_rates()
        longest = preset(self.model).max_seq_len
        if self.seq_len > longest:
            raise UsageError(
                f"seq_len={self.seq_len:,} is longer than the context of the model"
                f" {self.model!r}, {longest:,} tokens",
                hint=f"use {longest} or less, or a model with a longer context (medium, large)",
            )

    def _check_rates(self) -> None:
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise UsageError(
                f"warmup={self.warmup} leaves no step of {self.steps} for anything else",
                hint="use fewer steps of warmup",
            )
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value!r} is not above 0", hint="use a number above 0")
        if not self.weight_decay >= 0:
            raise UsageError(f"weight_decay={self.weight_decay!r} is below 0", hint="use 0 or more")

    def essentials(self) -> dict[str, object]:
        """What a resumed run must have in common with the one it goes on with."""
        names = ("model", "seq_len", "optimizer", "attention", "packing", "boundaries", "seed")
        return {name: getattr(self, name) for name in names} | {"shuffle": str(self.shuffle)}

    def as_json(self) -> dict[str, object]:
        """All of it, as JSON has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # JSON has no infinity, which is a fair value for `clip`.
        infinite = {name: str(value) for name, value in values.items() if value == math.inf}
        return {**values, **infinite, "out": str(self.out)}


def _require_whole(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(
            f"{name}={value!r} is not a whole number above 0", hint=f"give one, like {name}=8"
        )
