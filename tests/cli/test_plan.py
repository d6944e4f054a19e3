from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Cli


def test_a_plan_tells_what_a_build_would_take(cli: Cli, corpus: Path, bpe: Path) -> None:
    shown = cli("plan", corpus.name, "-t", bpe, "--memory", "1GB", "--workers", "2").out
    for fact in (
        r"input +1 file, [\d.]+ kB",
        r"to build +1 unit, [\d.]+ kB uncompressed",
        r"documents +about [\d,]+",
        r"tokens +about [\d,]+ as uint16",
        r"disk +about [\d.]+ kB",
        r"time +about [\d.]+ s",
        r"memory +at most 1\.0 GB for 2 workers",
        r"workers +time, about +memory needed, about\n +1 +[\d.]+ s +\d+ MB\n +2 +[\d.]+ s +\d+ MB",
        r"boundaries +<\|endoftext\|> after each document",
    ):
        assert re.search(fact, shown), f"{fact}\n{shown}"


def test_a_plan_is_close_to_the_build_and_knows_what_is_done(cli: Cli, corpus: Path) -> None:
    args = (corpus.name, "-t", "bytes", "-o", "store", "--json")
    planned = cli("plan", *args).json
    built = cli("build", *args).json
    assert abs(planned["estimated_tokens"] / built["totals"]["tokens"] - 1) < 0.1
    assert planned["units_to_build"] == built["units_built"] == 1
    assert planned["by_workers"][0]["workers"] == 1
    again = cli("plan", *args).json
    assert again["units_to_build"] == 0
    assert again["units_complete"] == 1
