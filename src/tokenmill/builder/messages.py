"""What the driver and the workers of a build tell each other: small values, nothing else.

The driver knows the workers by these alone; it never loads an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.builder.memory import MemoryPlan
    from tokenmill.config import RowShape
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.sources.base import SourceOptions
    from tokenmill.store.facts import Counts, EngineFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All that a worker must know; small enough to be sent to any machine."""

    store: str
    """The folder in which the build works."""
    url: str | None
    """Where the store is, if that folder only mirrors it."""
    corner: str = ""
    """Folder in the store's tmp/ for this run alone, where other parts work at the same time."""
    lock_token: str
    """Names the build that has the store's lock."""
    config: str
    """Fingerprint that the receipts carry."""
    options: SourceOptions
    tokenizer: TokenizerInfo
    """The copy in the store, described once by the driver."""
    special_tokens: str
    engine: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    val_fraction: float
    max_reject_fraction: float
    memory: MemoryPlan
    is_own_process: bool = True
    """Whether a worker may limit the memory of its process; not where that is the user's own."""
    shape: RowShape | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Which engine a worker uses, sent when it is ready."""

    name: str
    reference: str
    note: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """What was done since the last report."""

    unit: str
    input_bytes: int
    documents: int
    tokens: int
    rejected: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    """A unit is committed."""

    unit: str
    pid: int
    counts: Counts
    engine: EngineFacts
    checked_bytes: int = 0
    stage_seconds: dict[str, float]
