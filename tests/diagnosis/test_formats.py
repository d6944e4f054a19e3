"""Rows that are more than a text: what is timed is the text that they become."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.supervised.families import FAMILIES, write_family

import tokenmill

if TYPE_CHECKING:
    from pathlib import Path


def rows_of(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(40):
        asked, answered = f"What is {number} plus 1?", f"It is {number + 1}, of course."
        if kind == "prompt-completion":
            found.append({"prompt": asked, "completion": answered})
        else:
            roles = {"user": asked, "assistant": answered}
            messages = [{"role": role, "content": text} for role, text in roles.items()]
            found.append({"messages": messages})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "prompt-completion"])
def test_the_text_of_rows_is_timed_and_the_rows_are_built(
    kind: str, tmp_path: Path, training_texts: list[str]
) -> None:
    texts = [text[:15_000] for text in training_texts]
    tokenizer = write_family(FAMILIES["chatml"], tmp_path / "chatml", texts)
    corpus, kept = tmp_path / "rows.jsonl", tmp_path / "ways"
    rows = [*rows_of(kind), {"other": 1}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tokenmill.diagnose(
        corpus, tokenizer=tokenizer, format=kind, seconds=0.05, workers=1, scripts=kept
    )
    assert found.sample is not None
    assert (found.sample.documents, found.sample.rejected) == (40, 1)
    assert {way.key: way.problem for way in found.ways if way.problem} == {}
    sample = [json.loads(line)["text"] for line in (kept / "sample.jsonl").open()]
    for number, text in enumerate(sample):
        assert f"What is {number} plus 1?" in text
        assert f"It is {number + 1}, of course." in text
        assert ("<|im_start|>user" in text) == (kind == "chat")
    [joined] = [way for way in found.ways if way.key == "joined"]
    assert (joined.compared_documents, joined.changes_ids) == (40, False)
    [build] = [way for way in found.ways if way.key == "build"]
    assert build.documents == 40
    assert any("Rows became texts before the clock started" in line for line in found.advice)
    command = shlex.split(found.commands[0])
    assert command[-2:] == ["--format", kind]
    # What was kept runs on what was kept.
    names = {way.key for way in found.ways}
    assert {path.stem for path in kept.glob("*.py")} == names
    done = subprocess.run(
        [sys.executable, "one-by-one.py", "sample.jsonl", "0.05"], cwd=kept, capture_output=True
    )
    assert done.returncode == 0, done.stderr
