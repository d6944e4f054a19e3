"""A diagnosis as JSON. The keys are stable and described in docs/diagnosing.md."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tokenmill.diagnosis.evidence import findings

if TYPE_CHECKING:
    from tokenmill.diagnosis.evidence import Evidence
    from tokenmill.diagnosis.values import Diagnosis

SCHEMA = "tokenmill.diagnosis/1"


def as_json(found: Diagnosis) -> dict[str, Any]:
    """For json.dumps: every number, and what follows from them."""
    return {
        "schema": SCHEMA,
        "inputs": list(found.inputs),
        "tokenizer": found.tokenizer,
        "machine": dataclasses.asdict(found.machine),
        "sample": None if found.sample is None else dataclasses.asdict(found.sample),
        "lengths": None if found.lengths is None else dataclasses.asdict(found.lengths),
        "demands": [
            {**dataclasses.asdict(demand), "total_tokens_per_second": demand.total}
            for demand in found.demands
        ],
        "ways": [
            {**dataclasses.asdict(way), "tokens_per_second": way.tokens_per_second}
            for way in found.ways
        ],
        "verdicts": [_verdict(dataclasses.asdict(verdict)) for verdict in found.verdicts],
        "sweep": [dataclasses.asdict(point) for point in found.sweep],
        "recommendation": None
        if found.recommendation is None
        else dataclasses.asdict(found.recommendation),
        "advice": list(found.advice),
        "commands": list(found.commands),
        "evidence": _evidence(found.evidence),
    }


def _verdict(members: dict[str, Any]) -> dict[str, Any]:
    # A way that feeds nothing is infinitely too slow, which JSON has no number for.
    slow = members["times_too_slow"]
    return {**members, "times_too_slow": None if slow == float("inf") else slow}


def _evidence(evidence: Evidence) -> dict[str, Any]:
    """What was brought along, summed up; the files themselves have the rest."""
    stalls, run, timeline = evidence.stalls, evidence.run, evidence.timeline
    return {
        "stalls": None
        if stalls is None
        else {
            name: getattr(stalls, name)
            for name in ("steps", "wait_share", "p50_ms", "p99_ms", "max_ms", "first_wait_ms")
        },
        "run": None
        if run is None
        else {"path": run.path, "lines": len(run.lines), "bad_lines": run.bad_lines},
        "timeline": None
        if timeline is None
        else {"path": timeline.path, "runs": len(timeline.segments), "seconds": timeline.seconds},
        "findings": findings(evidence),
    }
