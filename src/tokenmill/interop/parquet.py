"""Parquet files of tokens: a row is a document, a piece of a very long one, or a packed row.

    train-00000-of-00004.parquet    id, chunk_index (documents), input_ids, ...

A list must fit one page of 2 GiB, so documents of more than `ROW_TOKENS` tokens are cut;
`chunk_index` counts the pieces, and an import puts them together again. Row groups are small enough
to be streamed and shuffled. Names are those that `datasets.load_dataset` finds splits by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    About,
    Block,
    Detection,
    ExportPlan,
    Foreign,
    ForeignPart,
    Format,
    Setting,
    Sure,
    check_expansion,
    check_held,
    damaged,
    file_size,
)
from tokenmill.interop.columns import (
    cut_at_eos,
    files_below,
    first_bytes,
    note_of,
    split_of,
)
from tokenmill.interop.records import (
    columns_of,
    extra_columns,
    id_dtype,
    open_records,
    padding_note,
    stretch_of,
)
from tokenmill.interop.tables import (
    CHUNK_INDEX,
    SETTINGS,
    Sink,
    is_chunked,
    list_arrays,
    list_fields,
    read_batches,
    table_columns,
    table_parts,
)
from tokenmill.sources.parquet import check_chunks, columns_below, pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions, Part, PartDone
    from tokenmill.interop.columns import Columns
    from tokenmill.interop.parts import PartFiles
    from tokenmill.interop.records import Batch
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json

MAGIC = b"PAR1"
ID = "id"
ROW_TOKENS = 16 << 20
"""64 MB as int32: far below a page, and what others cut at too."""
GROUP_TOKENS = 4 << 20


class Parquet(Format):
    """Parquet files."""

    about = About(
        name="parquet",
        title="Parquet with lists of ids",
        read_by="datasets, pyarrow, polars, DuckDB, Daft, Ray Data",
        kept="documents or rows, loss masks, numbers of documents",
        lost="nothing",
        rows=True,
        settings={
            **SETTINGS,
            "group_tokens": Setting(default=GROUP_TOKENS, help="tokens of a row group, about"),
            "row_tokens": Setting(
                default=ROW_TOKENS, help="documents of more tokens are cut; chunk_index counts"
            ),
            "level": Setting(default=1, help="level of zstd"),
        },
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        """A part to a file."""
        parts = table_parts(
            stores,
            options,
            lambda split, number, count: f"{split}-{number:05d}-of-{count:05d}.parquet",
        )
        return ExportPlan(parts=parts)

    def write(
        self, store: Store, part: Part, options: ExportOptions, out: PartFiles
    ) -> Mapping[str, Json]:
        """One file."""
        columns, dtype = columns_of(part), id_dtype(store, options)
        chunked = options.seq_len is None
        numbers = [pa.field(ID, pa.int64())]
        numbers += [pa.field(CHUNK_INDEX, pa.int32())] if chunked else []
        schema = pa.schema(numbers + list_fields(columns, dtype))
        first, last = stretch_of(part)
        groups, cut = int(options.settings["group_tokens"]), 0
        with pq.ParquetWriter(
            Sink(out.create(part.files[0])),
            schema,
            compression="zstd",
            compression_level=int(options.settings["level"]),
            use_dictionary=False,
            write_statistics=[ID],
        ) as writer:
            for batch in open_records(store, options).batches(first, last, tokens=groups):
                number, index, lengths = _pieces(batch, first, int(options.settings["row_tokens"]))
                first += len(batch.lengths)
                cut += len(lengths) - len(batch.lengths)
                arrays = [pa.array(number), *([pa.array(index)] if chunked else [])]
                arrays += list_arrays(batch, columns, dtype, lengths)
                writer.write_batch(pa.record_batch(arrays, schema=schema))
        return {"cut": cut}

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        done: Sequence[PartDone],
        out: PartFiles,
    ) -> Sequence[str]:
        """Nothing to write: the files say all."""
        notes = ['read it with: datasets.load_dataset("parquet", data_dir=FOLDER)']
        cut = sum(int(str(each.facts["cut"])) for each in done)
        if cut:
            limit = options.settings["row_tokens"]
            notes.append(f"documents of over {limit:,} tokens were cut into {cut:,} rows more")
        columns = extra_columns(stores, options)
        for split, store in stores.items():
            notes += padding_note(open_records(store, options), split, columns)
        return notes

    def detect(self, path: Path) -> Detection | None:
        """By names and first bytes."""
        files = files_below(path, [".parquet"])
        if files and first_bytes(files[0][1]).startswith(MAGIC):
            return Detection(Sure.CERTAIN, "begins with PAR1")
        if path.is_file() and first_bytes(path).startswith(MAGIC):
            return Detection(Sure.CERTAIN, "begins with PAR1")
        return None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Files in the order of their names."""
        return ParquetFiles(path, options)


