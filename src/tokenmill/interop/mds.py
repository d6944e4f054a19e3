"""MosaicML's MDS: shards of samples and an `index.json`, as its MDSWriter makes them.

The column of ids is `tokens`, as in llm-foundry. Shards are cut where MDSWriter would cut them, and
their bytes are its bytes (mds_samples.py). Reading is in mds_shards.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError
from tokenmill.interop.base import About, Detection, ExportPlan, Format, Setting, Sure
from tokenmill.interop.columns import COLUMN_SETTING, LABELS_SETTING
from tokenmill.interop.mds_samples import HASH, SampleLayout
from tokenmill.interop.mds_shards import INDEX, MdsFolder, find_indexes
from tokenmill.interop.records import (
    COLUMNS_SETTING,
    IDS,
    IDS_SETTING,
    Folders,
    columns_of,
    extra_columns,
    id_dtype,
    json_bytes,
    open_records,
    padding_note,
    stretch_of,
    stretch_part,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import ExportOptions, Foreign, ImportOptions, Part, PartDone
    from tokenmill.interop.parts import PartFiles
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json

TOKENS = "tokens"
SIZE_LIMIT = 1 << 26
MAX_SHARD_BYTES = (1 << 32) - 1


class Mds(Format):
    """MDS folders."""

    about = About(
        name="mds",
        title="MosaicML Streaming (MDS)",
        read_by="mosaicml-streaming, llm-foundry, Composer",
        kept="documents or rows, loss masks",
        lost="documents without tokens, which MDS cannot hold",
        rows=True,
        settings={
            "ids": IDS_SETTING,
            "columns": COLUMNS_SETTING,
            "size_limit": Setting(default=SIZE_LIMIT, help="bytes of a shard, at most"),
            "column": COLUMN_SETTING,
            "labels": LABELS_SETTING,
        },
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        """A part to a shard."""
        columns = extra_columns(stores, options)
        layout = _layout(next(iter(stores.values())), options, columns)
        folders = Folders(options.splits)
        parts = []
        for split, store in stores.items():
            records = open_records(store, options)
            stretches = [each for each in records.cut(layout.costs, budget=layout.room) if each[2]]
            for number, stretch in enumerate(stretches):
                file = folders.name(split, f"shard.{number:05}.mds")
                parts.append(stretch_part(split, number, stretch, file, columns=columns))
        indexes = tuple(folders.name(split, INDEX) for split in stores)
        return ExportPlan(parts=tuple(parts), index_files=indexes)

    def write(
        self, store: Store, part: Part, options: ExportOptions, out: PartFiles
    ) -> Mapping[str, Json]:
        """One shard."""
        layout = _layout(store, options, columns_of(part))
        records = open_records(store, options)
        first, last = stretch_of(part)
        lengths = records.lengths(first, last)
        lengths = lengths[lengths > 0]
        header = layout.header(lengths)
        if len(header) + int(layout.sizes(lengths).sum()) > MAX_SHARD_BYTES:
            raise _too_long(store, int(lengths.max()))
        file = out.create(part.files[0])
        file.write(header)
        for batch in records.batches(first, last):
            for block in layout.encode(batch):
                file.write(block)
        return {"samples": len(lengths), "bytes": file.bytes, "hash": file.checksum}

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        done: Sequence[PartDone],
        out: PartFiles,
    ) -> Sequence[str]:
        """The index of each split."""
        columns = extra_columns(stores, options)
        layout = _layout(next(iter(stores.values())), options, columns)
        folders = Folders(options.splits)
        notes = [
            f"read it with: streaming.StreamingDataset(local={folder!r}, batch_size=N)"
            for folder in folders.paths(out.folder.root)
        ]
        for split, store in stores.items():
            shards = [_entry(layout, each) for each in done if each.part.split == split]
            out.write(folders.name(split, INDEX), json_bytes({"shards": shards, "version": 2}))
            notes += padding_note(open_records(store, options), split, columns)
        return notes

    def detect(self, path: Path) -> Detection | None:
        """By the index."""
        if not find_indexes(path):
            return None
        return Detection(Sure.CERTAIN, f"its {INDEX} lists MDS shards")

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Shards by their index."""
        return MdsFolder(path, options)


def _layout(store: Store, options: ExportOptions, columns: Sequence[str]) -> SampleLayout:
    dtype = id_dtype(store, options)
    limit = int(options.settings["size_limit"])
    if options.file_tokens is not None:
        limit = options.file_tokens * dtype.itemsize
    if not 1 <= limit <= MAX_SHARD_BYTES:
        raise UsageError(
            f"shards of {limit:,} bytes cannot be: offsets in them are of 32 bits",
            hint=f"choose up to {MAX_SHARD_BYTES:,}, for example: --set size_limit={SIZE_LIMIT}",
        )
    named = {TOKENS: IDS, **{name: name for name in columns}}
    return SampleLayout(named, dtype=dtype, size_limit=limit)


def _entry(layout: SampleLayout, done: PartDone) -> dict[str, Any]:
    """What the index says of a shard."""
    raw = {
        "basename": done.part.files[0].rpartition("/")[2],
        "bytes": done.facts["bytes"],
        "hashes": {HASH: done.facts["hash"]},
    }
    samples = done.facts["samples"]
    return {**layout.config, "raw_data": raw, "samples": samples, "zip_data": None}


def _too_long(store: Store, length: int) -> UsageError:
    return UsageError(
        f"a document of {length:,} tokens in {str(store.path)!r} does not fit a shard, whose"
        " offsets are of 32 bits",
        hint="export rows instead: --seq-len 2048",
    )
