"""The values of a diagnosis: what was measured, what is needed, what follows.

All are plain: `--json` prints them, the report draws them, the advice is made of them. A rate is
always tokens per second, and a token one that the tokenizer itself makes of the text (no end
tokens), so that all ways count the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.diagnosis.evidence import Evidence
    from tokenmill.inspection import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where it was measured."""

    cores: int
    """That this process may use."""
    memory_bytes: int
    cpu: str
    python: str
    tokenmill: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """The part of the input that was measured."""

    files: int
    """Of the whole input."""
    input_bytes: int
    """Of the whole input, as it lies on disk."""
    documents: int
    text_bytes: int
    rejected: int
    largest_document_bytes: int
    estimated_text_bytes: int
    """Of the whole input; a guess where it is compressed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WayResult:
    """One way to get tokens, and what it reached."""

    key: str
    """one-by-one, batched, joined, pool, dataloader, build or loader."""
    title: str
    engine: str
    in_loop: bool
    """Whether the training loop itself does the work, so that the GPU can wait for it."""
    feeds: bool
    """False for what is done once, before training."""
    workers: int
    batch: int
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    startup_seconds: float = 0.0
    """Loading the tokenizer and starting workers; not part of `seconds`."""
    sample_ms: float | None = None
    """Median time until one sample that was asked for is there."""
    chunk_ms: float | None = None
    """The same for 8 samples asked for at once."""
    cpu_cores: float = 0.0
    """CPU seconds of the process and its children, for each second."""
    other_cores: float = 0.0
    """The same of all other programs on the machine, meanwhile."""
    peak_memory_bytes: int = 0
    """Resident memory of the process and its children, added up."""
    memory: tuple[tuple[float, int], ...] = ()
    """Seconds since the process began, and its memory then."""
    compared_documents: int = 0
    differing_documents: int = 0
    """Of those compared: ids are not what the tokenizer makes of the document by itself."""
    note: str | None = None
    problem: str | None = None
    """Why it could not be measured."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a training takes."""

    name: str
    """Of the model, or 'as given'."""
    tokens_per_second: float
    """For each GPU."""
    gpus: int
    origin: str
    """How the number came about, in words."""
    basis: str = ""
    """What an estimate rests on; the same for every model."""
    is_estimate: bool

    @property
    def total(self) -> float:
        return self.tokens_per_second * self.gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One way held against one demand."""

    way: str
    demand: str
    state: str
    """starved, borderline or fed."""
    feeds_tokens_per_second: float
    """To all GPUs together, as far as the cores of this machine reach."""
    needs_tokens_per_second: float
    wait_share: float
    """Least share of time that the GPUs wait: tokenizing overlaps with their work."""
    wait_share_in_turn: float
    """Where it does not: each step begins when its tokens are there, and ends before the next."""
    times_too_slow: float
    """Below 1 where the way is fast enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One setting that was tried."""

    key: str
    workers: int
    batch: int
    tokens_per_second: float
    cpu_cores: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Settings for this machine: the smallest within a few percent of the best."""

    build_workers: int
    build_memory_bytes: int
    pool_workers: int | None
    batch: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that `tokenmill diagnose` found."""

    inputs: tuple[str, ...]
    tokenizer: str | None
    machine: Machine
    sample: SampleFacts | None
    lengths: Lengths | None
    """Tokens per document."""
    demands: tuple[Demand, ...]
    ways: tuple[WayResult, ...]
    verdicts: tuple[Verdict, ...]
    sweep: tuple[SweepPoint, ...]
    recommendation: Recommendation | None
    advice: tuple[str, ...]
    commands: tuple[str, ...]
    evidence: Evidence
    """What was brought along: a stall report, a run's metrics, a build's time line."""
