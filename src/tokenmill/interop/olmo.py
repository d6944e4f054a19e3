"""OLMo's token files, as dolma writes them: raw ids in `.npy`, documents in `.csv.gz`.

The `.npy` is no NumPy file: it has no header, and its type is known from a configuration alone. A
row of the `.csv.gz` is start, end and then whatever its writer adds (dolma: id, source, line). A
label mask is a file of one byte per token, which OLMo-core takes as a list of its own.
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.interop.base import (
    About,
    Detection,
    ExportPlan,
    ExportTask,
    ImportOptions,
    Setting,
    Sure,
    check_expansion,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.megatron import file_head
from tokenmill.interop.raw import (
    DocumentBounds,
    EndBorders,
    RawFormat,
    RawShard,
    check_ends,
    count_tokens,
    find_files,
    put_tokens,
    raw_dtype,
    require_files,
    shards_of,
    stream_mask,
    token_task,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import ExportOptions
    from tokenmill.interop.export import OutFile, PartFiles
    from tokenmill.store.reader import Store

NUMPY_MAGIC = b"\x93NUMPY"
MASK = ".label_mask.npy"
LINES = 1 << 16
LINE_BYTES = 1 << 20
EMPTY_DOCUMENTS = 1_000_000
"""What may be empty, besides as many as there are tokens: more would fill the memory alone."""


class Olmo(RawFormat):
    about = About(
        name="olmo",
        title="OLMo raw .npy and .csv.gz",
        read_by="OLMo, OLMo-core, dolma",
        kept="documents, empty ones too, loss masks",
        lost="nothing; OLMo-core scans for end-of-text unless told to read the .csv.gz",
        file_tokens=False,
        linkable=True,
        settings={
            "level": Setting(default=1, help="how hard the .csv.gz is compressed, 1 to 9"),
        },
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        parts = []
        for split, store in stores.items():
            for number in range(len(store.shards)):
                stem = f"{split}/part-{number:05d}"
                others = [f"{stem}.csv.gz", *([stem + MASK] if store.has_mask else [])]
                parts.append(
                    token_task(store, split, f"{stem}.npy", shards=[number], others=others)
                )
        return ExportPlan(parts=tuple(parts))

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        stem, [number] = part.files[0].removesuffix(".npy"), shards_of(part)
        put_tokens(store, part, out)
        _write_csv(store, number, out.create(f"{stem}.csv.gz"), int(options.settings["level"]))
        if stem + MASK in part.files:
            stream_mask(store, number, out.create(stem + MASK))

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        width = next(iter(stores.values())).dtype.itemsize
        name = {2: "uint16", 4: "uint32 (the same bytes as the store's int32)"}[width]
        return [f"ids are {name}: say so in OLMo's configuration, the files do not"]

    def detect(self, path: Path) -> Detection | None:
        found = _token_files(path)
        if not found or file_head(found[0][1], len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            return None
        if _csv(found[0][1]).is_file():
            return Detection(Sure.CERTAIN, f"{found[0][1].name} has a .csv.gz beside it")
        return Detection(Sure.LIKELY, f"{found[0][1].name} has no NumPy header")

    def shards(self, path: Path, options: ImportOptions) -> list[RawShard]:
        found = _token_files(path)
        require_files(found, path, "OLMo .npy")
        return [self._shard(name, file, options) for name, file in found]

    def _shard(self, name: str, path: Path, options: ImportOptions) -> RawShard:
        if file_head(path, len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise damaged(
                path,
                "is a NumPy file, with a header; OLMo's have none",
                hint="read it with: --from npz",
            )
        if not _csv(path).is_file():
            raise damaged(
                path,
                f"has no {_csv(path).name} beside it, so nothing says where its documents end",
                hint="get that file too, or read raw ids with: --from nanogpt --split-at-eos",
            )
        dtype, mask = raw_dtype(options), path.with_suffix("").with_name(path.stem + MASK)
        return RawShard(
            name=name,
            path=path,
            dtype=dtype,
            tokens=count_tokens(path, dtype=dtype),
            split=split_of(name, options),
            index=_csv(path),
            mask=mask if mask.is_file() else None,
        )

    def borders(self, shard: RawShard, options: ImportOptions) -> DocumentBounds:
        assert shard.index is not None
        ends = np.concatenate([*_read_ends(shard.index, shard.tokens), np.zeros(0, np.int64)])
        check_ends(ends, tokens=shard.tokens, path=shard.index)
        return EndBorders(ends)


def _token_files(path: Path) -> list[tuple[str, Path]]:
    return [(name, file) for name, file in find_files(path, ".npy") if not name.endswith(MASK)]


def _csv(path: Path) -> Path:
    return path.with_suffix(".csv.gz")


def _write_csv(store: Store, number: int, file: OutFile, level: int) -> None:
    # No name and no time in it: the same bytes every time.
    packer = zlib.compressobj(level, wbits=31)
    index = store.map_shard(number).index
    width = index.dtype.itemsize
    for first in range(0, len(index.lengths), LINES):
        here = slice(first, first + LINES)
        starts = index.offsets[here] // width
        ends = (starts + index.lengths[here]).tolist()
        pairs = zip(starts.tolist(), ends, strict=True)
        file.write(packer.compress("".join([f"{a},{b}\n" for a, b in pairs]).encode()))
    file.write(packer.flush())


def _lines(path: Path) -> Iterator[list[bytes]]:
    """The lines of a `.csv.gz`, some at a time, however it is packed."""
    read, packed, rest = 0, file_size(path), b""
    with gzip.open(path) as file:
        while piece := file.read(1 << 20):
            read += len(piece)
            check_expansion(path, read, packed=packed)
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_BYTES:
                raise damaged(path, f"has a line of more than {LINE_BYTES:,} bytes")
            yield lines
    yield [rest]


def _read_ends(path: Path, tokens: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Ends of documents, some at a time; SourceError where starts do not follow from them."""
    last, count = 0, 0
    try:
        for batch in _lines(path):
            pairs = [line.split(b",", 2)[:2] for line in batch if line.strip()]
            numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            count += len(batch)
            if count > 2 * tokens + EMPTY_DOCUMENTS:
                raise damaged(path, f"has over {count:,} lines for {tokens:,} tokens")
            starts, ends = numbers[:, 0], numbers[:, 1]
            if not np.array_equal(starts, np.append(last, ends)[: len(starts)]):
                raise damaged(path, "has documents that do not follow each other without a gap")
            last = int(ends[-1]) if len(ends) else last
            yield ends
    except (OSError, EOFError, OverflowError, ValueError, zlib.error) as error:
        raise damaged(path, f"is not a whole .csv.gz of starts and ends: {error}") from error
