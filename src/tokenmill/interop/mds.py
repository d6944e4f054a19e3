"""MosaicML's MDS: shards of samples and an `index.json`, as its MDSWriter makes them.

    shard     u32 samples | u32 offsets, one more | JSON of the writer's options | samples
    sample    u32 size of each column | column after column, by name
    column    byte: dimensions and width of the shape | shape | values

The column of ids is `tokens`, as in llm-foundry. All of it follows from lengths, so that a shard
is written as it is read; it is cut where MDSWriter would cut it, and its bytes are MDSWriter's.

Read are arrays of whole numbers of any width, or `bytes` of int64, which is what llm-foundry once
wrote. Columns that are not asked for are passed over unseen; some of them could be pickles.
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
    About,
    Detection,
    DocumentBlock,
    ExportTask,
    Foreign,
    ForeignPart,
    ImportOptions,
    Setting,
    Sure,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.records import (
    IDS,
    MAX_OFFSET,
    READ_SETTINGS,
    WRITE_SETTINGS,
    Range,
    RecordChunk,
    RowFormat,
    blocks_of,
    choose_columns,
    even_edges,
    extra_columns,
    find_indexes,
    id_dtype,
    json_bytes,
    make_block,
    offset_header,
    open_rows,
    read_offsets,
    row_parts,
    unpack,
    whole_number,
)
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles

INDEX = "index.json"
TOKENS = "tokens"
SIZE_LIMIT = 1 << 26
# What the files of an export are hashed with anyway; MosaicML's readers know it.
HASH = "xxh3_128"
ONE_DIMENSION = 1 << 2
PIECE_TOKENS = BLOCK_BYTES // 8
DTYPE_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
DTYPE_NAMES = {np.dtype(kind).name: kind for kind in DTYPE_CODES.values()}
# Suffix of a packed shard -> what pyarrow calls it.
CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2", "br": "brotli"}
FAST_HASHES = ("xxh3_128", "xxh128", "xxh3_64", "xxh64", "xxh32")


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
        # What samples may add to a shard before the next one begins.
        self.room = size_limit - 8 - len(self._config_bytes)

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of samples of these lengths."""
        sizes: NDArray[np.int64] = self._column_sizes(lengths).sum(axis=1)
        return sizes + 4 * len(self._types)

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """What samples add to a shard; documents without tokens make none."""
        return np.where(lengths > 0, self.sizes(lengths) + 4, 0)

    def header(self, lengths: NDArray[np.int64]) -> bytes:
        """What a shard of such samples begins with."""
        return offset_header(self.sizes(lengths), self._config_bytes)

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
        head = _heads(lengths)[_is_head(lengths)].tobytes()
        fields: list[Any] = [("sizes", f"V{4 * len(self._types)}")]
        for name, kind in zip(self._columns, self._types, strict=True):
            fields += [(f"{name} head", f"V{len(head)}"), (name, kind, (length,))]
        samples = np.empty(rows, np.dtype(fields))
        samples["sizes"] = np.void(self._column_sizes(lengths).astype("<u4").tobytes())
        for name, source in self._columns.items():
            samples[f"{name} head"] = np.void(head)
            # The assignment widens the ids: no copy before it.
            wide = source != IDS
            samples[name] = batch.column(source, dtype=self._dtype) if wide else batch.tokens
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
            values = batch.column(source, dtype=self._dtype)
            pieces.append(_binary_array(values, lengths * kind.itemsize))
        empty = pa.scalar(b"", pa.large_binary())
        return pc.binary_join_element_wise(*pieces, empty).buffers()[2]

    def _one_document(self, batch: RecordChunk) -> Iterator[memoryview | bytes]:
        """One document, however long, a piece at a time."""
        lengths = batch.lengths
        if not lengths[0]:
            return
        yield self._column_sizes(lengths).astype("<u4").tobytes()
        head = _heads(lengths)[_is_head(lengths)].tobytes()
        for source in self._columns.values():
            yield head
            for first in range(0, int(lengths[0]), PIECE_TOKENS):
                here = slice(first, first + PIECE_TOKENS)
                mask = None if batch.mask is None else batch.mask[here]
                piece = batch._replace(tokens=batch.tokens[here], mask=mask)
                yield piece.column(source, dtype=self._dtype).data.cast("B")


