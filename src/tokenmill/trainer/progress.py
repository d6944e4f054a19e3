"""What a run tells while it goes, and at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """Where a run stands. Numbers are those of a step or two ago: nothing waits for them."""

    phase: str
    """starting, training, evaluating or saving."""
    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Since this process began to train."""
    loss: float | None = None
    val_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    """That went through the model, those before a resume counted."""
    tokens_per_second: float | None = None
    """Since the line before, on the device, over all ranks."""
    mfu: float | None = None
    """Share of the device's peak; None where that is not known."""
    wait_share: float | None = None
    wait_p50_ms: float | None = None
    wait_p99_ms: float | None = None
    memory_bytes: int = 0
    eta_seconds: float | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run has come to."""

    out: Path
    steps: int
    resumed_from: int | None
    parameters: int
    loss: float
    """Of the last step."""
    val_loss: float | None
    tokens: int
    seconds: float
    """Of this process, with start, evaluation and checkpoints."""
    tokens_per_second: float | None
    """Median of the run, steps alone."""
    mfu: float | None
    wait_share: float | None
    wait_p50_ms: float | None
    wait_p99_ms: float | None
    memory_bytes: int
    checkpoint: Path
    """The last one."""
    notes: list[str] = field(default_factory=list)
