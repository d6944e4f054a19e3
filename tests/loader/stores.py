"""Stores of given tokens, written by the store's own writer, for the tests of the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.store.samples import BYTES_ENGINE, CONFIG, EOS, identity

from tokenmill.engines.load import describe, find_tokenizer
from tokenmill.store import snapshots
from tokenmill.store.facts import (
    Bounds,
    Counts,
    SourceFacts,
    UnitFacts,
    assemble_manifest,
    write_manifest,
)
from tokenmill.store.layout import StoreLayout
from tokenmill.store.reader import Store
from tokenmill.store.write import UnitWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenmill.store.facts import Receipt

Shards = "Sequence[Sequence[Sequence[int]]]"


def write_store(
    root: Path,
    shards: Sequence[Sequence[Sequence[int]]],
    *,
    vocab_size: int = 60_000,
    masks: Sequence[Sequence[Sequence[int]]] | None = None,
    paths: Sequence[str] = (),
) -> Store:
    """A store with these shards, each a list of documents, each a list of ids (as they are).

    `masks` has the same shape: whether each of the ids counts. `paths` are those of the files that
    the shards are of. A store that is there already has grown.
    """
    layout = StoreLayout(root)
    snapshots.keep(layout)
    receipts = [
        _write_shard(
            layout,
            documents,
            mask=None
            if masks is None
            else [token for document in masks[number] for token in document],
            path=paths[number] if paths else f"part-{number}.jsonl",
            vocab_size=vocab_size,
        )
        for number, documents in enumerate(shards)
    ]
    names = [receipt.unit.name for receipt in receipts]
    facts = identity(vocab_size=vocab_size, mask=masks is not None)
    # That of the tokenizer `bytes`, so that files made of the store can be imported with it.
    named = describe(find_tokenizer("bytes")).fingerprint
    facts = facts.but(tokenizer=facts.tokenizer.but(fingerprint=named))
    manifest = assemble_manifest(layout, facts, units=names)
    write_manifest(layout, manifest)
    snapshots.tidy(layout, manifest)
    return Store(root)


def numbered_store(
    root: Path, lengths: Sequence[Sequence[int]], *, vocab_size: int = 60_000
) -> Store:
    """A store whose documents have these lengths; token k of the stream has the id k."""
    shards, position = [], 0
    for shard in lengths:
        documents = []
        for length in shard:
            documents.append(range(position, position + length))
            position += length
        shards.append(documents)
    assert position <= vocab_size, "ids must stay unique"
    return write_store(root, shards, vocab_size=vocab_size)


def _write_shard(
    layout: StoreLayout,
    documents: Sequence[Sequence[int]],
    *,
    mask: Sequence[int] | None,
    path: str,
    vocab_size: int,
) -> Receipt:
    unit = UnitFacts.of(path, index=0, start=0, end=None)
    lengths = [len(document) for document in documents]
    with UnitWriter(layout, unit, vocab_size=vocab_size) as writer:
        if documents:
            writer.append(
                "train",
                np.array([token for document in documents for token in document], np.uint32),
                lengths=np.array(lengths),
                rows=np.arange(len(documents)),
                mask=None if mask is None else np.array(mask, np.uint8),
            )
        return writer.commit(
            source=SourceFacts(
                size=1000, version="v1", digest="d" * 32, is_last=True, num_lines=len(documents)
            ),
            config=CONFIG,
            counts=Counts.of(
                rows=len(documents),
                documents=len(documents),
                empty=0,
                rejected=0,
                input_bytes=20 * len(documents),
                text_bytes=sum(lengths),
                tokens=sum(lengths),
            ),
            bounds=Bounds(largest_row_bytes=max(lengths, default=0), smallest_too_large_bytes=None),
            engine=BYTES_ENGINE,
        )


__all__ = ["EOS", "numbered_store", "write_store"]
