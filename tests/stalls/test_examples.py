"""The example finds the loop that is starved, and the one that is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