def _width_codes(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1 or 2 where a length takes one, two or four bytes."""
    return np.searchsorted(np.array([1 << 8, 1 << 16]), lengths, side="right")


def _heads(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """(documents, 5): the byte that tells the width of the length, then the length."""
    heads = np.empty((len(lengths), 5), np.uint8)
    heads[:, 0] = ONE_DIMENSION | _width_codes(lengths)
    heads[:, 1:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return heads


def _is_head(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which bytes of these a sample has."""
    used: NDArray[np.bool_] = np.arange(5) < 1 + (1 << _width_codes(lengths))[:, None]
    return used


def _head_array(lengths: NDArray[np.int64], sizes: NDArray[np.uint8]) -> Any:
    """What is before the values of a column, as an Arrow array."""
    heads = np.concatenate((sizes, _heads(lengths)), axis=1)
    used = np.concatenate((np.ones(sizes.shape, np.bool_), _is_head(lengths)), axis=1)
    return _binary_array(heads[used], used.sum(axis=1))


def _binary_array(values: NDArray[Any], sizes: NDArray[np.int64]) -> Any:
    """Values of documents back to back, so many bytes each, as an Arrow array."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)


class Mds(RowFormat):
    """MDS folders."""

    index = (INDEX,)
    about = About(
        name="mds",
        title="MosaicML Streaming (MDS)",
        read_by="mosaicml-streaming, llm-foundry, Composer",
        kept="documents or rows, loss masks",
        lost="documents without tokens, which MDS cannot hold",
        rows=True,
        settings={
            **WRITE_SETTINGS,
            "size_limit": Setting(default=SIZE_LIMIT, help="bytes of a shard, at most"),
            **READ_SETTINGS,
        },
    )

    def _layout(self, export: Export) -> SampleLayout:
        dtype = id_dtype(next(iter(export.stores.values())), export.options)
        limit = int(export.options.settings["size_limit"])
        if export.options.file_tokens is not None:
            limit = export.options.file_tokens * dtype.itemsize
        if not 1 <= limit <= MAX_OFFSET:
            raise UsageError(
                f"shards of {limit:,} bytes cannot be: offsets in them are of 32 bits",
                hint=f"choose up to {MAX_OFFSET:,}, for example: --set size_limit={SIZE_LIMIT}",
            )
        named = {TOKENS: IDS, **{name: name for name in extra_columns(export)}}
        return SampleLayout(named, dtype=dtype, size_limit=limit)

    def ranges(self, export: Export, split: str) -> list[Range]:
        layout = self._layout(export)
        found = self.records(export, split).cut(layout.costs, budget=layout.room)
        return [each for each in found if each[2]]

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"shard.{number:05}.mds")

    def write(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        layout, records = self._layout(export), self.records(export, part.split)
        lengths = records.lengths(part.first, part.last)
        try:
            header = layout.header(lengths[lengths > 0])
        except OverflowError:
            raise UsageError(
                f"a document of {int(lengths.max()):,} tokens in"
                f" {str(export.stores[part.split].path)!r} does not fit a shard, whose offsets are"
                " of 32 bits",
                hint="export rows instead: --seq-len 2048",
            ) from None
        file = out.create(part.files[0])
        file.write(header)
        for batch in records.batches(part.first, part.last):
            for block in layout.encode(batch):
                file.write(block)

    def describe(self, export: Export, split: str, parts: Sequence[ExportTask]) -> list[bytes]:
        records, config = self.records(export, split), self._layout(export).config
        shards = [
            {
                **config,
                "raw_data": {
                    "basename": part.files[0].rpartition("/")[2],
                    "bytes": (export.root / part.files[0]).stat().st_size,
                    "hashes": {HASH: export.checksum(part.files[0])},
                },
                "samples": int(np.count_nonzero(records.lengths(part.first, part.last))),
                "zip_data": None,
            }
            for part in parts
        ]
        return [json_bytes({"shards": shards, "version": 2})]

    def how_to_read(self, export: Export) -> list[str]:
        return [
            f"read it with: streaming.StreamingDataset(local={folder!r}, batch_size=N)"
            for folder in export.folders()
        ]

    def detect(self, path: Path) -> Detection | None:
        found = find_indexes(path, INDEX, _is_mds)
        return Detection(Sure.CERTAIN, f"its {INDEX} lists MDS shards") if found else None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        indexes = find_indexes(path, INDEX, _is_mds)
        if not indexes:
            raise damaged(
                path,
                f"has no {INDEX} of MDS shards that can be read",
                hint=f"name the folder that holds the {INDEX}",
            )
        shards: dict[str, _Shard] = {}
        parts: list[ForeignPart] = []
        for prefix, folder, index in indexes:
            for entry in index["shards"]:
                shard = _open_entry(folder, entry)
                name, size = f"{prefix}{shard.path.name}", shard.raw_bytes
                shards[name] = shard
                whole = shard.codec is not None or options.split_at_eos
                edges = even_edges(shard.samples, size=size, whole=whole)
                parts += row_parts(name, edges, size=size, split=split_of(prefix, options))
        columns = {
            name: choose_columns(shard.names, options, path=shard.path)
            for name, shard in shards.items()
        }

        def read(part: ForeignPart, path: Path) -> Iterator[DocumentBlock]:
            shard, chosen = shards[part.path], columns[part.path]
            data = _read(shard, check=part.index == 0)
            offsets = read_offsets(data, shard.samples, path=path, what="samples", gap=True)
            begins = offsets[part.start : part.end]
            for low, high in blocks_of(begins, BLOCK_BYTES):
                here = offsets[part.start + low : part.start + high + 1]
                found = {name: _column(data, here, shard, name) for name in chosen.names}
                flat = {name: values for name, (values, _) in found.items()}
                lengths = found[chosen.ids][1]
                for name, (_, others) in found.items():
                    if not np.array_equal(others, lengths):
                        raise damaged(path, f"has {name!r} of other lengths than {chosen.ids!r}")
                yield make_block(flat, chosen, lengths, options, path=path)

        files = {name: shard.path for name, shard in shards.items()}
        has_mask = any(each.has_mask for each in columns.values())
        return open_rows(files, parts, read, options, has_mask=has_mask)


def _is_mds(index: Mapping[str, Any]) -> bool:
    shards = index.get("shards")
    return isinstance(shards, list) and all(
        isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards
    )


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


def _open_entry(folder: Path, entry: Mapping[str, Any]) -> _Shard:
    index = folder / INDEX
    try:
        raw, packed = entry["raw_data"], entry.get("zip_data")
        file, codec = raw, None
        if not (folder / raw["basename"]).is_file() and packed is not None:
            file, codec = packed, str(packed["basename"]).rpartition(".")[2]
        name = str(file["basename"])
        raw_bytes = whole_number(raw["bytes"], path=index, most=MAX_OFFSET)
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
    return shard


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
    return _gather(data, begins, ends).view(dtype), sizes // dtype.itemsize


def _locate(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], shard: _Shard, wanted: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a column begins and ends in each sample: after sizes and the columns before it."""
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
    """The type of a column's values, and where they begin after its heads."""
    kind, *details = encoding.split(":")
    if kind == "bytes":
        return np.dtype("<i8"), begins
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


def _gather(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Ranges of a file back to back: one strided copy where all are alike, else a join."""
    if not len(starts):
        return np.zeros(0, np.uint8)
    if int(starts.min()) < 0 or int(ends.max()) > len(data) or (ends < starts).any():
        raise IndexError("stretches that do not lie in the file")
    if len(starts) == 1:
        return data[int(starts[0]) : int(ends[0])]
    length = int(ends[0] - starts[0])
    step = int(starts[1] - starts[0])
    alike = bool((ends - starts == length).all()) and bool((np.diff(starts) == step).all())
    if alike and 0 < length <= step:
        rows = np.lib.stride_tricks.as_strided(
            data[int(starts[0]) :], (len(starts), length), (step, 1), writeable=False
        )
        return np.ascontiguousarray(rows).reshape(-1)
    view = data.data
    pieces = [view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return np.frombuffer(bytearray().join(pieces), np.uint8)
