"""Arrow tables of tokens: columns of lists, written from records and read back.

`datasets` and Parquet files hold the same columns: a list of ids in each row, maybe `labels` and
masks beside it. What both formats share is here.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.errors import SourceError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    About,
    Detection,
    DocumentBlock,
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
    split_of,
)
from tokenmill.interop.records import (
    COLUMN_SETTING,
    COLUMNS_SETTING,
    IDS,
    IDS_SETTING,
    LABELS_SETTING,
    Folders,
    choose_columns,
    column,
    columns_of,
    cut_at_eos,
    extra_columns,
    files_below,
    first_bytes,
    id_dtype,
    make_block,
    note_of,
    open_records,
    padding_note,
    read_json,
    split_folders,
    stretch_of,
    stretch_part,
)
from tokenmill.sources.tables import check_chunks, columns_below, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ExportTask, ImportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.interop.records import Columns, RecordChunk
    from tokenmill.store.layout import Json
    from tokenmill.store.reader import Store


TYPES = {"labels": pa.int64(), "attention_mask": pa.int8(), "loss_mask": pa.int8()}
"""What `datasets` makes of columns with these names."""
FILE_TOKENS = 64 << 20
SETTINGS = {
    "ids": IDS_SETTING,
    "columns": COLUMNS_SETTING,
    "column": COLUMN_SETTING,
    "labels": LABELS_SETTING,
}
"""Of formats with columns of one's choice."""
CHUNK_INDEX = "chunk_index"
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def table_parts(
    stores: Mapping[str, Store],
    options: ExportOptions,
    name: Callable[[str, int, int], str],
) -> tuple[ExportTask, ...]:
    """A part to a file, whose name is made of its split, its number and their count."""
    columns = extra_columns(stores, options)
    parts = []
    for split, store in stores.items():
        id_dtype(store, options)
        budget = options.file_tokens or FILE_TOKENS
        records = open_records(store, options)
        # A document counts as one token at least: files full of empty ones are bounded too.
        stretches = [*records.cut(lambda lengths: lengths + (lengths == 0), budget=budget)]
        stretches = stretches or [(0, 0, 0)]
        parts += [
            stretch_part(split, stretch, name(split, number, len(stretches)), columns=columns)
            for number, stretch in enumerate(stretches)
        ]
    return tuple(parts)


def list_fields(extra: Sequence[str], dtype: np.dtype[Any]) -> list[Any]:
    """The fields of ids and of the columns beside them."""
    fields = [pa.field(IDS, pa.list_(pa.from_numpy_dtype(dtype)))]
    return fields + [pa.field(name, pa.list_(TYPES[name])) for name in extra]


