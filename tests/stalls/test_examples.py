"""The examples tell a starved loop from a fed one, and what a slow one loses its time with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.stalls.test_script import WATCHED, lines_of, run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_tells_a_starved_loop_from_a_fed_one() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "stall_meter.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    starved, fed = done.stdout.split("--- in memory\n")
    assert "tokenmill diagnose DATA" in starved
    assert "times as fast" in starved
    assert "it is not starved" in fed
    assert "tokenmill diagnose DATA" not in fed


@pytest.fixture(scope="module")
def slow_loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The account of the example's loop, and what was printed."""
    path = tmp_path_factory.mktemp("account") / "account.json"
    script = EXAMPLES / "slow_loop.py"
    arguments = ("--steps", "3-12", "--json", path, script, "--steps", "15")
    done = run(*WATCHED, *arguments, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert "ms a step, mean loss" in done.stdout
    return json.loads(path.read_text()), done.stderr


@pytest.mark.slow
def test_the_example_s_tokenizer_and_collate_are_found_by_their_lines(
    slow_loop: tuple[dict[str, Any], str],
) -> None:
    account, printed = slow_loop

    assert (account["steps"], account["first_step"]) == (9, 3)
    assert "tokenizer.encode(text[:1536])" in lines_of(account, "T")["tokenizing"]
    assert "clean" in lines_of(account, "D")
    assert "examples/slow_loop.py" in printed
    assert "tokenmill build DATA" in printed
    assert "num_workers=4" in printed
    total = sum(part["seconds"] for part in account["parts"])
    assert total == pytest.approx(account["seconds"])
    assert {each["advice"] for each in account["advice"]} >= {
        "tokenize once, before you train: tokenmill build DATA --tokenizer TOKENIZER --out STORE"
    }


@pytest.mark.slow
def test_a_machine_without_a_device_says_what_it_cannot_see(
    slow_loop: tuple[dict[str, Any], str],
) -> None:
    account, printed = slow_loop
    if account["device_busy_seconds"] is not None:
        pytest.skip("there is a device")
    assert "not seen here:" in printed
    assert "CUDA was not used" in printed
    assert [part["letter"] for part in account["parts"]] == ["D", "T", "X"]
