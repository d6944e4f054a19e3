"""How often an attack is tried, and the count of what was tried.

`make test` tries each attack a few times, `make test-slow` thousands of times (it sets
HOSTILE=long). Random cases are hypothesis', so that a failure is reduced and printed with the line
that plays it again. Every case is counted by its kind; `python -m tests.hostile.report` writes the
counts of the last run into docs/security.md.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = os.environ.get("HOSTILE") == "long"
COUNTS = Path(__file__).parents[2] / ".work" / "hostile"

_tried: Counter[str] = Counter()


def attack(*, short: int, long: int, parts: int = 1) -> Callable[[Any], Any]:
    """The settings of a random attack: `@attack(short=20, long=5000)` above `@given(...)`.

    Its long form is `parts` tests, so that no one of them takes minutes.
    """
    how = settings(
        max_examples=long // parts if LONG else short,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

    def apply(test: Any) -> Any:
        test = how(test)
        test.parts = parts if LONG else 1
        return test

    return apply


def times(*, short: int, long: int) -> int:
    """How often an attack is repeated that no generator makes (a kill, say)."""
    return long if LONG else short


def tried(kind: str, cases: int = 1) -> None:
    """Count cases that were really tried; `kind` is a few words for docs/security.md."""
    _tried[kind] += cases


def write_counts(worker: str) -> None:
    """Add the counts of this process to the folder, a file for each process."""
    if _tried:
        COUNTS.mkdir(parents=True, exist_ok=True)
        facts = {"form": "long" if LONG else "short", "tried": _tried}
        (COUNTS / f"{worker}.json").write_text(json.dumps(facts, indent=1, sort_keys=True))
