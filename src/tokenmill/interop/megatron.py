"""Megatron-LM's `.bin` + `.idx`, which a store's shards already are.

Exported shard by shard they are copies or links; `merge` makes one pair of all shards of a split.
Read: any dtype code but floats, documents of several sequences (they are joined) or of none
(empty), and indexes whose modes are kept for multimodal data, which is refused.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop.base import (
    About,
    Detection,
    ExportTask,
    ImportOptions,
    Setting,
    Sure,
    damaged,
    file_size,
    find_files,
    first_bytes,
)
from tokenmill.interop.raw import RawFormat, RawShard, check_ends, raw_shard, token_task
from tokenmill.store.format import HEADER, MAGIC, index_blocks, map_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import Store

# As Megatron-LM numbers them; 6 and 7 are floats.
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DATA_PATH = "data-path.txt"
BLOCK_DOCUMENTS = 1 << 20
_OPTIONS = {"train": "--train-data-path", "val": "--valid-data-path", "test": "--test-data-path"}


class Megatron(RawFormat):
    suffix = ".idx"
    about = About(
        name="megatron",
        title="Megatron-LM .bin and .idx",
        read_by="Megatron-LM, Megatron-core, NeMo, GPT-NeoX",
        kept="documents, empty ones too",
        lost="loss masks",
        masks=False,
        file_tokens=False,
        linkable=True,
        settings={
            "merge": Setting(
                default=False, help="one .bin and .idx for each split instead of one per shard"
            )
        },
    )

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        prefix = f"{split}_{number:05d}_text_document"
        return f"{prefix}.bin", f"{prefix}.idx"

    def plan(self, export: Export) -> list[ExportTask]:
        if not export.options.settings["merge"]:
            return super().plan(export)
        if export.options.link != "never":
            raise UsageError(
                "a merged file has the ids of all shards, so it cannot be a link to one",
                hint="leave --link or merge out",
            )
        return [
            token_task(
                store,
                split,
                (f"{split}_text_document.bin", f"{split}_text_document.idx"),
                0,
                len(store.shards),
            )
            for split, store in export.stores.items()
        ]

    def index_files(self, export: Export) -> list[str]:
        return [DATA_PATH]

    def write_beside(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        store = export.stores[part.split]
        numbers = range(part.first, part.last)
        lengths = [np.asarray(store.map_shard(number).index.lengths) for number in numbers]
        file = out.create(part.files[1])
        for block in index_blocks(lengths, dtype=store.dtype):
            file.write(block)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        lines = []
        for split in export.stores:
            option = _OPTIONS.get(split, f"--{split}-data-path")
            if len(export.stores) == 1:
                option = "--data-path"
            parts = [part for part in export.parts if part.split == split]
            paths = [
                shlex.quote(str(export.root / part.files[0].removesuffix(".bin"))) for part in parts
            ]
            if len(parts) > 1:
                # Weights in tokens: every version of Megatron-LM takes them.
                pairs = zip(parts, paths, strict=True)
                paths = [f"{part.tokens} {path}" for part, path in pairs if part.tokens]
            lines.append(" ".join([option, *paths]))
        out.write(DATA_PATH, "".join(f"{line}\n" for line in lines).encode())
        short = [line if len(line) < 2000 else f"see {DATA_PATH}" for line in lines]
        return [f"paste into the command of Megatron-LM: {line}" for line in dict.fromkeys(short)]

    def token_files(self, path: Path) -> list[tuple[str, Path]]:
        """By their indexes: a path may be a folder, one of the two files, or their prefix."""
        if path.is_dir():
            found = find_files(path, ".idx")
        else:
            plain = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
            found = find_files(plain.with_name(f"{plain.name}.idx"), ".idx")
        return [
            (f"{name.removesuffix('.idx')}.bin", each.with_suffix(".bin")) for name, each in found
        ]

    def detect(self, path: Path) -> Detection | None:
        for _, file in self.token_files(path)[:1]:
            index = file.with_suffix(".idx")
            if first_bytes(index).startswith(MAGIC):
                return Detection(Sure.CERTAIN, f"{index.name} begins with MMIDIDX")
        return None

    def shard(self, name: str, path: Path, options: ImportOptions) -> RawShard:
        index = path.with_suffix(".idx")
        header = read_header(index)
        if header.modes:
            raise damaged(
                index,
                "has a mode for every sequence: it is multimodal, which is more than ids",
                hint="only text can be read",
            )
        return raw_shard(name, path, options, dtype=header.dtype, index=index)

    def count_documents(self, shard: RawShard, options: ImportOptions) -> int:
        assert shard.index is not None
        return read_header(shard.index).documents

    def ends(self, shard: RawShard, options: ImportOptions) -> NDArray[np.int64]:
        assert shard.index is not None
        return read_ends(shard.index, tokens=shard.tokens)


class IndexHeader(NamedTuple):
    """The first 34 bytes of an `.idx`, checked against its size."""

    dtype: str
    sequences: int
    documents: int
    modes: bool


def read_header(path: Path) -> IndexHeader:
    """Read and check a header; SourceError names the file."""
    size, head = file_size(path), first_bytes(path, HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        hint = None
        if head[:8] == b"TNTIDX\x00\x00":
            hint = "it is of the older fairseq kind: write it again with a current Megatron-LM"
        raise damaged(path, "does not begin as an index of Megatron-LM does", hint=hint)
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1:
        raise damaged(path, f"has the index version {version}, and 1 is known")
    if code not in CODES:
        raise damaged(path, f"has the dtype code {code}, which is not one of whole numbers")
    plain = HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or size not in {plain, plain + sequences}:
        raise damaged(
            path,
            f"has {size:,} bytes, and its header speaks of {sequences:,} sequences and {entries:,}"
            f" document entries, which take {plain:,}: it was cut off or damaged",
        )
    return IndexHeader(CODES[code], sequences, entries - 1, size != plain)


def read_ends(path: Path, *, tokens: int) -> NDArray[np.int64]:
    """Where documents end, from an `.idx` that is checked entry by entry."""
    header, data = read_header(path), map_file(path)
    count, first = header.sequences, HEADER.size
    lengths = np.frombuffer(data, "<i4", count, first)
    offsets = np.frombuffer(data, "<i8", count, first + 4 * count)
    entries = np.frombuffer(data, "<i8", header.documents + 1, first + 12 * count)
    width = np.dtype(header.dtype).itemsize
    ends = np.zeros(count + 1, np.int64)
    for low in range(0, count, BLOCK_DOCUMENTS):
        here = slice(low, low + BLOCK_DOCUMENTS)
        block = lengths[here].astype(np.int64)
        if block.min() < 0:
            raise damaged(path, f"has a negative length after sequence {low:,}")
        ends[low + 1 : low + 1 + len(block)] = np.cumsum(block) + ends[low]
        if not np.array_equal(
            offsets[here], (ends[low + 1 : low + 1 + len(block)] - block) * width
        ):
            raise damaged(
                path,
                f"has offsets after sequence {low:,} that its lengths do not give: sequences are"
                " not back to back",
                hint="write it again with Megatron-LM's tools/merge_datasets.py",
            )
    check_ends(ends[1:], tokens=tokens, path=path)
    if entries[0] != 0 or entries[-1] != count or np.any(entries[1:] < entries[:-1]):
        raise damaged(path, f"has a document array that does not rise from 0 to {count:,}")
    found: NDArray[np.int64] = ends[entries[1:]]
    return found
