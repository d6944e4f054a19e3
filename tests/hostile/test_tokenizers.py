"""Tokenizers made by someone who wishes harm, and texts that break one that is sound."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.engines.detectors import (
    byte_level_json,
    split_sequence,
)
from tests.hostile.attack import tried

import tokenmill
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.engines.parity import CheckedEngine

# Fails in a second on a text that the pattern of o200k fails on after eleven million letters.
CATASTROPHIC = r"(?:[A-Z]*[A-Z]*)*[a-z]|."
BAD_ROW = "A" * 60


def write_tokenizer(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files_of(store: Path) -> dict[str, bytes]:
    """Everything that a build committed."""
    return {
        str(file.relative_to(store)): file.read_bytes()
        for kind in ("shards", "rejects")
        for file in sorted((store / kind).iterdir())
    }


def assert_agree(engine: CheckedEngine, texts: list[str]) -> None:
    batch = TextBatch.from_texts(texts)
    found, expected = engine.encode(batch), engine.reference.encode(batch)
    for index, text in enumerate(texts):
        assert found[index].tolist() == expected[index].tolist(), text


@pytest.mark.parametrize("shape", ["text", "prompt-completion"])
def test_a_row_on_which_the_reference_fails_is_rejected_and_nothing_else(
    shape: str, tmp_path: Path
) -> None:
    content = byte_level_json([(b"a", b"b")], pre_tokenizer=split_sequence((CATASTROPHIC,)))
    folder = write_tokenizer(tmp_path / "tokenizer", content)
    texts = [f"ab row {index} ab" for index in range(300)]
    bad = [5, 6, 299]
    for index in bad:
        texts[index] = BAD_ROW
    options: dict[str, Any] = {"max_rejects": 0.02, "eos": False}
    if shape == "text":
        rows = write_rows(tmp_path / "rows.jsonl", texts)
    else:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": t, "completion": "1"}) + "\n" for t in texts))
        options["format"] = shape
    stores = []
    for workers, memory in ((1, "1GB"), (2, "3GB")):
        store = tmp_path / f"store-{workers}"
        result = tokenmill.build(
            rows, out=store, tokenizer=folder, workers=workers, memory=memory, **options
        )
        assert (result.totals.documents, result.totals.rejected) == (297, 3)
        stores.append(files_of(store))
    assert stores[0] == stores[1]
    (rejects,) = (data for name, data in stores[0].items() if name.startswith("rejects"))
    lines = [json.loads(line) for line in rejects.splitlines()]
    assert [line["row"] for line in lines] == bad
    assert {line["reason"] for line in lines} == {"cannot-encode"}
    assert tokenmill.verify(tmp_path / "store-1").ok
    tried("a row on which the reference engine fails", len(bad))
