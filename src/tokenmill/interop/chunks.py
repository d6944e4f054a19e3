"""Files of items with a table of offsets, and an index of JSON: MosaicML's MDS, and LitData.

    shard of MDS       u32 samples | u32 offsets, one more | JSON of the writer's options | samples
    sample             u32 size of each column | column after column, by name
    column             byte: dimensions and width of the shape | shape | values

    chunk of LitData   u32 items | u32 offsets, one more | ids of all items back to back

MDS: the column of ids is `tokens`, as in llm-foundry. All of it follows from lengths, so that a
shard is written as it is read; it is cut where MDSWriter would cut it, and its bytes are
MDSWriter's. Read are arrays of whole numbers of any width, or `bytes` of int64, which is what
llm-foundry once wrote. Columns that are not asked for are passed over unseen; some of them could be
pickles.

LitData, as litgpt reads it: TokensLoader sees a chunk as one range of ids and cuts it into blocks
of its own size, so items only matter to who reads them back: they are the documents, or rows. Rows
have one token more than `seq_len`, since litgpt asks for blocks of that size; with them no chunk
has a rest that would be dropped.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop import base, records
from tokenmill.loader.packing import LAYOUTS
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles

    Bytes = NDArray[np.uint8]
    Places = NDArray[np.int64]

INDEX = "index.json"
# Offsets are of 32 bits.
MAX_OFFSET = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFile:
    """A file of items, as its index describes it."""

    path: Path
    items: int
    bytes: int  # before it was packed
    codec: str | None  # what pyarrow calls it, where it is packed
    gap: ClassVar[bool] = False  # something is between the offsets and the first item

    def has_mask(self, options: base.ImportOptions) -> bool:
        """Whether it has a loss mask."""
        return False

    def check(self, data: Any, offsets: Places) -> None:
        """Compare the bytes of the file, and where its items are, with what the index says."""

    @abstractmethod
    def block(self, data: Bytes, at: Places, options: base.ImportOptions) -> base.DocumentBlock:
        """Some items: where each begins, and the last ends."""

    def read(self, part: base.ForeignPart, options: base.ImportOptions) -> base.Blocks:
        """The items of a part."""
        mapped = map_file(self.path)
        data = np.frombuffer(mapped, np.uint8) if self.codec is None else self._unpack()
        count = int(data[:4].view("<u4")[0]) if len(data) >= 4 else -1
        if count != self.items or len(data) < 8 + 4 * count:
            raise base.damaged(
                self.path, f"says that it has {count:,} items, its index {self.items:,}"
            )
        offsets = data[4 : 8 + 4 * count].view("<u4").astype(np.int64)
        before = int(offsets[0]) - 8 - 4 * count
        runs = bool((np.diff(offsets) >= 0).all()) and int(offsets[-1]) == len(data)
        if not runs or before < 0 or (before and not self.gap):
            raise base.damaged(
                self.path, "has offsets that do not run through its items to its end"
            )
        if part.index == 0:
            self.check(mapped, offsets)
        for low, high in records.blocks_of(offsets[part.start : part.end], base.BLOCK_BYTES):
            yield self.block(data, offsets[part.start + low : part.start + high + 1], options)

    def _unpack(self) -> Bytes:
        """The bytes of a packed file, piece by piece by way of the disk: they may be 4 GB."""
        base.check_expansion(self.path, self.bytes, packed=base.file_size(self.path))
        left, buffer = self.bytes, memoryview(bytearray(min(base.BLOCK_BYTES, self.bytes + 1)))
        with tempfile.TemporaryFile() as file:
            try:
                with pa.CompressedInputStream(pa.memory_map(str(self.path)), self.codec) as stream:
                    while left >= 0 and (count := stream.readinto(buffer)):
                        left -= count
                        file.write(buffer[:count])
            except (pa.ArrowException, OSError) as error:
                raise base.damaged(self.path, f"cannot be unpacked: {error}") from error
            if left or not self.bytes:
                raise base.damaged(
                    self.path, f"does not unpack to the {self.bytes:,} bytes of its index"
                )
            file.flush()
            mapped = mmap.mmap(file.fileno(), self.bytes, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, np.uint8)


class ItemFormat(records.RowFormat):
    """A format of files of items."""

    index = (INDEX,)
    kind: str  # of the files, in words
    entries: str  # what lists them in the index

    @abstractmethod
    def is_index(self, index: Mapping[str, Any]) -> bool:
        """Whether an index is of this format."""

    @abstractmethod
    def find(self, folder: Path, entry: Mapping[str, Any], index: Mapping[str, Any]) -> ItemFile:
        """A file, by its entry in an index; whatever that lacks is an error of Python's own."""

    def file_bytes(self, export: Export, dtype: np.dtype[Any], setting: str, *, most: int) -> int:
        """What a file may hold, by the number of its tokens or by a setting."""
        options = export.options
        found = (options.file_tokens or 0) * dtype.itemsize or int(options.settings[setting])
        if not 1 <= found <= most:
            raise UsageError(
                f"files of {found:,} bytes cannot be: offsets in them are of 32 bits",
                hint=f"choose up to {most:,}, for example: --set {setting}="
                f"{self.about.settings[setting].default}",
            )
        return found

    def _indexes(self, path: Path) -> list[tuple[str, Path, dict[str, Any]]]:
        """Folders with such an index: what their files' names begin with, path, index."""
        found = [
            (prefix, folder, records.read_json(folder / INDEX))
            for prefix, folder in records.split_folders(path, INDEX)
        ]
        return [each for each in found if isinstance(each[2], dict) and self.is_index(each[2])]

    def detect(self, path: Path) -> base.Detection | None:
        if not self._indexes(path):
            return None
        return base.Detection(base.Sure.CERTAIN, f"its {INDEX} lists {self.kind}s")

    def open(self, path: Path, options: base.ImportOptions) -> base.Foreign:
        found: dict[str, ItemFile] = {}
        parts: list[base.ForeignPart] = []
        indexes = self._indexes(path)
        if not indexes:
            raise base.damaged(
                path,
                f"has no {INDEX} of {self.kind}s that can be read",
                hint=f"name the folder that holds the {INDEX}",
            )
        for prefix, folder, index in indexes:
            for entry in index[self.entries]:
                try:
                    file = self.find(folder, entry, index)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    problem = f"lacks what a {self.kind} needs: {error!r}"
                    raise base.damaged(folder / INDEX, problem) from error
                name, size = f"{prefix}{file.path.name}", file.bytes
                found[name] = file
                # What must be unpacked or joined in order is one part.
                whole = file.codec is not None or options.split_at_eos
                count = 1 if whole else max(1, min(file.items, -(-size // base.IMPORT_PART_BYTES)))
                edges = [file.items * i // count for i in range(count + 1)]
                split = base.split_of(prefix, options)
                parts += records.row_parts(name, file.path, edges, size=size, split=split)
        return records.open_rows(
            parts,
            lambda part: found[part.path].read(part, options),
            options,
            has_mask=any(file.has_mask(options) for file in found.values()),
        )


def offset_header(sizes: Places, between: bytes = b"") -> bytes:
    """What a file of items of these sizes begins with; UsageError where it would be too large."""
    offsets = np.append(0, np.cumsum(sizes)) + 8 + 4 * len(sizes) + len(between)
    if int(offsets[-1]) > MAX_OFFSET:
        raise UsageError(
            f"a document of {int(sizes.max()):,} bytes, or very many without any, do not fit a file"
            " whose offsets are of 32 bits",
            hint="export rows instead: --seq-len 2048",
        )
    return np.array([len(sizes)], "<u4").tobytes() + offsets.astype("<u4").tobytes() + between


def json_bytes(value: object) -> bytes:
    """As Python's own writer puts it, keys sorted: what most projects' indexes are."""
    return json.dumps(value, sort_keys=True).encode()


def _whole_number(value: object, path: Path, most: int | None = None) -> int:
    """A count or a size of an index; SourceError where it is none, or larger than it can be."""
    if type(value) is not int or value < 0 or (most is not None and value > most):
        limit = "" if most is None else f" up to {most:,}"
        raise base.damaged(path, f"says {repr(value)[:40]} where a count or size{limit} must stand")
    return value


def _inside(folder: Path, name: str, size: int | None) -> Path:
    """The path of a file that an index names, which must be in its folder and of this size."""
    if "/" in name or "\\" in name or name.startswith("."):
        raise base.damaged(folder / INDEX, f"names a file {name!r} that is not in its own folder")
    base.file_size(folder / name, size=size)
    return folder / name


# -------------------------------------------------------------------------------------------------
# MDS.

TOKENS = "tokens"
SIZE_LIMIT = 1 << 26
# What the files of an export are hashed with anyway; MosaicML's readers know it.
HASH = "xxh3_128"
ONE_DIMENSION = 1 << 2
PIECE_TOKENS = base.BLOCK_BYTES // 8
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
        types = {records.IDS: dtype, "labels": np.dtype("<i8")}
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

    def sizes(self, lengths: Places) -> Places:
        """Bytes of samples of these lengths."""
        sizes: Places = self._column_sizes(lengths).sum(axis=1)
        return sizes + 4 * len(self._types)

    def costs(self, lengths: Places) -> Places:
        """What samples add to a shard; documents without tokens make none."""
        return np.where(lengths > 0, self.sizes(lengths) + 4, 0)

    def header(self, lengths: Places) -> bytes:
        """What a shard of such samples begins with."""
        return offset_header(self.sizes(lengths), self._config_bytes)

    def encode(self, batch: records.RecordChunk) -> Iterator[memoryview | bytes]:
        """The samples of a batch."""
        if batch.tokens.ndim == 2:
            yield self._rows(batch).data
        elif len(batch.lengths) == 1:
            yield from self._one_document(batch)
        else:
            yield memoryview(self._documents(batch))

    def _column_sizes(self, lengths: Places) -> Places:
        widths = np.array([kind.itemsize for kind in self._types])
        heads = 1 + (1 << _width_codes(lengths))
        sizes: Places = lengths[:, None] * widths + heads[:, None]
        return sizes

    def _rows(self, batch: records.RecordChunk) -> Bytes:
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
            wide = source != records.IDS
            samples[name] = batch.column(source, dtype=self._dtype) if wide else batch.tokens
        return samples.view(np.uint8)

    def _documents(self, batch: records.RecordChunk) -> Any:
        """Samples of any lengths: heads and values as columns of bytes, which Arrow joins."""
        lengths = batch.lengths[batch.lengths > 0]
        if not len(lengths):
            return b""
        sizes = self._column_sizes(lengths).astype("<u4").view(np.uint8)
        pieces = []
        for source, kind in zip(self._columns.values(), self._types, strict=True):
            pieces.append(_head_array(lengths, sizes))
            sizes = sizes[:, :0]  # they are before the first column
            values = batch.column(source, dtype=self._dtype)
            pieces.append(_binary_array(values, lengths * kind.itemsize))
        empty = pa.scalar(b"", pa.large_binary())
        return pc.binary_join_element_wise(*pieces, empty).buffers()[2]

    def _one_document(self, batch: records.RecordChunk) -> Iterator[memoryview | bytes]:
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


def _width_codes(lengths: Places) -> Places:
    """0, 1 or 2 where a length takes one, two or four bytes."""
    return np.searchsorted(np.array([1 << 8, 1 << 16]), lengths, side="right")


def _heads(lengths: Places) -> Bytes:
    """(documents, 5): the byte that tells the width of the length, then the length."""
    heads = np.empty((len(lengths), 5), np.uint8)
    heads[:, 0] = ONE_DIMENSION | _width_codes(lengths)
    heads[:, 1:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return heads


def _is_head(lengths: Places) -> NDArray[np.bool_]:
    """Which bytes of these a sample has."""
    used: NDArray[np.bool_] = np.arange(5) < 1 + (1 << _width_codes(lengths))[:, None]
    return used


def _head_array(lengths: Places, sizes: Bytes) -> Any:
    """What is before the values of a column, as an Arrow array."""
    heads = np.concatenate((sizes, _heads(lengths)), axis=1)
    used = np.concatenate((np.ones(sizes.shape, np.bool_), _is_head(lengths)), axis=1)
    return _binary_array(heads[used], used.sum(axis=1))


def _binary_array(values: NDArray[Any], sizes: Places) -> Any:
    """Values of documents back to back, so many bytes each, as an Arrow array."""
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)


class Mds(ItemFormat):
    """MDS folders."""

    kind = "MDS shard"
    entries = "shards"
    about = base.About(
        name="mds",
        title="MosaicML Streaming (MDS)",
        read_by="mosaicml-streaming, llm-foundry, Composer",
        kept="documents or rows, loss masks",
        lost="documents without tokens, which MDS cannot hold",
        rows=True,
        settings={
            **records.WRITE_SETTINGS,
            "size_limit": base.Setting(default=SIZE_LIMIT, help="bytes of a shard, at most"),
            **records.READ_SETTINGS,
        },
    )

    def _layout(self, export: Export) -> SampleLayout:
        dtype = self.dtype(export, next(iter(export.stores)))
        limit = self.file_bytes(export, dtype, "size_limit", most=MAX_OFFSET)
        named = {TOKENS: records.IDS, **{name: name for name in self.columns(export)}}
        return SampleLayout(named, dtype=dtype, size_limit=limit)

    def ranges(self, export: Export, split: str) -> list[records.Range]:
        layout = self._layout(export)
        found = self.records(export, split).cut(layout.costs, budget=layout.room)
        return [each for each in found if each[2]]

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"shard.{number:05}.mds")

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        layout, source = self._layout(export), self.records(export, part.split)
        lengths = source.lengths(part.first, part.last)
        file = out.create(part.files[0])
        file.write(layout.header(lengths[lengths > 0]))
        for batch in source.batches(part.first, part.last):
            for block in layout.encode(batch):
                file.write(block)

    def describe(self, export: Export, split: str, parts: Sequence[base.ExportTask]) -> list[bytes]:
        source, config = self.records(export, split), self._layout(export).config
        shards = [
            {
                **config,
                "raw_data": {
                    "basename": part.files[0].rpartition("/")[2],
                    "bytes": (export.root / part.files[0]).stat().st_size,
                    "hashes": {HASH: export.checksum(part.files[0])},
                },
                "samples": int(np.count_nonzero(source.lengths(part.first, part.last))),
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

    def is_index(self, index: Mapping[str, Any]) -> bool:
        shards = index.get("shards")
        return isinstance(shards, list) and all(
            isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards
        )

    def find(self, folder: Path, entry: Mapping[str, Any], index: Mapping[str, Any]) -> ItemFile:
        path, raw, packed = folder / INDEX, entry["raw_data"], entry.get("zip_data")
        file, suffix = raw, None
        if not (folder / raw["basename"]).is_file() and packed is not None:
            file, suffix = packed, str(packed["basename"]).rpartition(".")[2]
        name, raw_bytes = str(file["basename"]), _whole_number(raw["bytes"], path, MAX_OFFSET)
        if suffix is not None and suffix not in CODECS:
            raise SourceError(
                f"{str(folder / name)!r} is packed with {suffix!r}, which is not read",
                hint=f"unpack it; of packed ones these are read: {', '.join(CODECS)}",
            )
        shard = _Shard(
            path=_inside(folder, name, _whole_number(file["bytes"], path)),
            items=_whole_number(entry["samples"], path),
            bytes=raw_bytes,
            codec=None if suffix is None else CODECS[suffix],
            hashes=dict(file["hashes"]),
            names=tuple(map(str, entry["column_names"])),
            encodings=tuple(map(str, entry["column_encodings"])),
            sizes=tuple(
                None if size is None else _whole_number(size, path, raw_bytes)
                for size in entry["column_sizes"]
            ),
        )
        if not len({*shard.names}) == len(shard.names) == len(shard.encodings) == len(shard.sizes):
            raise base.damaged(
                path, f"does not give each column of {name!r} one name, one encoding and one size"
            )
        return shard


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard(ItemFile):
    hashes: Mapping[str, str]
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    gap: ClassVar[bool] = True

    def has_mask(self, options: base.ImportOptions) -> bool:
        return records.Columns.choose(self.names, options, path=self.path).has_mask

    def check(self, data: Any, offsets: Places) -> None:
        """Compare one of the hashes in the index, the fastest there is."""
        for name in (*FAST_HASHES, *sorted(hashlib.algorithms_guaranteed)):
            if name in self.hashes and not name.startswith("shake"):
                make = getattr(xxhash, name, None) or getattr(hashlib, name)
                if make(data).hexdigest() != self.hashes[name]:
                    raise base.damaged(self.path, f"has another {name} than its index says")
                return

    def block(self, data: Bytes, at: Places, options: base.ImportOptions) -> base.DocumentBlock:
        columns = records.Columns.choose(self.names, options, path=self.path)
        return columns.joined({name: self._column(data, at, name) for name in columns.names})

    def _column(self, data: Bytes, at: Places, name: str) -> tuple[NDArray[Any], Places]:
        """Values of a column in some samples, back to back, and how many each sample has."""
        wanted = self.names.index(name)
        begins, ends = self._locate(data, at, wanted)
        dtype, begins = self._values(data, begins, ends, wanted)
        sizes = ends - begins
        if (sizes < 0).any() or (sizes % dtype.itemsize).any():
            raise base.damaged(self.path, f"has a sample whose {name!r} is cut short")
        return _gather(data, begins, ends).view(dtype), sizes // dtype.itemsize

    def _locate(self, data: Bytes, at: Places, wanted: int) -> tuple[Places, Places]:
        """Where a column begins and ends in each sample: after sizes and the columns before it."""
        variable = sum(size is None for size in self.sizes)
        if (np.diff(at) < 4 * variable).any():
            raise base.damaged(
                self.path, "has a sample that is shorter than the sizes it begins with"
            )
        table = iter(data[at[:-1, None] + np.arange(4 * variable)].view("<u4").astype(np.int64).T)
        places = [at[:-1] + 4 * variable]
        for size in self.sizes:
            places.append(places[-1] + (next(table) if size is None else size))
        if not np.array_equal(places[-1], at[1:]):
            raise base.damaged(self.path, "has a sample whose columns do not fill it")
        return places[wanted], places[wanted + 1]

    def _values(
        self, data: Bytes, begins: Places, ends: Places, wanted: int
    ) -> tuple[np.dtype[Any], Places]:
        """The type of a column's values, and where they begin after its heads."""
        name, encoding = self.names[wanted], self.encodings[wanted]
        kind, *details = encoding.split(":")
        if kind == "bytes":
            return np.dtype("<i8"), begins
        if kind != "ndarray":
            raise base.damaged(
                self.path,
                f"holds {encoding!r} in its column {name!r}, not arrays of ids",
                hint="name the column of ids with: --set column=NAME",
            )
        code = DTYPE_NAMES.get(details[0]) if details else None
        heads = 1 if not details else 0
        if (ends - begins < heads + (len(details) < 2)).any():
            raise base.damaged(self.path, f"has a sample whose {name!r} is shorter than its head")
        if not details and len(begins):
            codes = np.unique(data[begins])
            code = DTYPE_CODES.get(int(codes[0])) if len(codes) == 1 else None
        if code is None:
            raise base.damaged(
                self.path, f"holds {name!r} of {encoding!r} that are not whole numbers of one type"
            )
        begins = begins + heads
        if len(details) < 2 and len(begins):
            shapes = data[begins]
            if (shapes >> 2 != 1).any():
                raise base.damaged(
                    self.path, f"holds {name!r} of several dimensions, not a list of ids"
                )
            begins = begins + 1 + (1 << (shapes & 3).astype(np.int64))
        return np.dtype(f"<{code}"), begins


def _gather(data: Bytes, starts: Places, ends: Places) -> Bytes:
    """Ranges of a file back to back: one strided copy where all are alike, else a join."""
    if not len(starts):
        return np.zeros(0, np.uint8)
    if int(starts.min()) < 0 or int(ends.max()) > len(data) or (ends < starts).any():
        raise IndexError("ranges that are not in the file")
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


# -------------------------------------------------------------------------------------------------
# LitData.

CHUNK_BYTES = 64 << 20
# How LitData writes down that an item is one array and nothing around it.
ONE_LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
# Type of ids -> LitData's names for it: uint16 tensors are unknown to its older readers.
FORMATS = {"int32": ("no_header_tensor:16", "tensor"), "uint16": ("no_header_numpy:5", "json")}
TENSOR_CODES = {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8"}
TENSOR_CODES[20] = "u2"
NUMPY_CODES = {0: "i1", 1: "i2", 2: "i4", 3: "i8", 4: "u1", 5: "u2", 6: "u4", 7: "u8"}


class LitData(ItemFormat):
    """Folders of chunks."""

    kind = "LitData chunk"
    entries = "chunks"
    about = base.About(
        name="litdata",
        title="LitData chunks for TokensLoader",
        read_by="litdata, litgpt",
        kept="documents or rows, as items, which TokensLoader does not look at",
        lost="loss masks; rows that are padded",
        masks=False,
        row_overlap=1,
        rows=True,
        settings={
            "ids": records.IDS_SETTING,
            "chunk_bytes": base.Setting(
                default=CHUNK_BYTES, help="bytes of ids in a chunk, at most"
            ),
        },
    )

    def plan(self, export: Export) -> list[base.ExportTask]:
        options = export.options
        if options.seq_len is not None and not LAYOUTS[options.packing].back_to_back:
            raise UsageError(
                f"rows packed by {options.packing!r} are filled up with padding, and LitData has no"
                " place to say where: it would be trained on",
                hint="use --packing concat, or a format with masks: --to mds",
            )
        return super().plan(export)

    def _lengths(self, export: Export, split: str, first: int, last: int) -> Places:
        """Tokens of items: a last row has those that are there, and no padding after them."""
        source = self.records(export, split)
        lengths = source.lengths(first, last)
        if isinstance(source, records.RowRecords) and last == source.count:
            lengths[-1:] -= source.padding
        return lengths

    def _chunk_bytes(self, export: Export, split: str) -> int:
        # Half of what offsets can say: the last document may go beyond it.
        most, dtype = MAX_OFFSET // 2, self.dtype(export, split)
        return self.file_bytes(export, dtype, "chunk_bytes", most=most)

    def ranges(self, export: Export, split: str) -> list[records.Range]:
        width = self.dtype(export, split).itemsize
        budget = self._chunk_bytes(export, split) // width
        return [*self.records(export, split).cut(lambda lengths: lengths, budget=budget)]

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"chunk-0-{number}.bin")

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        source = self.records(export, part.split)
        dtype = self.dtype(export, part.split)
        file = out.create(part.files[0])
        lengths = self._lengths(export, part.split, part.first, part.last)
        file.write(offset_header(lengths * dtype.itemsize))
        for batch in source.batches(part.first, part.last):
            if batch.real is not None:
                file.write(np.ascontiguousarray(batch.tokens[batch.real], dtype).data)
                continue
            rows = batch.tokens if batch.tokens.ndim == 2 else batch.tokens[None]
            # A long document comes as one view of the store: it is widened piece by piece.
            for start in range(0, rows.shape[1], records.BATCH_TOKENS):
                piece = rows[:, start : start + records.BATCH_TOKENS]
                file.write(np.ascontiguousarray(piece, dtype).data)

    def describe(self, export: Export, split: str, parts: Sequence[base.ExportTask]) -> list[bytes]:
        store = export.stores[split]
        tag, kind = FORMATS[self.dtype(export, split).name]
        index = {
            "chunks": [
                {
                    "chunk_bytes": (export.root / part.files[0]).stat().st_size,
                    "chunk_size": part.last - part.first,
                    "dim": int(self._lengths(export, split, part.first, part.last).sum()),
                    "filename": part.files[0].rpartition("/")[2],
                }
                for part in parts
            ],
            "config": {
                "chunk_bytes": self._chunk_bytes(export, split),
                "chunk_size": None,
                "compression": None,
                "compression_batch_size": None,
                "compression_level": None,
                "data_format": [tag],
                "data_spec": ONE_LEAF,
                "encryption": None,
                "ipc_compression": None,
                "item_loader": "TokensLoader",
                "types": kind,
            },
            # LitData puts the time here, and caches under it: it must change with the content.
            "updated_at": str(float(int(store.content[:8], 16))),
        }
        return [json_bytes(index)]

    def how_to_read(self, export: Export) -> list[str]:
        length = export.options.seq_len
        size = "SEQ_LEN + 1" if length is None else length + 1
        loader = f"litdata.TokensLoader(block_size={size})"
        notes = [
            f"read it with: litdata.StreamingDataset({folder!r}, item_loader={loader})"
            for folder in export.folders()
        ]
        for split in export.stores if length is not None else ():
            rows = self.rows(export, split)
            if rows.padding:
                left = rows.length - rows.padding
                notes.append(
                    f"{split}: the last row has {left:,} tokens of {rows.length:,}, which a"
                    " TokensLoader leaves out"
                )
        return notes

    def is_index(self, index: Mapping[str, Any]) -> bool:
        return isinstance(index.get("chunks"), list) and "config" in index

    def find(self, folder: Path, entry: Mapping[str, Any], index: Mapping[str, Any]) -> ItemFile:
        path, config, tokens = folder / INDEX, index["config"], entry["dim"]
        packed = config.get("compression") is not None
        size = _whole_number(entry["chunk_bytes"], path, MAX_OFFSET)
        return _Chunk(
            dtype=_dtype_of(config, path),
            path=_inside(folder, str(entry["filename"]), None if packed else size),
            items=_whole_number(entry["chunk_size"], path),
            bytes=size,
            codec="zstd" if packed else None,
            tokens=None if tokens is None else _whole_number(tokens, path),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk(ItemFile):
    tokens: int | None
    dtype: np.dtype[Any]

    def check(self, data: Any, offsets: Places) -> None:
        lengths, width = np.diff(offsets), self.dtype.itemsize
        if (lengths % width).any():
            raise base.damaged(self.path, f"has an item that is not whole ids of {self.dtype.name}")
        if self.tokens not in (None, int(lengths.sum()) // width):
            raise base.damaged(self.path, f"does not hold the {self.tokens:,} tokens of its index")

    def block(self, data: Bytes, at: Places, options: base.ImportOptions) -> base.DocumentBlock:
        ids = data[int(at[0]) : int(at[-1])].view(self.dtype)
        return base.DocumentBlock(ids, np.diff(at) // self.dtype.itemsize)


def _dtype_of(config: Mapping[str, Any], index: Path) -> np.dtype[Any]:
    """The type of ids; SourceError where items are not bare ids."""
    formats, loader = config["data_format"], config.get("item_loader")
    known = {"no_header_tensor": TENSOR_CODES, "no_header_numpy": NUMPY_CODES}
    kind, _, code = str(formats[0]).partition(":") if formats else ("", "", "")
    if loader != "TokensLoader" or len(formats) != 1 or kind not in known:
        raise SourceError(
            f"the chunks of {str(index)!r} are items of {formats} for {loader}, not tokens",
            hint="only chunks that were written with item_loader=TokensLoader() are read",
        )
    if config.get("encryption") is not None or config.get("compression") not in (None, "zstd"):
        raise SourceError(
            f"the chunks of {str(index)!r} are encrypted, or packed in a way that is not read",
            hint="write them again without",
        )
    if int(code) not in known[kind]:
        raise SourceError(
            f"the chunks of {str(index)!r} hold {formats[0]}, which are not whole numbers",
            hint="write them again from ids",
        )
    return np.dtype(f"<{known[kind][int(code)]}")
