"""How a contender is told what to do and how it answers: a JSON argument in, a JSON line out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a contender is asked for."""

    files: list[str]
    tokenizer: str
    """Folder with tokenizer.json."""
    out: str
    """Folder that does not exist yet."""
    workers: int
    memory: str
    mode: str = ""
    """Variant of the contender, where it has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a contender did."""

    seconds: float
    """The whole call, start-up counted."""
    startup_seconds: float = 0.0
    """The part of it before the first document, where the contender can tell."""
    documents: int
    tokens: int
    """Ids of the text alone, without those put between documents: equal for all contenders."""
    peak_memory_bytes: int | None = None
    """As the contender itself measured it."""
    stage_seconds: dict[str, float] | None = None


def read_job() -> Job:
    """The job in the first argument."""
    return Job(**json.loads(sys.argv[1]))


def answer(report: Report) -> None:
    """Print the report as the last line."""
    print(json.dumps(asdict(report)), flush=True)
