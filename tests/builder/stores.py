"""Input files and comparisons of whole stores, for the tests of the build."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np

import tokenmill
from tokenmill.store import facts
from tokenmill.store.layout import StoreLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

LOGS = {"runs.jsonl", ".lock", ".lock-workers", ".lock-large"}
"""Files of a store that are no part of what it holds."""
HISTORY = ("snapshots/", "retired/")
"""Where a store keeps what it was before it grew."""


def write_jsonl(path: Path, texts: Iterable[object], *, field: str = "text") -> Path:
    """One line per value: an object with the value as its text, or the bytes of a raw line."""
    lines = [
        text if isinstance(text, bytes) else json.dumps({"id": i, field: text}).encode()
        for i, text in enumerate(texts)
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def make_texts(count: int, *, seed: int = 0) -> list[str]:
    """Texts of many lengths, different from each other and for each seed."""
    dice = random.Random(seed)
    words = [
        "mill",
        "grain",
        "Korn",
        "\u00e9tude",
        "\u6c34",
        "\U0001f600",
        "0",
        "\n",
        "  ",
        "x" * 40,
    ]
    return [
        f"{seed}/{i} " + " ".join(dice.choices(words, k=dice.randrange(1, 60)))
        for i in range(count)
    ]


def tree(root: Path, *, history: bool = False) -> dict[str, bytes]:
    """Every file of a store with its bytes, logs left out; what it was once only with `history`."""
    left_out = () if history else HISTORY
    return {
        name: path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in LOGS
        if not (name := path.relative_to(root).as_posix()).startswith(left_out)
    }


def documents(root: Path, *, split: str | None = "train") -> list[list[int]]:
    """All documents of a store, in order."""
    with tokenmill.Store(root, split=split) as store:
        return [np.asarray(document).tolist() for document in store]


def byte_ids(texts: Sequence[str], *, eos: bool = True) -> list[list[int]]:
    """What the tokenizer `bytes` makes of texts."""
    return [[*text.encode(), *([256] if eos else [])] for text in texts]


def begin_older_store(root: Path, *, like: Path, **config: object) -> None:
    """A store without units, begun when `groups` and `files` were no part of a configuration."""
    identity = facts.read_manifest(like).identity
    new = {"groups", "files", "split_by_name"}
    before = {name: value for name, value in identity.config.items() if name not in new} | config
    eos = None if identity.eos is None else (identity.eos.token, identity.eos.id)
    fingerprint = facts.config_fingerprint(
        tokenizer=identity.tokenizer.fingerprint, eos=eos, bos=None, config=before
    )
    layout, known = StoreLayout(root), identity.but(config=before, fingerprint=fingerprint)
    layout.create()
    facts.write_manifest(layout, facts.assemble_manifest(layout, known, units=[]))
