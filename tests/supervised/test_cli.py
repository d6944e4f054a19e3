from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tests.command import tokenmill_here as tokenmill
from tests.supervised.shaping import chat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_build_of_chats_tells_lengths_and_what_a_limit_would_cut(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [chat("why", "because " * (1 + 60 * (i % 20))) for i in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ("build", "chats.jsonl", "-t", family_dir("chatml"), "--format", "chat")
    done = tokenmill(*args, "-o", "store", "--max-length", "300", folder=tmp_path)
    for fact in (
        r"counted +[\d,]+ tokens \([\d.]+%\) count for the loss",
        r"lengths +\d+ to [\d,]+ tokens a row, mean [\d.,]+; percentiles:\s+1% \d+",
        r"documents +\d+ of 60 rows \(\d+ split into \d+\)",
        r"\d+ rows over 300 tokens split into \d+ documents",
        r"cut off +at 512 tokens: \d+ rows? \([\d.]+%\), [\d,]+ tokens \([\d.]+%\)",
    ):
        assert re.search(fact, done.stdout), fact
    shown = tokenmill("inspect", "store", "--doc", "12", folder=tmp_path)
    assert re.search(r"row \d+, line \d+, piece [12] of 2", shown.stdout)
    short = (*args, "-o", "short", "--max-length", "300", "--too-long", "reject")
    done = tokenmill(*short, "--max-rejects", "1", "--json", folder=tmp_path)
    found = json.loads(done.stdout)
    assert found["lengths"]["rejected_too_long"] == found["totals"]["rejected"] > 0
    assert found["lengths"]["longest"] <= 300


def test_a_template_and_its_escapes_reach_the_build(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"q": "1+1", "a": "2"}))
    args = ("build", "p.jsonl", "-t", "bytes", "-o", "store", "--format", "prompt-completion")
    tokenmill(*args, "--template", "Q {q}\\nA{a}", "--completion-field", "a", folder=tmp_path)
    done = tokenmill("inspect", "store", "--doc", "0", "--json", folder=tmp_path)
    assert json.loads(done.stdout)["document"]["text"].startswith("Q 1+1\nA2")
    wrong = ("build", "p.jsonl", "-t", "bytes", "-o", "other", "--template", "{q", "--quiet")
    assert "has no partner" in tokenmill(*wrong, folder=tmp_path, code=2).stderr
