"""Arrow tables of tokens: what `datasets.load_from_disk` opens, and Parquet files.

Both hold the same columns: a list of ids in each row, maybe `labels` and masks beside it.

    data-00000-of-00002.arrow       record batches with lists `input_ids`, ...
    state.json                      the files in their order
    dataset_info.json               all that `datasets` asks for; types are those of the columns

Several splits are a `DatasetDict`: a folder for each, and `dataset_dict.json`. An import reads the
same, and single `.arrow` files of either kind, streams and files.

    train-00000-of-00004.parquet    id, chunk_index (documents), input_ids, ...

A list of Parquet must fit one page of 2 GiB, so documents of more than `ROW_TOKENS` tokens are cut;
`chunk_index` counts the pieces, and an import puts them together again. Row groups are small enough
to be streamed and shuffled. Names are those that `datasets.load_dataset` finds splits by.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.errors import SourceError
from tokenmill.interop import base, records
from tokenmill.sources.tables import batch_bytes, check_chunks, columns_below, pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.layout import Json

# What `datasets` makes of columns with these names.
TYPES = {"labels": pa.int64(), "attention_mask": pa.int8(), "loss_mask": pa.int8()}
# What labels are there for, where it is not to say what counts for the loss.
LABELS_OF = b"tokenmill.labels"
FILE_TOKENS = 64 << 20
CHUNK_INDEX = "chunk_index"
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
FILE_MAGIC, STREAM_MAGIC = b"ARROW1", b"\xff\xff\xff\xff"
MAGIC = b"PAR1"
ID = "id"
# 64 MB as int32: far below a page, and what others cut at too.
ROW_TOKENS = 16 << 20
GROUP_TOKENS = 4 << 20


class _Table(records.RowFormat):
    """Files of columns of lists."""

    # Trainers that take such rows look at labels; some make attention masks of their own.
    padding_columns = ("labels", "attention_mask")

    def schema(self, export: Export, fields: Sequence[Any]) -> Any:
        """Of files with these fields; it says where labels tell of padding alone."""
        has_mask = any(store.has_mask for store in export.stores.values())
        says = {LABELS_OF: b"padding"} if self.pads(export) and not has_mask else None
        return pa.schema(fields, metadata=says)

    def ranges(self, export: Export, split: str) -> list[records.Range]:
        budget = export.options.file_tokens or FILE_TOKENS
        # A document counts as one token at least: files full of empty ones are bounded too.
        source = self.records(export, split)
        found = source.cut(lambda lengths: np.maximum(lengths, 1), budget=budget)
        return [*found] or [(0, 0, 0)]


def _fields(extra: Sequence[str], dtype: np.dtype[Any]) -> list[Any]:
    """The fields of ids and of the columns beside them."""
    fields = [pa.field(records.IDS, pa.list_(pa.from_numpy_dtype(dtype)))]
    return fields + [pa.field(name, pa.list_(TYPES[name])) for name in extra]


def _arrays(
    batch: records.RecordChunk, extra: Sequence[str], dtype: np.dtype[Any], lengths: records.Lengths
) -> list[Any]:
    """The columns of a batch as arrays of lists of these lengths."""
    offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    values = (batch.column(name, dtype=dtype).reshape(-1) for name in (records.IDS, *extra))
    return [pa.ListArray.from_arrays(offsets, pa.array(each)) for each in values]


def _read_batches(
    batches: Iterable[Any], schema: Any, options: base.ImportOptions, *, path: Path
) -> base.Blocks:
    """Documents of record batches; where rows are chunks, those of a document are joined."""
    columns = _table_columns(schema, options, path=path)
    held: list[base.DocumentBlock] = []
    for batch in batches:
        # What a file says of its buffers is not true before it was compared, entry by entry.
        batch.validate(full=True)
        block = columns.joined({name: _flat_lists(batch, name, path) for name in columns.names})
        if not _is_chunked(schema):
            yield block
            continue
        numbers = batch.column(batch.schema.get_field_index(CHUNK_INDEX))
        if numbers.null_count:
            raise base.damaged(path, f"has rows without {CHUNK_INDEX!r}: null")
        begins = np.flatnonzero(numbers.to_numpy() == 0)
        first, last = (int(begins[0]), int(begins[-1])) if len(begins) else (len(numbers), 0)
        held.append(_rows(block, 0, first))
        base.check_held(path, sum(each.ids.nbytes for each in held), "a document")
        if len(begins):
            yield from _whole(held)
            if first < last:
                whole = _rows(block, first, last)
                joined = np.add.reduceat(whole.lengths, begins[:-1] - first)
                yield whole._replace(lengths=joined)
            held = [_rows(block, last, len(numbers))]
    yield from _whole(held)


def _whole(held: Sequence[base.DocumentBlock]) -> base.Blocks:
    """The one document whose chunks were held back."""
    joined = records.join_blocks([block for block in held if len(block.lengths)])
    if len(joined.lengths):
        yield joined._replace(lengths=np.array([len(joined.ids)], np.int64))


def _rows(block: base.DocumentBlock, first: int, last: int) -> base.DocumentBlock:
    ends = np.append(0, np.cumsum(block.lengths))
    here = slice(int(ends[first]), int(ends[last]))
    mask = None if block.mask is None else block.mask[here]
    return base.DocumentBlock(block.ids[here], block.lengths[first:last], mask)


def _table_columns(schema: Any, options: base.ImportOptions, *, path: Path) -> records.Columns:
    """Which columns of lists to read."""
    names = [field.name for field in schema if any(check(field.type) for check in LISTS)]
    if (schema.metadata or {}).get(LABELS_OF) == b"padding" and "attention_mask" in names:
        names = [name for name in names if name != "labels"]
    columns = records.Columns.choose(names, options, path=path)
    for name in (*columns.names, CHUNK_INDEX):
        if len(schema.get_all_field_indices(name)) > 1:
            raise base.damaged(
                path,
                f"has several columns {name!r}, and nothing says which to read",
                hint="write it again with one of them",
            )
    return columns


def _is_chunked(schema: Any) -> bool:
    """Whether rows may be chunks of documents that are too long for one."""
    place = schema.get_field_index(CHUNK_INDEX)
    return bool(place >= 0 and pa.types.is_integer(schema.field(place).type))


def _names(schema: Any, options: base.ImportOptions, *, path: Path) -> list[str]:
    """The columns that are read."""
    names = _table_columns(schema, options, path=path).names
    return [*names, *([CHUNK_INDEX] if _is_chunked(schema) else [])]


def _flat_lists(batch: Any, name: str, path: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a column of lists, and how many are in each."""
    lists = batch.column(batch.schema.get_field_index(name))
    if lists.null_count:
        raise base.damaged(path, f"has rows without {name!r}: null", hint="leave these rows out")
    values = lists.flatten()
    if values.null_count or not pa.types.is_integer(values.type):
        raise base.damaged(
            path,
            f"holds lists of {values.type} in {name!r}{', some null' if values.null_count else ''}",
            hint="name a column of lists of whole numbers with: --set column=NAME",
        )
    if pa.types.is_fixed_size_list(lists.type):
        if len(lists) and not lists.type.list_size:
            raise base.damaged(path, f"holds {len(lists):,} rows of {name!r} that are of no length")
        lengths = np.full(len(lists), lists.type.list_size, np.int64)
    else:
        lengths = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return values.to_numpy(), lengths


