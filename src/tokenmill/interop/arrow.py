"""What `datasets.load_from_disk` opens: Arrow streams, and two small files that describe them.

    data-00000-of-00002.arrow    record batches with lists `input_ids`, ...
    state.json                   the files in their order
    dataset_info.json            all that `datasets` asks for; types are those of the columns

Several splits are a `DatasetDict`: a folder for each, and `dataset_dict.json`. An import reads the
same, and single `.arrow` files of either kind, streams and files.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tokenmill.errors import SourceError
from tokenmill.interop.base import (
    About,
    Block,
    Detection,
    ExportPlan,
    Foreign,
    ForeignPart,
    Format,
    Sure,
    check_held,
    damaged,
    file_size,
)
from tokenmill.interop.columns import (
    cut_at_eos,
    files_below,
    first_bytes,
    note_of,
    read_json,
    split_folders,
    split_of,
)
from tokenmill.interop.records import (
    Folders,
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import ExportOptions, ImportOptions, Part, PartDone
    from tokenmill.interop.parts import PartFiles
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json

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
        folders = Folders(options.splits)
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

    def write(
        self, store: Store, part: Part, options: ExportOptions, out: PartFiles
    ) -> Mapping[str, Json]:
        """One data file."""
        columns, dtype = columns_of(part), id_dtype(store, options)
        schema = pa.schema(list_fields(columns, dtype))
        with pa.ipc.new_stream(Sink(out.create(part.files[0])), schema) as writer:
            for batch in open_records(store, options).batches(*stretch_of(part)):
                arrays = list_arrays(batch, columns, dtype, batch.lengths)
                writer.write_batch(pa.record_batch(arrays, schema=schema))
        return {}

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        done: Sequence[PartDone],
        out: PartFiles,
    ) -> Sequence[str]:
        """What describes the data files of each split."""
        folders = Folders(options.splits)
        columns = extra_columns(stores, options)
        notes = ["read it with: datasets.load_from_disk(FOLDER)"]
        for split, store in stores.items():
            files = [each.part.files[0] for each in done if each.part.split == split]
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

    def blocks(self, part: ForeignPart) -> Iterator[Block]:
        """The rows of a file."""
        path = self.files[part.path]
        return cut_at_eos(self._read(path), self._options, path=path)

    def _read(self, path: Path) -> Iterator[Block]:
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
            split = split_of(prefix.rstrip("/") or str(state.get("_split") or ""), options)
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
