"""MosaicML's MDS: shards of samples and an `index.json`, as its MDSWriter makes them.

The column of ids is `tokens`, as in llm-foundry. Shards are cut where MDSWriter would cut them, and
their bytes are its bytes (mds_samples.py). Reading is in mds_shards.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tokenmill.errors import SourceError, UsageError
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
    UNPACKED_BYTES,
    Folders,
    choose_columns,
    column,
    columns_of,
    cut_at_eos,
    extra_columns,
    gather,
    id_dtype,
    json_bytes,
    make_block,
    note_of,
    open_records,
    padding_note,
    ranges,
    read_json,
    split_folders,
    stretch_of,
    stretch_part,
    unpack,
    whole_number,
)
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ExportTask, ImportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.interop.records import RecordChunk
    from tokenmill.store.reader import Store


# -------------------------------------------------------------------------------------------------
# The bytes of MDS shards: header, samples, and the options of the writer that stand in them.
#
#   | shard     u32 samples | u32 offsets, one more | JSON of the writer's options | samples
#   | sample    u32 size of each column | column after column, by name
#   | column    byte: dimensions and width of the shape | shape | values
#
# All of it follows from the lengths, so that a shard is written as it is read.

HASH = "xxh3_128"
"""What the files of an export are hashed with anyway; MosaicML's readers know it."""
ONE_DIMENSION = 1 << 2
PIECE_TOKENS = BLOCK_BYTES // 8
MOST_HEAD_BYTES = 5


