"""Stores of any size that take next to no space, for measuring how long it takes to open one.

Everything is as a build leaves it but for the ids: manifest, receipts, document indices and
checksums are real, made by the store's own code, while a `.bin` is one hole in a sparse file, all
zeros. All shards have the same documents; their indices are files of their own nevertheless.
"""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.store.facts import (
    BoundaryToken,
    Bounds,
    Counts,
    EngineFacts,
    FileFacts,
    ManifestAssembler,
    Receipt,
    ShardFacts,
    ShardFiles,
    SourceFacts,
    StoreIdentity,
    TokenizerFacts,
    UnitFacts,
    facts_of,
    write_manifest,
)
from tokenmill.store.format import index_blocks
from tokenmill.store.layout import TRAIN, StoreLayout

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SIGMA = 1.044
"""Of the logarithm of lengths: with it FineWeb's median of 400 tokens goes with its mean of 690."""
IDENTITY = StoreIdentity(
    created_by="the benchmarks of tokenmill",
    tokenizer=TokenizerFacts(kind="bytes", fingerprint="0" * 64, vocab_size=50_257, files={}),
    eos=BoundaryToken(token="<|endoftext|>", id=50_256, position="end"),
    bos=None,
    special_tokens="text",
    config={},
    fingerprint="hollow",
)
ENGINE = EngineFacts(
    name="none",
    version="0",
    reference="none",
    reference_version="0",
    checked_documents=0,
    mismatches=0,
    redone=False,
    routed_documents=0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hollow:
    """How large a store is."""

    shards: int
    shard_tokens: int
    shard_documents: int

    @property
    def tokens(self) -> int:
        return self.shards * self.shard_tokens


def document_lengths(size: Hollow) -> NDArray[np.int32]:
    """Lognormal lengths, all of them at least 1, that add up to the tokens of a shard."""
    drawn = np.random.default_rng(0).lognormal(0.0, SIGMA, size.shard_documents)
    spare = size.shard_tokens - size.shard_documents
    ends = np.floor(np.cumsum(drawn) * (spare / drawn.sum())).astype(np.int64)
    ends[-1] = spare
    return (np.diff(ends, prepend=0) + 1).astype(np.int32)


def write_hollow(root: Path, size: Hollow) -> None:
    """Make the store; nothing is synced, since nobody needs it after a crash."""
    shutil.rmtree(root, ignore_errors=True)
    layout = StoreLayout(root)
    layout.create()
    index = b"".join(index_blocks([document_lengths(size)], dtype=IDENTITY.dtype))
    hole = FileFacts(
        bytes=size.shard_tokens * IDENTITY.dtype.itemsize,
        checksum=_checksum_of_zeros(size.shard_tokens * IDENTITY.dtype.itemsize),
    )
    assembler = ManifestAssembler(IDENTITY)
    for number in range(size.shards):
        unit = UnitFacts.of(f"part-{number:05}.jsonl", index=0, start=0, end=None)
        receipt = _receipt(unit, size, bin=hole, idx=facts_of(index))
        layout.shard_file(unit.name, "idx").write_bytes(index)
        bin_file = layout.shard_file(unit.name, "bin")
        bin_file.touch()
        os.truncate(bin_file, hole.bytes)
        data = receipt.to_bytes()
        layout.receipt(unit.name).write_bytes(data)
        assembler.add(receipt, file=facts_of(data))
    write_manifest(layout, assembler.manifest())


def _receipt(unit: UnitFacts, size: Hollow, *, bin: FileFacts, idx: FileFacts) -> Receipt:  # noqa: A002
    shard = ShardFacts(
        name=unit.name,
        split=TRAIN,
        documents=size.shard_documents,
        tokens=size.shard_tokens,
        max_id=0,
        rows=(0, size.shard_documents),
        files=ShardFiles(bin=bin, idx=idx),
    )
    return Receipt(
        unit=unit,
        source=SourceFacts(
            size=4 * size.shard_tokens,
            version="0",
            digest="0" * 32,
            is_last=True,
            num_lines=size.shard_documents,
        ),
        config=IDENTITY.fingerprint,
        counts=Counts.of(
            rows=size.shard_documents,
            documents=size.shard_documents,
            input_bytes=4 * size.shard_tokens,
            text_bytes=4 * size.shard_tokens,
            tokens=size.shard_tokens,
        ),
        bounds=Bounds(largest_row_bytes=0, smallest_too_large_bytes=None),
        engine=ENGINE,
        shards=(shard,),
        rejects=None,
    )


def _checksum_of_zeros(num_bytes: int) -> str:
    block = bytes(1 << 20)
    content = xxhash.xxh3_128()
    for left in itertools.takewhile(lambda n: n > 0, itertools.count(num_bytes, -len(block))):
        content.update(block[:left])
    return content.hexdigest()
