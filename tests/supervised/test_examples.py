from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.supervised.shaping import chat

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_chats_are_built_and_fed(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}") for i in range(50)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [sys.executable, EXAMPLES / "build_chats.py", "chats.jsonl", family_dir("chatml"), "store"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, second, third = done.stdout.splitlines()
    assert first.startswith("50 chats, ")
    assert second.startswith("the first has ")
    assert third.startswith("a batch of (2, 256): ")