class SampleLayout:
    """Columns of samples, and what their bytes look like."""

    def __init__(
        self, columns: Mapping[str, str], *, dtype: np.dtype[Any], size_limit: int
    ) -> None:
        """`columns`: name in the file -> column of the records."""
        self._columns = dict(sorted(columns.items()))
        self._dtype = dtype
        types = {IDS: dtype, "labels": np.dtype("<i8")}
        self._types = [types.get(name, np.dtype(np.int8)) for name in self._columns.values()]
        self.size_limit = size_limit
        self.config = {
            "column_encodings": [f"ndarray:{kind.name}" for kind in self._types],
            "column_names": list(self._columns),
            "column_sizes": [None] * len(self._columns),
            "compression": None,
            "format": "mds",
            "hashes": [HASH],
            "size_limit": size_limit,
            "version": 2,
        }
        self._config_bytes = json_bytes(self.config)

    @property
    def room(self) -> int:
        """What samples may add to a shard before the next one begins."""
        return self.size_limit - 8 - len(self._config_bytes)

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of samples of these lengths."""
        sizes: NDArray[np.int64] = self._column_sizes(lengths).sum(axis=1)
        return sizes + 4 * len(self._types)

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """What samples add to a shard; documents without tokens make none."""
        return np.where(lengths > 0, self.sizes(lengths) + 4, 0)

    def header(self, lengths: NDArray[np.int64]) -> bytes:
        """What a shard of such samples begins with."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(self.sizes(lengths), out=offsets[1:])
        offsets += 4 + 4 * len(offsets) + len(self._config_bytes)
        count = np.array([len(lengths)], "<u4")
        return count.tobytes() + offsets.astype("<u4").tobytes() + self._config_bytes

    def encode(self, batch: RecordChunk) -> Iterator[memoryview | bytes]:
        """The samples of a batch."""
        if batch.tokens.ndim == 2:
            yield self._rows(batch).data
        elif len(batch.lengths) == 1:
            yield from self._one_document(batch)
        else:
            yield memoryview(self._documents(batch))

    def _column_sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = np.array([kind.itemsize for kind in self._types])
        heads = 1 + (1 << _width_codes(lengths))
        sizes: NDArray[np.int64] = lengths[:, None] * widths + heads[:, None]
        return sizes

    def _rows(self, batch: RecordChunk) -> NDArray[np.uint8]:
        """Samples of one length: an array of records, in which each column is filled at once."""
        rows, length = batch.tokens.shape
        lengths = batch.lengths[:1]
        head = _heads(lengths).tobytes()[: 1 + (1 << int(_width_codes(lengths)[0]))]
        fields: list[Any] = [("sizes", f"V{4 * len(self._types)}")]
        for name, kind in zip(self._columns, self._types, strict=True):
            fields += [(f"{name} head", f"V{len(head)}"), (name, kind, (length,))]
        samples = np.empty(rows, np.dtype(fields))
        samples["sizes"] = np.void(self._column_sizes(lengths).astype("<u4").tobytes())
        for name, source in self._columns.items():
            samples[f"{name} head"] = np.void(head)
            # The assignment widens the ids: no copy before it.
            samples[name] = (
                batch.tokens if source == IDS else column(batch, source, dtype=self._dtype)
            )
        return samples.view(np.uint8)

    def _documents(self, batch: RecordChunk) -> Any:
        """Samples of any lengths: heads and values as columns of bytes, which Arrow joins."""
        lengths = batch.lengths[batch.lengths > 0]
        if not len(lengths):
            return b""
        sizes = self._column_sizes(lengths).astype("<u4").view(np.uint8)
        pieces = []
        for source, kind in zip(self._columns.values(), self._types, strict=True):
            pieces.append(_head_array(lengths, sizes))
            sizes = sizes[:, :0]  # they stand before the first column
            values = column(batch, source, dtype=self._dtype)
            pieces.append(_binary_array(values, lengths * kind.itemsize))
        empty = pa.scalar(b"", pa.large_binary())
        return pc.binary_join_element_wise(*pieces, empty).buffers()[2]

    def _one_document(self, batch: RecordChunk) -> Iterator[memoryview | bytes]:
        """One document, however long, a piece at a time."""
        lengths = batch.lengths
        if not lengths[0]:
            return
        yield self._column_sizes(lengths).astype("<u4").tobytes()
        head = _heads(lengths).tobytes()[: 1 + (1 << int(_width_codes(lengths)[0]))]
        for source in self._columns.values():
            yield head
            for first in range(0, int(lengths[0]), PIECE_TOKENS):
                here = slice(first, first + PIECE_TOKENS)
                mask = None if batch.mask is None else batch.mask[here]
                piece = batch._replace(tokens=batch.tokens[here], mask=mask)
                yield column(piece, source, dtype=self._dtype).data.cast("B")


def _width_codes(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1 or 2 where a length takes one, two or four bytes."""
    return np.searchsorted(np.array([1 << 8, 1 << 16]), lengths, side="right")


def _heads(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """(documents, 5): the byte that tells the width of the length, then the length."""
    heads = np.empty((len(lengths), MOST_HEAD_BYTES), np.uint8)
    heads[:, 0] = ONE_DIMENSION | _width_codes(lengths)
    heads[:, 1:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return heads


def _head_array(lengths: NDArray[np.int64], sizes: NDArray[np.uint8]) -> Any:
    """What stands before the values of a column, as an Arrow array."""
    used = sizes.shape[1] + 1 + (1 << _width_codes(lengths))
    heads = np.concatenate((sizes, _heads(lengths)), axis=1)
    return _binary_array(heads[np.arange(heads.shape[1]) < used[:, None]], used)


def _binary_array(values: NDArray[Any], sizes: NDArray[np.int64]) -> Any:
    """Values of documents back to back, so many bytes each, as an Arrow array."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)


# -------------------------------------------------------------------------------------------------
# Reads MDS: shards by their index, a column of ids out of samples that may have others.
#
# Ids may be arrays of whole numbers of any width, or `bytes` of int64, which is what llm-foundry
# once wrote. Columns that are not asked for are passed over unseen; some of them could be pickles.

INDEX = "index.json"
DTYPE_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
DTYPE_NAMES = {np.dtype(kind).name: kind for kind in DTYPE_CODES.values()}
CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}
"""Suffix of a packed shard -> what pyarrow calls it."""
FAST_HASHES = ("xxh3_128", "xxh128", "xxh3_64", "xxh64", "xxh32")
OLD_BYTES = np.dtype("<i8")


