"""The measurement of chats: a few from end to end, and a table of made-up numbers."""

from __future__ import annotations

import dataclasses

import pytest
from tests.benchmarks.test_render import ORIGIN, table_row

from benchmarks import render, supervised, supervised_table


def row(contender: str, seconds: list[float], *, digest: str = "a") -> dict[str, object]:
    return {
        "contender": contender,
        "tokenizer": "some",
        "rows": 100,
        "tokens": 5000,
        "text_bytes": 20_000,
        "digest": digest,
        "seconds": seconds,
        "whole_seconds": [2 * each for each in seconds],
    }


def test_the_table_compares_medians_and_says_whether_the_outcomes_are_equal() -> None:
    results = {
        **ORIGIN,
        "rounds": 3,
        "compared_rows": 100,
        "corpus": "made up",
        "measurements": [row("usual", [10.0, 8.0, 9.0]), row("tokenmill", [0.5, 0.6, 0.9])],
    }
    text = supervised_table.supervised_body(results)
    assert "the same in all of them" in text
    cells = table_row(text, "usual")
    assert cells[1] == "11 (10 to 12)"
    assert cells[3] == "15.0 times"
    assert cells[4] == "7.5 times"
    seconds = {"seconds": [3.0], "whole_seconds": [4.0]}
    own = {"seconds": [1.0], "whole_seconds": [2.0]}
    puzzles = {"tokenizer": "small", "rows": 9, "script": seconds, "own": own, "is_equal": True}
    cells = table_row(supervised_table.supervised_body(results | {"puzzles": [puzzles]}), "small")
    assert cells[3:] == ["3.0 times", "2.0 times"]
    results["measurements"] = [row("usual", [1.0]), row("tokenmill", [1.0], digest="b")]
    assert "NOT the same" in supervised_table.supervised_body(results)


@pytest.mark.slow
def test_a_few_chats_are_measured_and_come_out_equal() -> None:
    size = dataclasses.replace(supervised.QUICK, rows=30, own_rows=60, puzzles=2000)
    rows = supervised.measure_all(size)
    assert len(rows) == 3
    assert len({each["digest"] for each in rows}) == 1
    assert "supervised" in render.SECTIONS
    puzzles = supervised.measure_puzzles(size)
    assert len(puzzles) == 3
    assert all(each["is_equal"] for each in puzzles)