class Arrow(_Table):
    """Folders of `save_to_disk`."""

    index = (STATE, INFO)
    about = base.About(
        name="arrow",
        title="Hugging Face datasets on disk (Arrow)",
        read_by="datasets (load_from_disk) and with it TRL's SFTTrainer, by `labels`; pyarrow",
        kept="documents or rows, loss masks",
        lost="nothing",
        rows=True,
        settings=records.SETTINGS,
    )

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"data-{number:05d}-of-{count:05d}.arrow")

    def index_files(self, export: Export) -> list[str]:
        return super().index_files(export) + ([DICT] if len(export.stores) > 1 else [])

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        columns, dtype = self.columns(export), self.dtype(export, part.split)
        schema = self.schema(export, _fields(columns, dtype))
        with pa.ipc.new_stream(out.create(part.files[0]), schema) as writer:
            for batch in self.records(export, part.split).batches(part.first, part.last):
                arrays = _arrays(batch, columns, dtype, batch.lengths)
                writer.write_batch(pa.record_batch(arrays, schema=schema))

    def describe(self, export: Export, split: str, parts: Sequence[base.ExportTask]) -> list[bytes]:
        state: dict[str, Json] = {
            "_data_files": [{"filename": part.files[0].rpartition("/")[2]} for part in parts],
            "_fingerprint": export.stores[split].content[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        both = (state, {"citation": "", "description": ""})
        return [json.dumps(each, indent=2, sort_keys=True).encode() for each in both]

    def how_to_read(self, export: Export) -> list[str]:
        return ["read it with: datasets.load_from_disk(FOLDER)"]

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        if len(export.stores) > 1:
            out.write(DICT, json.dumps({"splits": [*export.stores]}).encode())
        return super().finish(export, out)

    def detect(self, path: Path) -> base.Detection | None:
        if records.split_folders(path, STATE):
            return base.Detection(base.Sure.CERTAIN, f"has the {STATE} of a dataset on disk")
        if path.is_file() and base.first_bytes(path).startswith((FILE_MAGIC, STREAM_MAGIC)):
            return base.Detection(base.Sure.CERTAIN, "begins as an Arrow file or stream")
        if base.find_files(path, ".arrow"):
            return base.Detection(base.Sure.LIKELY, "holds .arrow files")
        return None

    def open(self, path: Path, options: base.ImportOptions) -> base.Foreign:
        parts = [
            base.ForeignPart(path=name, file=file, split=split, bytes=base.file_size(file))
            for name, file, split in _list_files(path, options)
        ]

        def read(part: base.ForeignPart) -> base.Blocks:
            path, schema = part.file, _schema(part.file)
            fields = [schema.get_field_index(name) for name in _names(schema, options, path=path)]
            return _read_batches(_batches(path, fields), schema, options, path=path)

        has_mask = any(
            _table_columns(_schema(part.file), options, path=part.file).has_mask for part in parts
        )
        return records.open_rows(parts, read, options, has_mask=has_mask)


def _list_files(path: Path, options: base.ImportOptions) -> Iterator[tuple[str, Path, str]]:
    """Name, path and split of every data file."""
    folders = records.split_folders(path, STATE)
    for prefix, folder in folders:
        try:
            state = records.read_json(folder / STATE)
            names = [str(file["filename"]) for file in state["_data_files"]]
            indices = state.get("_indices_data_files")
            split = base.split_of(prefix or str(state.get("_split") or ""), options)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise base.damaged(
                folder / STATE, f"does not say which files there are: {error!r}"
            ) from error
        if indices:
            raise SourceError(
                f"{str(folder)!r} is a selection of rows, which tokenmill does not read",
                hint="write it anew with datasets: flatten_indices(), then save_to_disk()",
            )
        for name in names:
            if "/" in name or "\\" in name:
                raise base.damaged(folder / STATE, f"names a file {name!r} outside its folder")
            yield f"{prefix}{name}", folder / name, split
    if not folders:
        hint, kinds = f"name a folder with a {STATE}, or a file", (".arrow", ".feather")
        for name, file in records.row_files(path, *kinds, what="Arrow files", hint=hint):
            yield name, file, base.split_of(name, options)


def _stream(path: Path) -> Any:
    """The bytes of a stream; an Arrow file is one after its first eight."""
    base.file_size(path)
    data = pa.memory_map(str(path)).read_buffer()
    return data.slice(8) if base.first_bytes(path).startswith(FILE_MAGIC) else data


def _schema(path: Path) -> Any:
    with base.reading(path):
        return pa.ipc.open_stream(_stream(path)).schema


def _batches(path: Path, fields: Sequence[int]) -> Iterator[Any]:
    """Batches with some columns of a file, which are compared with what the file says of itself."""
    data, count = _stream(path), 0
    for held in batch_bytes(str(path), is_mapped=True):
        base.check_held(path, held, "a packed batch")
    options = pa.ipc.IpcReadOptions(included_fields=[*fields])
    for batch in pa.ipc.open_stream(data, options=options):
        count += 1
        yield batch
    if base.first_bytes(path).startswith(FILE_MAGIC):
        listed = pa.ipc.open_file(pa.memory_map(str(path))).num_record_batches
        if listed != count:
            raise base.damaged(path, f"holds {count:,} batches, and its end lists {listed:,}")


class Parquet(_Table):
    """Parquet files."""

    about = base.About(
        name="parquet",
        title="Parquet with lists of ids",
        read_by="datasets and with it TRL's SFTTrainer, by `labels`; pyarrow, polars, DuckDB, Daft,"
        " Ray Data",
        kept="documents or rows, loss masks, numbers of documents",
        lost="nothing",
        rows=True,
        settings={
            **records.SETTINGS,
            "group_tokens": base.Setting(default=GROUP_TOKENS, help="tokens of a row group, about"),
            "row_tokens": base.Setting(
                default=ROW_TOKENS, help="documents of more tokens are cut; chunk_index counts"
            ),
            "level": base.Setting(default=1, help="level of zstd"),
        },
    )

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return f"{split}-{number:05d}-of-{count:05d}.parquet"

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        options, columns = export.options, self.columns(export)
        dtype = self.dtype(export, part.split)
        chunked, limit = options.seq_len is None, int(options.settings["row_tokens"])
        numbers = [pa.field(ID, pa.int64())]
        numbers += [pa.field(CHUNK_INDEX, pa.int32())] if chunked else []
        schema = self.schema(export, numbers + _fields(columns, dtype))
        first, groups = part.first, int(options.settings["group_tokens"])
        with pq.ParquetWriter(
            out.create(part.files[0]),
            schema,
            compression="zstd",
            compression_level=int(options.settings["level"]),
            use_dictionary=False,
            write_statistics=[ID],
        ) as writer:
            source = self.records(export, part.split)
            for batch in source.batches(first, part.last, tokens=groups):
                number, index, lengths = _pieces(batch, first, limit)
                first += len(batch.lengths)
                arrays = [pa.array(number), *([pa.array(index)] if chunked else [])]
                arrays += _arrays(batch, columns, dtype, lengths)
                writer.write_batch(pa.record_batch(arrays, schema=schema))

    def how_to_read(self, export: Export) -> list[str]:
        notes = ['read it with: datasets.load_dataset("parquet", data_dir=FOLDER)']
        cut, limit = 0, int(export.options.settings["row_tokens"])
        for part in export.parts:
            lengths = self.records(export, part.split).lengths(part.first, part.last)
            cut += int((np.maximum(lengths - 1, 0) // limit).sum())
        if cut:
            notes.append(f"documents of over {limit:,} tokens were cut into {cut:,} rows more")
        return notes

    def detect(self, path: Path) -> base.Detection | None:
        files = [file for _, file in base.find_files(path, ".parquet")[:1]]
        files += [path] if path.is_file() else []
        if any(base.first_bytes(file).startswith(MAGIC) for file in files):
            return base.Detection(base.Sure.CERTAIN, "begins with PAR1")
        return None

    def open(self, path: Path, options: base.ImportOptions) -> base.Foreign:
        parts: list[base.ForeignPart] = []
        has_mask = False
        for name, file in records.row_files(path, ".parquet", what="Parquet files"):
            with _open(file) as parquet:
                schema = parquet.schema_arrow
                columns = _table_columns(schema, options, path=file)
                _check_claims(parquet.metadata, columns, file)
                has_mask = has_mask or columns.has_mask
                # Documents that go over several rows, and so groups, stay in one part.
                joined = _is_chunked(schema) or options.split_at_eos
                whole = base.ForeignPart(path=name, file=file, split=base.split_of(name, options))
                parts += _cut(whole, parquet.metadata, joined)

        def read(part: base.ForeignPart) -> base.Blocks:
            with _open(part.file) as parquet:
                assert part.end is not None
                schema, groups = parquet.schema_arrow, range(part.start, part.end)
                names = _names(schema, options, path=part.file)
                batches = _parquet_batches(parquet, groups, names, part.file)
                yield from _read_batches(batches, schema, options, path=part.file)

        return records.open_rows(parts, read, options, has_mask=has_mask)


def _pieces(
    batch: records.RecordChunk, first: int, limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Rows of a batch: numbers of their records, of the piece in it, and lengths."""
    counts = np.maximum(1, -(-batch.lengths // limit))
    numbers = np.repeat(np.arange(first, first + len(counts)), counts)
    begins = np.cumsum(counts) - counts
    index = np.arange(len(numbers)) - np.repeat(begins, counts)
    left = np.repeat(batch.lengths, counts) - index * limit
    return numbers, index.astype(np.int32), np.minimum(left, limit)


def _open(path: Path) -> Any:
    base.file_size(path)
    with base.reading(path):
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)


def _check_claims(metadata: Any, columns: records.Columns, path: Path) -> None:
    """Compare what the end of a file says of its ids with the bytes that they take."""
    with base.reading(path):
        wanted = _names(metadata.schema.to_arrow_schema(), columns.options, path=path)
        check_chunks(metadata, tuple(wanted), size=base.file_size(path))
    for number in range(metadata.num_row_groups):
        chunks = _chunks(metadata, number, columns.names)
        ids = chunks[columns.ids]
        # A run of the same id takes no bytes at all, so both are looked at.
        claimed = max(ids.total_uncompressed_size, 4 * ids.num_values)
        base.check_expansion(path, claimed, packed=max(0, ids.total_compressed_size))
        for name in columns.names:
            if chunks[name].num_values != ids.num_values:
                raise base.damaged(path, f"has {name!r} of other lengths than {columns.ids!r}")


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
                base.check_held(path, page.size, f"a page of {name!r}")
                values += 0 if page.is_dictionary else page.num_values
            if values != chunk.num_values:
                raise base.damaged(
                    path,
                    f"has {values:,} values in the pages of {name!r}, and its footer says"
                    f" {chunk.num_values:,}",
                )


def _cut(whole: base.ForeignPart, metadata: Any, joined: bool) -> Iterator[base.ForeignPart]:
    """Runs of row groups."""
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    start = held = index = 0
    for group, size in enumerate(sizes, 1):
        held += size
        if group == len(sizes) or (held >= base.IMPORT_PART_BYTES and not joined):
            yield dataclasses.replace(whole, index=index, start=start, end=group, bytes=held)
            start, held, index = group, 0, index + 1
    if not sizes:
        yield dataclasses.replace(whole, end=0)


def _parquet_batches(
    parquet: Any, groups: range, names: Sequence[str], path: Path
) -> Iterator[Any]:
    """Batches of about a block's size."""
    metadata = parquet.metadata
    for group in groups:
        _check_pages(metadata, group, names, path)
        facts, found = metadata.row_group(group), 0
        values = max(chunk.num_values for chunk in _chunks(metadata, group, names).values())
        mean = max(1, facts.total_byte_size, 4 * values) // max(1, facts.num_rows)
        rows = max(1, min(1 << 16, base.BLOCK_BYTES // max(1, mean)))
        for batch in parquet.iter_batches(
            rows, row_groups=[group], columns=[*names], use_threads=False
        ):
            found += batch.num_rows
            yield batch
        if found != facts.num_rows:
            raise base.damaged(
                path, f"has {found:,} rows in a group whose footer says {facts.num_rows:,}"
            )
