"""The worker of an import: reads parts of foreign files and commits each as a unit of a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill._version import __version__
from tokenmill.errors import SourceError
from tokenmill.interop.base import damaged, reading
from tokenmill.interop.identity import EosTally, tally_eos
from tokenmill.store.facts import Bounds, Counts, EngineFacts, SourceFacts, UnitFacts
from tokenmill.store.format import (
    MAX_DOCUMENT_TOKENS,
    map_file,
    read_index,
    token_dtype,
    view_tokens,
)
from tokenmill.store.reader import MappedShard
from tokenmill.store.writer import UnitWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.interop.base import Block, Foreign, ForeignPart, ImportOptions
    from tokenmill.interop.pool import Report
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.receipt import Receipt


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportWorker:
    """What all parts of an import have in common; each becomes a unit, on any thread."""

    foreign: Foreign
    format: str
    options: ImportOptions
    layout: StoreLayout
    config: str
    vocab_size: int

    def work(self, task: ForeignPart, report: Report) -> EosTally:
        unit, vocab_size = unit_of(task), self.vocab_size
        with UnitWriter(
            self.layout, unit, dtype=token_dtype(vocab_size), vocab_size=vocab_size
        ) as writer:
            rows = tokens = largest = read = 0
            for block in self._blocks(task):
                self._append(writer, task, block, first_row=rows)
                rows += len(block.lengths)
                tokens += len(block.ids)
                largest = max(largest, int(block.lengths.max(initial=0)))
                read += block.ids.nbytes
                report(min(read, task.bytes))
            size, version = source_version(self.foreign, task.path)
            receipt = writer.commit(
                source=SourceFacts(
                    size=size,
                    version=version,
                    digest="",  # nobody reads it: files that changed are imported again
                    is_last=False,
                    num_lines=0,
                ),
                config=self.config,
                counts=Counts(rows=rows, documents=rows, input_bytes=task.bytes, tokens=tokens),
                bounds=Bounds(largest_row_bytes=largest, smallest_too_large_bytes=None),
                engine=_engine(self.format),
            )
        return tally_receipt(self.layout, receipt, self.options.eos_id)

    def _blocks(self, task: ForeignPart) -> Iterator[Block]:
        with reading(self.foreign.files[task.path]):
            yield from self.foreign.blocks(task)

    def _append(
        self, writer: UnitWriter, task: ForeignPart, block: Block, *, first_row: int
    ) -> None:
        rows = np.arange(first_row, first_row + len(block.lengths), dtype=np.int64)
        mask = block.mask
        if mask is None and self.foreign.has_mask:
            mask = np.ones(len(block.ids), np.uint8)  # a store has masks for all or for none
        ids = block.ids
        if ids.dtype == np.dtype("<u4"):
            ids = ids.view("<i4")  # the bytes of a store; what is too large becomes negative
        try:
            writer.append(task.split, ids, lengths=block.lengths, rows=rows, mask=mask)
        except ValueError:
            vocab_size = self.vocab_size
            check_ids(block, vocab_size=vocab_size, path=task.path, first=task.start + first_row)
            raise


def check_ids(block: Block, *, vocab_size: int, path: str, first: int) -> None:
    """Raise SourceError, which names the document, where an id is not in the vocabulary."""
    ids, longest = block.ids, int(block.lengths.max(initial=0))
    if longest > MAX_DOCUMENT_TOKENS:
        raise damaged(
            path,
            f"has a document of {longest:,} tokens, and a store's have {MAX_DOCUMENT_TOKENS:,} at"
            " most",
            hint="cut it, or name the end-of-text id and use --split-at-eos",
        )
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    place = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    document = first + int(np.searchsorted(np.cumsum(block.lengths), place, side="right"))
    raise SourceError(
        f"document {document:,} of {path!r} has the id {int(ids[place]):,}, and the tokenizer has"
        f" {vocab_size:,} ids: they are of another tokenizer, or of another type than {ids.dtype}",
        hint="name the tokenizer that made them with --tokenizer, or their type with --dtype",
    )


def tally_receipt(layout: StoreLayout, receipt: Receipt, eos_id: int | None) -> EosTally:
    """Where the end-of-text id stands in a unit that is complete."""
    tally = EosTally()
    for shard in receipt.shards:
        index = read_index(layout.shard_file(shard.name, "idx"))
        data = map_file(layout.shard_file(shard.name, "bin"))
        tokens = view_tokens(data, dtype=index.dtype)
        tally += tally_eos(MappedShard(tokens=tokens, index=index), eos_id)
    return tally


def source_version(foreign: Foreign, path: str) -> tuple[int, str]:
    """Size and version of a foreign file; the version changes when one of its sidecars does."""
    files = (foreign.files[path], *foreign.sidecars.get(path, ()))
    facts = [file.stat() for file in files]
    return facts[0].st_size, "-".join(str(each.st_mtime_ns) for each in facts)


def unit_of(part: ForeignPart) -> UnitFacts:
    return UnitFacts.of(part.path, index=part.index, start=part.start, end=part.end)


def _engine(format_name: str) -> EngineFacts:
    return EngineFacts(
        name=f"import from {format_name}",
        version=__version__,
        reference="none",
        reference_version="",
    )