def _pieces(
    batch: Batch, first: int, limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Rows of a batch: numbers of their records, of the piece in it, and lengths."""
    counts = np.maximum(1, -(-batch.lengths // limit))
    numbers = np.repeat(np.arange(first, first + len(counts)), counts)
    begins = np.cumsum(counts) - counts
    index = np.arange(len(numbers)) - np.repeat(begins, counts)
    left = np.repeat(batch.lengths, counts) - index * limit
    return numbers, index.astype(np.int32), np.minimum(left, limit)


class ParquetFiles(Foreign):
    """Files of one or more splits."""

    has_borders = True

    def __init__(self, path: Path, options: ImportOptions) -> None:
        self._options = options
        found = files_below(path, [".parquet"])
        if not found and path.is_file():
            found = [(path.name, path)]
        if not found:
            raise damaged(path, "holds no Parquet files", hint="name a file or a folder of them")
        self.files = dict(found)
        self.has_mask = False
        parts: list[ForeignPart] = []
        for name, file in found:
            with _open(file) as parquet:
                schema = parquet.schema_arrow
                columns = table_columns(schema, options, path=file)
                _check_claims(parquet.metadata, columns, file)
                self.has_mask = self.has_mask or columns.has_mask
                joined = is_chunked(schema) or options.split_at_eos
                parts += _cut(name, split_of(name, options), parquet.metadata, joined)
        self.parts = tuple(parts)
        self.note = note_of(options)

    def blocks(self, part: ForeignPart) -> Iterator[Block]:
        """The rows of some row groups."""
        return cut_at_eos(self._read(part), self._options, path=self.files[part.path])

    def _read(self, part: ForeignPart) -> Iterator[Block]:
        path = self.files[part.path]
        with _open(path) as parquet:
            schema = parquet.schema_arrow
            columns, chunked = table_columns(schema, self._options, path=path), is_chunked(schema)
            names = [*columns.names, *([CHUNK_INDEX] if chunked else [])]
            end = parquet.metadata.num_row_groups if part.end is None else part.end
            batches = _batches(parquet, range(part.start, end), names, path)
            yield from read_batches(batches, columns, self._options, path=path, chunked=chunked)


def _open(path: Path) -> Any:
    file_size(path)
    try:
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, f"cannot be read as Parquet: {error}") from error


def _check_claims(metadata: Any, columns: Columns, path: Path) -> None:
    """Compare what the end of a file says of its ids with the bytes that they take."""
    try:
        chunked = is_chunked(metadata.schema.to_arrow_schema())
        wanted = (*columns.names, *([CHUNK_INDEX] if chunked else []))
        check_chunks(metadata, wanted, size=file_size(path))
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, f"cannot be read as Parquet: {error}") from error
    for number in range(metadata.num_row_groups):
        chunks = _chunks(metadata, number, columns.names)
        ids = chunks[columns.ids]
        # A run of the same id takes no bytes at all, so both are looked at.
        claimed = max(ids.total_uncompressed_size, 4 * ids.num_values)
        check_expansion(path, claimed, packed=max(0, ids.total_compressed_size))
        for name in columns.names:
            if chunks[name].num_values != ids.num_values:
                raise damaged(path, f"has {name!r} of other lengths than {columns.ids!r}")


def _chunks(metadata: Any, group: int, names: Sequence[str]) -> dict[str, Any]:
    """The columns of a row group by their names."""
    return {
        name: metadata.row_group(group).column(index)
        for name in names
        for index in columns_below(metadata, (name,))
    }


def _check_pages(metadata: Any, group: int, names: Sequence[str], path: Path) -> None:
    """See that the pages hold what the end of the file says of them, and none is too large."""
    with path.open("rb") as file:
        for name, chunk in _chunks(metadata, group, names).items():
            values = 0
            for page in pages(file, chunk):
                check_held(path, page.size, f"a page of {name!r}")
                values += 0 if page.is_dictionary else page.num_values
            if values != chunk.num_values:
                raise damaged(
                    path,
                    f"has {values:,} values in the pages of {name!r}, and its footer says"
                    f" {chunk.num_values:,}",
                )


def _cut(name: str, split: str, metadata: Any, joined: bool) -> Iterator[ForeignPart]:
    """Runs of row groups; a file whose documents go over several rows stays in one."""
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    start = held = index = 0
    for group, size in enumerate(sizes):
        held += size
        if group == len(sizes) - 1 or (held >= IMPORT_PART_BYTES and not joined):
            yield ForeignPart(
                path=name, index=index, start=start, end=group + 1, split=split, bytes=held
            )
            start, held, index = group + 1, 0, index + 1
    if not sizes:
        yield ForeignPart(path=name, index=0, start=0, end=0, split=split)


def _batches(parquet: Any, groups: range, names: Sequence[str], path: Path) -> Iterator[Any]:
    """Batches of about a block's size."""
    metadata = parquet.metadata
    try:
        for group in groups:
            _check_pages(metadata, group, names, path)
            facts, found = metadata.row_group(group), 0
            values = max(chunk.num_values for chunk in _chunks(metadata, group, names).values())
            mean = max(1, facts.total_byte_size, 4 * values) // max(1, facts.num_rows)
            rows = max(1, min(1 << 16, BLOCK_BYTES // max(1, mean)))
            for batch in parquet.iter_batches(
                rows, row_groups=[group], columns=[*names], use_threads=False
            ):
                found += batch.num_rows
                yield batch
            if found != facts.num_rows:
                raise damaged(
                    path, f"has {found:,} rows in a group whose footer says {facts.num_rows:,}"
                )
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, f"cannot be read as Parquet: {error}") from error