def find_indexes(path: Path) -> list[tuple[str, Path, dict[str, Any]]]:
    """Folders whose index lists MDS shards: what their files' names begin with, path, index."""
    found = []
    for prefix, folder in split_folders(path, INDEX):
        index = read_json(folder / INDEX)
        shards = index.get("shards") if isinstance(index, dict) else None
        if isinstance(shards, list) and all(_is_mds(shard) for shard in shards):
            found.append((prefix, folder, index))
    return found


def _is_mds(shard: object) -> bool:
    return isinstance(shard, dict) and shard.get("format") == "mds"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """A shard, as its index describes it."""

    path: Path
    codec: str | None
    raw_bytes: int
    samples: int
    hashes: Mapping[str, str]
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


class MdsFolder(Foreign):
    """One or more splits of MDS shards."""

    has_borders = True

    def __init__(self, path: Path, options: ImportOptions) -> None:
        indexes = find_indexes(path)
        if not indexes:
            raise damaged(
                path,
                f"has no {INDEX} of MDS shards that can be read",
                hint=f"name the folder that holds the {INDEX}",
            )
        self._options = options
        self._shards: dict[str, _Shard] = {}
        parts: list[ForeignPart] = []
        for prefix, folder, index in indexes:
            for entry in index["shards"]:
                name, shard = _open_entry(prefix, folder, entry)
                self._shards[name] = shard
                parts += _cut(name, shard, options, split_of(prefix, options))
        self.parts = tuple(parts)
        self.files = {name: shard.path for name, shard in self._shards.items()}
        self.note = note_of(options)
        self.has_mask = any(
            choose_columns(shard.names, options, path=shard.path).has_mask
            for shard in self._shards.values()
        )

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The samples of a part."""
        return cut_at_eos(self._rows(part), self._options, path=self.files[part.path])

    def _rows(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        shard = self._shards[part.path]
        data = _read(shard, check=part.index == 0)
        offsets = _offsets(data, shard)[part.start : None if part.end is None else part.end + 1]
        columns = choose_columns(shard.names, self._options, path=shard.path)
        place = 0
        while place < len(offsets) - 1:
            upto = (
                int(np.searchsorted(offsets, int(offsets[place]) + BLOCK_BYTES, side="right")) - 1
            )
            upto = min(max(upto, place + 1), len(offsets) - 1)
            here = offsets[place : upto + 1]
            found = {name: _column(data, here, shard, name) for name in columns.names}
            flat = {name: values for name, (values, _) in found.items()}
            lengths = found[columns.ids][1]
            for name, (_, others) in found.items():
                if not np.array_equal(others, lengths):
                    raise damaged(shard.path, f"has {name!r} of other lengths than {columns.ids!r}")
            yield make_block(flat, columns, lengths, self._options, path=shard.path)
            place = upto


def _open_entry(prefix: str, folder: Path, entry: Mapping[str, Any]) -> tuple[str, _Shard]:
    index = folder / INDEX
    try:
        raw, packed = entry["raw_data"], entry.get("zip_data")
        file, codec = raw, None
        if not (folder / raw["basename"]).is_file() and packed is not None:
            file, codec = packed, str(packed["basename"]).rpartition(".")[2]
        name = str(file["basename"])
        raw_bytes = whole_number(raw["bytes"], path=index, most=UNPACKED_BYTES)
        shard = _Shard(
            path=folder / name,
            codec=codec,
            raw_bytes=raw_bytes,
            samples=whole_number(entry["samples"], path=index),
            hashes=dict(file["hashes"]),
            names=tuple(map(str, entry["column_names"])),
            encodings=tuple(map(str, entry["column_encodings"])),
            sizes=tuple(
                None if size is None else whole_number(size, path=index, most=raw_bytes)
                for size in entry["column_sizes"]
            ),
        )
        size = whole_number(file["bytes"], path=index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(index, f"lacks what a shard needs: {error!r}") from error
    if "/" in name or "\\" in name or name.startswith("."):
        raise damaged(index, f"names a shard {name!r} that is not in its own folder")
    if not len({*shard.names}) == len(shard.names) == len(shard.encodings) == len(shard.sizes):
        raise damaged(
            index,
            f"does not give each column of {name!r} one name, one encoding and one size",
        )
    if codec is not None and codec not in CODECS:
        raise SourceError(
            f"{str(shard.path)!r} is packed with {codec!r}, which is not read",
            hint=f"unpack it; of packed ones these are read: {', '.join(CODECS)}",
        )
    file_size(shard.path, size=size)
    return f"{prefix}{name}", shard


def _cut(name: str, shard: _Shard, options: ImportOptions, split: str) -> Iterator[ForeignPart]:
    """Stretches of samples; one where they must be unpacked or joined in order."""
    is_whole = shard.codec is not None or options.split_at_eos
    size = max(1, shard.raw_bytes) if is_whole else IMPORT_PART_BYTES
    stretches = ranges(shard.samples, total_bytes=shard.raw_bytes, part_bytes=size)
    for index, (start, end) in enumerate(stretches):
        share = (end - start) / max(1, shard.samples)
        yield ForeignPart(
            path=name,
            index=index,
            start=start,
            end=end,
            split=split,
            bytes=int(shard.raw_bytes * share),
        )


def _read(shard: _Shard, *, check: bool) -> NDArray[np.uint8]:
    """The bytes of a shard, mapped, or unpacked where it is packed; hashes compared if asked."""
    mapped = map_file(shard.path)
    if check:
        _check_hash(shard, mapped)
    if shard.codec is None:
        return np.frombuffer(mapped, np.uint8)
    return unpack(shard.path, CODECS[shard.codec], size=shard.raw_bytes)


def _check_hash(shard: _Shard, data: Any) -> None:
    """Compare one of the hashes in the index, the fastest there is."""
    for name in (*FAST_HASHES, *sorted(hashlib.algorithms_guaranteed)):
        if name in shard.hashes and not name.startswith("shake"):
            make = getattr(xxhash, name, None) or getattr(hashlib, name)
            if make(data).hexdigest() != shard.hashes[name]:
                raise damaged(shard.path, f"has another {name} than its index says")
            return


def _offsets(data: NDArray[np.uint8], shard: _Shard) -> NDArray[np.int64]:
    """Where samples begin, and the last ends; the whole table is checked."""
    count = int(data[:4].view("<u4")[0]) if len(data) >= 4 else -1
    if count != shard.samples or len(data) < 8 + 4 * count:
        raise damaged(
            shard.path, f"says that it has {count:,} samples, its index {shard.samples:,}"
        )
    offsets = data[4 : 8 + 4 * count].view("<u4").astype(np.int64)
    if offsets[0] < 8 + 4 * count or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
        raise damaged(shard.path, "has offsets that do not run through its samples to its end")
    return offsets


def _column(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], shard: _Shard, name: str
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a column in some samples, back to back, and how many each sample has."""
    wanted = shard.names.index(name)
    begins, ends = _locate(data, offsets, shard, wanted)
    dtype, begins = _values(data, begins, ends, shard.encodings[wanted], shard.path, name)
    sizes = ends - begins
    if (sizes < 0).any() or (sizes % dtype.itemsize).any():
        raise damaged(shard.path, f"has a sample whose {name!r} is cut short")
    return gather(data, begins, ends).view(dtype), sizes // dtype.itemsize