def list_arrays(
    batch: RecordChunk, extra: Sequence[str], dtype: np.dtype[Any], lengths: NDArray[np.int64]
) -> list[Any]:
    """The columns of a batch as arrays of lists of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    borders = pa.array(offsets)
    values = (column(batch, name, dtype=dtype).reshape(-1) for name in (IDS, *extra))
    return [pa.ListArray.from_arrays(borders, pa.array(each)) for each in values]


def read_batches(
    batches: Iterable[Any],
    columns: Columns,
    options: ImportOptions,
    *,
    path: Path,
    chunked: bool,
) -> Iterator[DocumentBlock]:
    """Documents of record batches; where rows are chunks, those of a document are joined."""
    held: list[DocumentBlock] = []
    for batch in batches:
        # What a file says of its buffers is not true before it was compared, entry by entry.
        batch.validate(full=True)
        block = _block(batch, columns, options, path)
        if not chunked:
            yield block
            continue
        begins = _flat_numbers(batch, CHUNK_INDEX, path) == 0
        if not len(begins):
            continue
        first = int(np.argmax(begins)) if begins.any() else len(begins)
        last = len(begins) - 1 - int(np.argmax(begins[::-1])) if begins.any() else 0
        held.append(_rows(block, 0, first))
        check_held(path, sum(each.ids.nbytes for each in held), "a document")
        if begins.any():
            yield from _whole(held)
            if first < last:
                whole = _rows(block, first, last)
                yield whole._replace(
                    lengths=np.add.reduceat(whole.lengths, np.flatnonzero(begins[first:last]))
                )
            held = [_rows(block, last, len(begins))]
    yield from _whole(held)


def _whole(held: Sequence[DocumentBlock]) -> Iterator[DocumentBlock]:
    """The one document whose chunks were held back."""
    parts = [block for block in held if len(block.lengths)]
    if parts:
        ids = np.concatenate([block.ids for block in parts])
        masks = [block.mask for block in parts if block.mask is not None]
        mask = np.concatenate(masks) if masks else None
        yield DocumentBlock(ids, np.array([len(ids)], np.int64), mask)


def _rows(block: DocumentBlock, first: int, last: int) -> DocumentBlock:
    ends = np.cumsum(np.concatenate(([0], block.lengths)))
    here = slice(int(ends[first]), int(ends[last]))
    mask = None if block.mask is None else block.mask[here]
    return DocumentBlock(block.ids[here], block.lengths[first:last], mask)


def table_columns(schema: Any, options: ImportOptions, *, path: Path) -> Columns:
    """Which columns of lists to read."""
    names = [field.name for field in schema if any(check(field.type) for check in LISTS)]
    columns = choose_columns(names, options, path=path)
    for name in (*columns.names, CHUNK_INDEX):
        if len(schema.get_all_field_indices(name)) > 1:
            raise damaged(
                path,
                f"has several columns {name!r}, and nothing says which to read",
                hint="write it again with one of them",
            )
    return columns


def is_chunked(schema: Any) -> bool:
    """Whether rows may be chunks of documents that are too long for one."""
    place = schema.get_field_index(CHUNK_INDEX)
    return bool(place >= 0 and pa.types.is_integer(schema.field(place).type))


def _block(batch: Any, columns: Columns, options: ImportOptions, path: Path) -> DocumentBlock:
    found, lengths = {}, {}
    for name in columns.names:
        found[name], lengths[name] = _flat_lists(batch, name, path)
    for name in columns.names:
        if not np.array_equal(lengths[name], lengths[columns.ids]):
            raise damaged(path, f"has {name!r} of other lengths than {columns.ids!r}")
    return make_block(found, columns, lengths[columns.ids], options, path=path)


def _flat_lists(batch: Any, name: str, path: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a column of lists, and how many are in each."""
    lists = batch.column(batch.schema.get_field_index(name))
    if lists.null_count:
        raise damaged(path, f"has rows without {name!r}: null", hint="leave these rows out")
    values = lists.flatten()
    if values.null_count or not pa.types.is_integer(values.type):
        raise damaged(
            path,
            f"holds lists of {values.type} in {name!r}{', some null' if values.null_count else ''}",
            hint="name a column of lists of whole numbers with: --set column=NAME",
        )
    if pa.types.is_fixed_size_list(lists.type):
        if len(lists) and not lists.type.list_size:
            raise damaged(path, f"holds {len(lists):,} rows of {name!r} that are of no length")
        lengths = np.full(len(lists), lists.type.list_size, np.int64)
    else:
        lengths = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return values.to_numpy(), lengths


def _flat_numbers(batch: Any, name: str, path: Path) -> NDArray[Any]:
    numbers = batch.column(batch.schema.get_field_index(name))
    if numbers.null_count:
        raise damaged(path, f"has rows without {name!r}: null")
    found: NDArray[Any] = numbers.to_numpy()
    return found


# -------------------------------------------------------------------------------------------------
# What `datasets.load_from_disk` opens: Arrow streams, and two small files that describe them.
#
#   | data-00000-of-00002.arrow    record batches with lists `input_ids`, ...
#   | state.json                   the files in their order
#   | dataset_info.json            all that `datasets` asks for; types are those of the columns
#
# Several splits are a `DatasetDict`: a folder for each, and `dataset_dict.json`. An import reads
# the same, and single `.arrow` files of either kind, streams and files.

STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
FILE_MAGIC, STREAM_MAGIC = b"ARROW1", b"\xff\xff\xff\xff"


