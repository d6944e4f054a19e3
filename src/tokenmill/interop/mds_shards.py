"""Reads MDS: shards by their index, a column of ids out of samples that may have others.

Ids may be arrays of whole numbers of any width, or `bytes` of int64, which is what llm-foundry
once wrote. Columns that are not asked for are passed over unseen; some of them could be pickles.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.errors import SourceError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    Block,
    Foreign,
    ForeignPart,
    damaged,
    file_size,
)
from tokenmill.interop.columns import (
    UNPACKED_BYTES,
    choose_columns,
    cut_at_eos,
    gather,
    make_block,
    note_of,
    ranges,
    read_json,
    split_folders,
    split_of,
    unpack,
    whole_number,
)
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ImportOptions

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
                parts += _cut(name, shard, options, split_of(prefix.rstrip("/"), options))
        self.parts = tuple(parts)
        self.files = {name: shard.path for name, shard in self._shards.items()}
        self.note = note_of(options)
        self.has_mask = any(
            choose_columns(shard.names, options, path=shard.path).has_mask
            for shard in self._shards.values()
        )

    def blocks(self, part: ForeignPart) -> Iterator[Block]:
        """The samples of a part."""
        return cut_at_eos(self._rows(part), self._options, path=self.files[part.path])

    def _rows(self, part: ForeignPart) -> Iterator[Block]:
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