def _locate(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], shard: _Shard, wanted: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a column begins and ends in each sample: behind sizes and the columns before it."""
    variable = sum(size is None for size in shard.sizes)
    if (np.diff(offsets) < 4 * variable).any():
        raise damaged(shard.path, "has a sample that is shorter than the sizes it begins with")
    table = data[offsets[:-1, None] + np.arange(4 * variable)].view("<u4").astype(np.int64)
    place = offsets[:-1] + 4 * variable
    begins, ends, next_variable = place, place, 0
    for number, size in enumerate(shard.sizes):
        step = np.int64(size) if size is not None else table[:, next_variable]
        next_variable += size is None
        if number == wanted:
            begins, ends = place, place + step
        place = place + step
    if not np.array_equal(place, offsets[1:]):
        raise damaged(shard.path, "has a sample whose columns do not fill it")
    return begins, ends


def _values(
    data: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    encoding: str,
    path: Path,
    name: str,
) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """The type of a column's values, and where they begin behind its heads."""
    kind, *details = encoding.split(":")
    if kind == "bytes":
        return OLD_BYTES, begins
    if kind != "ndarray":
        raise damaged(
            path,
            f"holds {encoding!r} in its column {name!r}, not arrays of ids",
            hint="name the column of ids with: --set column=NAME",
        )
    code = DTYPE_NAMES.get(details[0]) if details else None
    heads = 1 if not details else 0
    if (ends - begins < heads + (len(details) < 2)).any():
        raise damaged(path, f"has a sample whose {name!r} is shorter than its head")
    if not details and len(begins):
        codes = np.unique(data[begins])
        code = DTYPE_CODES.get(int(codes[0])) if len(codes) == 1 else None
    if code is None:
        raise damaged(
            path, f"holds {name!r} of {encoding!r} that are not whole numbers of one type"
        )
    begins = begins + heads
    if len(details) < 2 and len(begins):
        shapes = data[begins]
        if (shapes >> 2 != 1).any():
            raise damaged(path, f"holds {name!r} of several dimensions, not a list of ids")
        begins = begins + 1 + (1 << (shapes & 3).astype(np.int64))
    return np.dtype(f"<{code}"), begins


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
        folders = Folders(tuple(stores))
        parts = []
        for split, store in stores.items():
            records = open_records(store, options)
            stretches = [each for each in records.cut(layout.costs, budget=layout.room) if each[2]]
            for number, stretch in enumerate(stretches):
                file = folders.name(split, f"shard.{number:05}.mds")
                parts.append(stretch_part(split, stretch, file, columns=columns))
        indexes = tuple(folders.name(split, INDEX) for split in stores)
        return ExportPlan(parts=tuple(parts), index_files=indexes)

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
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

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        """The index of each split."""
        columns = extra_columns(stores, options)
        layout = _layout(next(iter(stores.values())), options, columns)
        folders = Folders(tuple(stores))
        notes = [
            f"read it with: streaming.StreamingDataset(local={folder!r}, batch_size=N)"
            for folder in folders.paths(out.root)
        ]
        for split, store in stores.items():
            records = open_records(store, options)
            shards = [
                {
                    **layout.config,
                    "raw_data": {
                        "basename": part.files[0].rpartition("/")[2],
                        "bytes": (out.root / part.files[0]).stat().st_size,
                        "hashes": {HASH: out.checksum(part.files[0])},
                    },
                    "samples": int(np.count_nonzero(records.lengths(*stretch_of(part)))),
                    "zip_data": None,
                }
                for part in parts
                if part.split == split
            ]
            out.write(folders.name(split, INDEX), json_bytes({"shards": shards, "version": 2}))
            notes += padding_note(records, split, columns)
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


def _too_long(store: Store, length: int) -> UsageError:
    return UsageError(
        f"a document of {length:,} tokens in {str(store.path)!r} does not fit a shard, whose"
        " offsets are of 32 bits",
        hint="export rows instead: --seq-len 2048",
    )