class Arrow(Format):
    """Folders of `save_to_disk`."""

    about = About(
        name="arrow",
        title="Hugging Face datasets on disk (Arrow)",
        read_by="datasets (load_from_disk), TRL, Axolotl, pyarrow",
        kept="documents or rows, loss masks",
        lost="nothing",
        rows=True,
        settings=SETTINGS,
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        """A part to a data file."""
        folders = Folders(tuple(stores))
        parts = table_parts(
            stores,
            options,
            lambda split, number, count: folders.name(
                split, f"data-{number:05d}-of-{count:05d}.arrow"
            ),
        )
        files = [folders.name(split, file) for split in stores for file in (STATE, INFO)]
        files += [DICT] if len(stores) > 1 else []
        return ExportPlan(parts=parts, index_files=tuple(files))

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        """One data file."""
        columns, dtype = columns_of(part), id_dtype(store, options)
        schema = pa.schema(list_fields(columns, dtype))
        with pa.ipc.new_stream(out.create(part.files[0]), schema) as writer:
            for batch in open_records(store, options).batches(*stretch_of(part)):
                arrays = list_arrays(batch, columns, dtype, batch.lengths)
                writer.write_batch(pa.record_batch(arrays, schema=schema))

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        """What describes the data files of each split."""
        folders = Folders(tuple(stores))
        columns = extra_columns(stores, options)
        notes = ["read it with: datasets.load_from_disk(FOLDER)"]
        for split, store in stores.items():
            files = [part.files[0] for part in parts if part.split == split]
            state = _state(store, [file.rpartition("/")[2] for file in files], split)
            out.write(folders.name(split, STATE), _pretty(state))
            out.write(folders.name(split, INFO), _pretty({"citation": "", "description": ""}))
            notes += padding_note(open_records(store, options), split, columns)
        if len(stores) > 1:
            out.write(DICT, json.dumps({"splits": [*stores]}).encode())
        return notes

    def detect(self, path: Path) -> Detection | None:
        """By what describes a folder, or by the first bytes of a file."""
        if split_folders(path, STATE):
            return Detection(Sure.CERTAIN, f"has the {STATE} of a dataset on disk")
        if path.is_file() and first_bytes(path).startswith((FILE_MAGIC, STREAM_MAGIC)):
            return Detection(Sure.CERTAIN, "begins as an Arrow file or stream")
        if files_below(path, [".arrow"]):
            return Detection(Sure.LIKELY, "holds .arrow files")
        return None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Data files in their order."""
        return ArrowFiles(path, options)


def _state(store: Store, files: Sequence[str], split: str) -> dict[str, Json]:
    return {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": store.content[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }


def _pretty(value: object) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


class ArrowFiles(Foreign):
    """Data files of one or more splits."""

    has_borders = True

    def __init__(self, path: Path, options: ImportOptions) -> None:
        self._options = options
        found = [*_list_files(path, options)]
        if not found:
            raise damaged(
                path, "holds no Arrow files", hint=f"name a folder with a {STATE}, or a file"
            )
        self.files = {name: file for name, file, _ in found}
        self.parts = tuple(
            ForeignPart(path=name, index=0, start=0, end=None, split=split, bytes=file_size(file))
            for name, file, split in found
        )
        self.note = note_of(options)
        self.has_mask = any(
            table_columns(_schema(file), options, path=file).has_mask
            for file in self.files.values()
        )

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The rows of a file."""
        path = self.files[part.path]
        return cut_at_eos(self._read(path), self._options, path=path)

    def _read(self, path: Path) -> Iterator[DocumentBlock]:
        schema = _schema(path)
        columns, chunked = table_columns(schema, self._options, path=path), is_chunked(schema)
        names = [*columns.names, *([CHUNK_INDEX] if chunked else [])]
        fields = [schema.get_field_index(name) for name in names]
        batches = _batches(path, fields)
        yield from read_batches(batches, columns, self._options, path=path, chunked=chunked)


def _list_files(path: Path, options: ImportOptions) -> Iterator[tuple[str, Path, str]]:
    """Name, path and split of every data file."""
    folders = split_folders(path, STATE)
    for prefix, folder in folders:
        try:
            state = read_json(folder / STATE)
            names = [str(file["filename"]) for file in state["_data_files"]]
            indices = state.get("_indices_data_files")
            split = split_of(prefix or str(state.get("_split") or ""), options)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(
                folder / STATE, f"does not say which files there are: {error!r}"
            ) from error
        if indices:
            raise SourceError(
                f"{str(folder)!r} is a selection of rows, which tokenmill does not read",
                hint="write it anew with datasets: flatten_indices(), then save_to_disk()",
            )
        for name in names:
            if "/" in name or "\\" in name:
                raise damaged(folder / STATE, f"names a file {name!r} outside its folder")
            yield f"{prefix}{name}", folder / name, split
    if not folders:
        for name, file in files_below(path, [".arrow", ".feather"]) or _alone(path):
            yield name, file, split_of(name, options)


def _alone(path: Path) -> list[tuple[str, Path]]:
    return [(path.name, path)] if path.is_file() else []


def _stream(path: Path) -> Any:
    """The bytes of a stream; an Arrow file is one behind its first eight."""
    file_size(path)
    data = pa.memory_map(str(path)).read_buffer()
    return data.slice(8) if first_bytes(path).startswith(FILE_MAGIC) else data


def _schema(path: Path) -> Any:
    try:
        return pa.ipc.open_stream(_stream(path)).schema
    except (pa.ArrowException, OSError, EOFError) as error:
        raise damaged(path, f"cannot be read as Arrow: {error}") from error


def _batches(path: Path, fields: Sequence[int]) -> Iterator[Any]:
    """Batches with some columns of a file, which are compared with what the file says of itself."""
    try:
        data, count = _stream(path), 0
        for message in pa.ipc.MessageReader.open_stream(data):
            if message.type != "schema":
                check_held(path, _unpacked_bytes(message), "a packed batch")
        options = pa.ipc.IpcReadOptions(included_fields=[*fields])
        for batch in pa.ipc.open_stream(data, options=options):
            count += 1
            yield batch
        if first_bytes(path).startswith(FILE_MAGIC):
            listed = pa.ipc.open_file(pa.memory_map(str(path))).num_record_batches
            if listed != count:
                raise damaged(path, f"holds {count:,} batches, and its end lists {listed:,}")
    except (pa.ArrowException, OSError, EOFError) as error:
        raise damaged(path, f"cannot be read as Arrow: {error}") from error


def _unpacked_bytes(message: Any) -> int:
    """What the packed buffers of a message claim to unpack to; 0 where they are not packed.

    pyarrow allocates whatever they claim, and does not tell it before. The claims stand in front of
    the buffers, and where these lie in a table of the message's flatbuffer.
    """
    data, body = message.metadata, message.body

    def field(table: int, number: int) -> int:
        """Where a field of a table lies; 0 where it has none."""
        (back,) = struct.unpack_from("<i", data, table)
        (size,) = struct.unpack_from("<H", data, table - back)
        slot = 4 + 2 * number
        offset = struct.unpack_from("<H", data, table - back + slot)[0] if slot < size else 0
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return place + int(struct.unpack_from("<I", data, place)[0])

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    if not field(batch, 3):
        return 0
    buffers = follow(field(batch, 2))
    (count,) = struct.unpack_from("<I", data, buffers)
    claims = 0
    for number in range(count):
        offset, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        (claim,) = struct.unpack_from("<q", body, offset) if length else (0,)
        claims += length if claim == -1 else claim  # -1: not packed after all
    return claims


# -------------------------------------------------------------------------------------------------
# Parquet files of tokens: a row is a document, a piece of a very long one, or a packed row.
#
#   | train-00000-of-00004.parquet    id, chunk_index (documents), input_ids, ...
#
# A list must fit one page of 2 GiB, so documents of more than `ROW_TOKENS` tokens are cut;
# `chunk_index` counts the pieces, and an import puts them together again. Row groups are small
# enough to be streamed and shuffled. Names are those that `datasets.load_dataset` finds splits by.

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

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        """One file."""
        columns, dtype = columns_of(part), id_dtype(store, options)
        chunked = options.seq_len is None
        numbers = [pa.field(ID, pa.int64())]
        numbers += [pa.field(CHUNK_INDEX, pa.int32())] if chunked else []
        schema = pa.schema(numbers + list_fields(columns, dtype))
        first, last = stretch_of(part)
        groups = int(options.settings["group_tokens"])
        with pq.ParquetWriter(
            out.create(part.files[0]),
            schema,
            compression="zstd",
            compression_level=int(options.settings["level"]),
            use_dictionary=False,
            write_statistics=[ID],
        ) as writer:
            for batch in open_records(store, options).batches(first, last, tokens=groups):
                number, index, lengths = _pieces(batch, first, int(options.settings["row_tokens"]))
                first += len(batch.lengths)
                arrays = [pa.array(number), *([pa.array(index)] if chunked else [])]
                arrays += list_arrays(batch, columns, dtype, lengths)
                writer.write_batch(pa.record_batch(arrays, schema=schema))

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        """Nothing to write: the files say all."""
        notes = ['read it with: datasets.load_dataset("parquet", data_dir=FOLDER)']
        cut, limit = 0, int(options.settings["row_tokens"])
        for part in parts:
            lengths = open_records(stores[part.split], options).lengths(*stretch_of(part))
            cut += int((np.maximum(lengths - 1, 0) // limit).sum())
        if cut:
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
    batch: RecordChunk, first: int, limit: int
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

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The rows of some row groups."""
        return cut_at_eos(self._read(part), self._options, path=self.files[part.path])

    def _read(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        path = self.files[part.path]
        with _open(path) as parquet:
            schema = parquet.schema_arrow
            columns, chunked = table_columns(schema, self._options, path=path), is_chunked(schema)
            names = [*columns.names, *([CHUNK_INDEX] if chunked else [])]
            end = parquet.metadata.num_row_groups if part.end is None else part.end
            batches = _parquet_batches(parquet, range(part.start, end), names, path)
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


def _parquet_batches(
    parquet: Any, groups: range, names: Sequence[str], path: Path
) -> Iterator[Any]:
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
