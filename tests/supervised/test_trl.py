"""TRL counts the labels that a store says, and those are the ones that it would find by itself."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop import peers
from tests.interop.stores import random_shards
from tests.loader.stores import write_store
from tests.supervised.shaping import chat

import tokenmill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def _trl() -> None:
    peers.require("trl")


def build(folder: Path, tokenizer: Path, rows: list[Any]) -> Path:
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenmill.build(
        folder / "chats.jsonl",
        tokenizer=tokenizer,
        out=folder / "store",
        format="chat",
        workers=1,
    )
    return folder / "store"


@pytest.mark.slow
def test_trl_counts_what_it_would_find_by_itself(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [
        chat(f"question {i}", f"answer {i}\nof two lines", "and then?", "no " * (i % 5))
        for i in range(30)
    ]
    tokenizer = family_dir("chatml-generation")
    store = build(tmp_path, tokenizer, rows)
    exports = {"cache": str(tmp_path / "cache")}
    for to in ("arrow", "parquet"):
        exports[to] = str(tmp_path / to)
        tokenmill.export_store(store, to=to, out=tmp_path / to, workers=1)
    shards = random_shards(2, documents=12)
    masks = [[[int(n % 3 > 0) for n in range(len(ids))] for ids in shard] for shard in shards]
    others = [
        write_store(tmp_path / "masked", shards, masks=masks),
        write_store(tmp_path / "plain", shards),
    ]
    chats, paths = tmp_path / "chats.jsonl", [other.path for other in others]
    found = peers.run("trl_sft", "labels", tokenizer, chats, store, exports, paths)

    # Each chat is a document, in the order of the rows.
    assert found["store"] == found["trl"]
    assert found["arrow"] == found["trl"]
    assert found["parquet"] == found["trl"]
    # What TRL before 1.7 keeps where it packs rows.
    assert found["masks"] == found["trl"]
    tokens = sum(map(len, found["trl"]["ids"]))
    counted = tokenmill.Store(store).num_counted
    assert found["trl"]["counted"] == counted < tokens / 2

    for other, rows in zip(others, found["others"], strict=True):
        documents = [(ids.tolist(), other.mask(k)) for k, ids in enumerate(other)]
        assert rows["input_ids"] == [ids for ids, _ in documents]
        assert rows["labels"] == [
            ids if mask is None else np.where(mask, ids, -100).tolist() for ids, mask in documents
        ]
        masks = [mask.tolist() for _, mask in documents if mask is not None]
        assert rows.get("assistant_masks", []) == masks


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"packing": True, "max_length": 64}], ids=["rows", "packed"]
)
def test_a_model_that_trl_trained_on_a_store_goes_on_with_the_next_letters(
    family_dir: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    letters = string.ascii_lowercase
    rows = [chat(f"after {letters[i]}?", " ".join(letters[i + 1 : i + 6])) for i in range(20)]
    tokenizer = family_dir("chatml-generation")
    store = build(tmp_path, tokenizer, rows * 4)
    settings = {"max_steps": 150, "learning_rate": 1e-2, **options}
    answer = peers.run("trl_sft", "answers", tokenizer, store, "after d?", settings)
    # Which letter comes first, so small a model need not know.
    said = answer.removesuffix("<|im_end|>").split(" ")
    first = letters.index(said[0])
    assert said == [*letters[first : first + 5]]


@pytest.mark.slow
def test_the_example_trains_on_the_labels_of_the_store(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    tokenizer = family_dir("chatml")
    store = build(tmp_path, tokenizer, [chat(f"{i}?", f"{i} and more") for i in range(50)])
    done = subprocess.run(
        [sys.executable, peers.ROOT / "examples" / "feed_trl.py", store, tokenizer],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": f"{peers.ROOT / 'src'}:{peers.PEERS}"},
    )
    assert done.returncode == 0, done.stderr
    counted, losses = done.stdout.splitlines()[-2:]
    number = f"{tokenmill.Store(store).num_counted:,}"
    assert counted == f"{number} labels count, and {number} of the store"
    first, last = losses.removeprefix("loss ").split(" -> ")
    assert float(last) < float(first)
