"""What the tests of the formats of rows share: small stores, imports, and what rows must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.loader.stores import EOS, write_store

import tokenmill
from tokenmill.interop.imports import import_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenmill.interop.imports import ImportResult

VOCAB_SIZE = 257
"""Of the tokenizer `bytes`, which needs no file; 256 ends a document."""


def documents_of(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Documents of these lengths, each with its end; a length of 0 has not even that."""
    random = np.random.default_rng(seed)
    return [[*random.integers(0, EOS, n - 1).tolist(), EOS] if n else [] for n in lengths]


def small_store(root: Path, shards: Sequence[Sequence[int]]) -> tokenmill.Store:
    """A store with documents of these lengths, shard by shard."""
    made = [documents_of(lengths, seed=number) for number, lengths in enumerate(shards)]
    write_store(root, made, vocab_size=VOCAB_SIZE)
    return tokenmill.Store(root)


def documents(store: tokenmill.Store) -> list[list[int]]:
    return [document.tolist() for document in store]


def stream(store: tokenmill.Store) -> list[int]:
    return [token for document in store for token in document.tolist()]


def concatenated(store: tokenmill.Store, length: int, *, overlap: int = 0) -> list[list[int]]:
    """Rows as they must be: the stream, cut every `length - overlap` tokens, the end padded."""
    tokens, step = stream(store), length - overlap
    starts = range(0, max(1, len(tokens) - overlap), step)
    rows = [tokens[start : start + length] for start in starts]
    return [row + [EOS] * (length - len(row)) for row in rows]


def import_bytes(path: Path, out: Path, **options: object) -> ImportResult:
    """An import with the byte tokenizer."""
    return import_store(path, tokenizer="bytes", out=out, **options)


def back(path: Path, out: Path, **options: object) -> list[list[int]]:
    """The documents of an import."""
    import_bytes(path, out, **options)
    return documents(tokenmill.Store(out, split=None))


LENGTHS = [[5, 0, 1, 300, 7], [70_000, 2], [40, 40, 40, 1]]
"""Empty, tiny, longer than a byte counts, and longer than two do: all widths of MDS."""
