"""Stores and token files for the tests of interop: documents as lists of ids, and back."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st
from tests.loader.stores import EOS, write_store

import tokenmill
from tokenmill.interop.base import ImportRequest
from tokenmill.interop.imports import run_import, unknown_tokenizer

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tokenmill.interop.imports import ImportResult
    from tokenmill.store.reader import Store

Documents = list[list[int]]
NARROW, WIDE = 60_000, 200_000
"""Vocabularies whose ids take 2 and 4 bytes."""
BOOKS = ".tokenmill-export"


def documents(vocab_size: int, *, eos: bool, empty: bool = True) -> st.SearchStrategy[Documents]:
    """Documents of a few ids, with the end-of-text at their end alone, some without any id."""
    ids = st.integers(0, vocab_size - 1).filter(lambda token: token != EOS)
    one = st.lists(ids, min_size=0 if empty else 1, max_size=12)
    if eos:
        one = one.map(lambda body: [*body, EOS])
    return st.lists(one, max_size=8)


def shards(vocab_size: int, *, eos: bool, empty: bool = True) -> st.SearchStrategy[list[Documents]]:
    found = st.lists(documents(vocab_size, eos=eos, empty=empty), min_size=1, max_size=4)
    return found.filter(any)


def flat(found: Iterable[Documents]) -> Documents:
    return [document for part in found for document in part]


def ids_of(store: Store) -> Documents:
    return [np.asarray(document).tolist() for document in store]


def random_shards(
    count: int, *, documents: int, tokens: int = 60, seed: int = 0
) -> list[Documents]:
    """Shards whose documents end with the end-of-text and have it nowhere else."""
    dice = np.random.default_rng(seed)
    return [
        [[*dice.integers(0, EOS, dice.integers(1, tokens)).tolist(), EOS] for _ in range(documents)]
        for _ in range(count)
    ]


def import_ids(
    path: Path,
    out: Path,
    *,
    format_name: str | None,
    vocab_size: int = NARROW,
    settings: Mapping[str, str | int | bool] | None = None,
    workers: int | None = 1,
    **options: str | bool | None,
) -> ImportResult:
    """Import ids of a tokenizer of which the size of the vocabulary alone is known."""
    asked = ImportRequest(
        path=path,
        tokenizer="unknown",
        out=out,
        format=format_name,
        settings=settings or {},
        workers=workers,
        **options,  # type: ignore[arg-type]
    )
    return run_import(asked, unknown_tokenizer(vocab_size)._replace(eos=(f"id {EOS}", EOS)))


def tree(root: Path) -> dict[str, bytes]:
    """Every file of an export with its bytes, its own books left out."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and BOOKS not in path.parts
    }


def bytes_store(folder: Path, texts: list[str], *, val: float = 0.0) -> Path:
    """A real store of texts, built with the tokenizer `bytes`."""
    from tests.builder.stores import write_jsonl

    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "in.jsonl", texts)
    out = folder / "store"
    tokenmill.build(folder / "in.jsonl", tokenizer="bytes", out=out, val=val, serial=True)
    return out


__all__ = ["EOS", "write_store"]


def end_in_the_middle(
    code: str, *arguments: str, folder: Path, seen: tuple[Path, str, int], end: signal.Signals
) -> None:
    """Run a program and end it when so many files of a pattern are in a folder."""
    command = [sys.executable, "-c", code, *arguments]
    where, pattern, count = seen
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and len([*where.glob(pattern)]) < count:
            time.sleep(0.001)
        process.send_signal(end)
        process.wait(10)
