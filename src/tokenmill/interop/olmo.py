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
    ExportTask,
    ImportOptions,
    Setting,
    Sure,
    check_expansion,
    damaged,
    file_size,
    first_bytes,
)
from tokenmill.interop.raw import (
    RawFormat,
    RawShard,
    check_ends,
    document_ends,
    put_mask,
    raw_shard,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import Store

NUMPY_MAGIC = b"\x93NUMPY"
MASK = ".label_mask.npy"
LINES = 1 << 16
LINE_BYTES = 1 << 20
# What may be empty, besides as many as there are tokens: more would fill the memory alone.
EMPTY_DOCUMENTS = 1_000_000


class Olmo(RawFormat):
    suffix = ".npy"
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

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        stem = f"{split}/part-{number:05d}"
        return f"{stem}.npy", f"{stem}.csv.gz", *((stem + MASK,) if store.has_mask else ())

    def write_beside(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        file = out.create(part.files[1])
        # No name and no time in it: the same bytes every time.
        packer = zlib.compressobj(int(export.options.settings["level"]), wbits=31)
        for begins, ends in document_ends(export.stores[part.split], part.first, LINES):
            pairs = zip(begins.tolist(), ends.tolist(), strict=True)
            file.write(packer.compress("".join([f"{a},{b}\n" for a, b in pairs]).encode()))
        file.write(packer.flush())
        put_mask(export, part, part.files[0].removesuffix(".npy") + MASK, out)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        width = next(iter(export.stores.values())).dtype.itemsize
        name = {2: "uint16", 4: "uint32 (the same bytes as the store's int32)"}[width]
        return [f"ids are {name}: say so in OLMo's configuration, the files do not"]

    def token_files(self, path: Path) -> list[tuple[str, Path]]:
        found = super().token_files(path)
        return [(name, file) for name, file in found if not name.endswith(MASK)]

    def detect(self, path: Path) -> Detection | None:
        for _, file in self.token_files(path)[:1]:
            if first_bytes(file).startswith(NUMPY_MAGIC):
                return None
            if file.with_suffix(".csv.gz").is_file():
                return Detection(Sure.CERTAIN, f"{file.name} has a .csv.gz beside it")
            return Detection(Sure.LIKELY, f"{file.name} has no NumPy header")
        return None

    def shard(self, name: str, path: Path, options: ImportOptions) -> RawShard:
        if first_bytes(path).startswith(NUMPY_MAGIC):
            raise damaged(
                path,
                "is a NumPy file, with a header; OLMo's have none",
                hint="read it with: --from npz",
            )
        csv, mask = path.with_suffix(".csv.gz"), path.with_name(path.stem + MASK)
        if not csv.is_file():
            raise damaged(
                path,
                f"has no {csv.name} beside it, so nothing says where its documents end",
                hint="get that file too, or read raw ids with: --from nanogpt --split-at-eos",
            )
        return raw_shard(name, path, options, index=csv, mask=mask if mask.is_file() else None)

    def ends(self, shard: RawShard, options: ImportOptions) -> NDArray[np.int64]:
        assert shard.index is not None
        ends: NDArray[np.int64] = np.concatenate(
            [np.zeros(0, np.int64), *_read_ends(shard.index, shard.tokens)]
        )
        check_ends(ends, tokens=shard.tokens, path=shard.index)
        return ends


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


def _read_ends(path: Path, tokens: int) -> Iterator[NDArray[np.int64]]:
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
