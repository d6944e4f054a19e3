"""Megatron-LM's `.bin` + `.idx`, which a store's shards already are.

Exported shard by shard they are copies or links; `merge` makes one pair of all shards of a split.
Read: any dtype code but floats, documents of several sequences (they are joined) or of none
(empty), and indexes whose modes are kept for multimodal data, which is refused.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop.base import (
    About,
    Detection,
    ExportPlan,
    ExportTask,
    FileLink,
    ImportOptions,
    Setting,
    Sure,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.raw import (
    DocumentBounds,
    EndBorders,
    RawFormat,
    RawShard,
    check_ends,
    count_tokens,
    find_files,
    put_tokens,
    require_files,
    shards_of,
    token_task,
)
from tokenmill.store.format import HEADER, MAGIC, index_blocks, map_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.store.reader import Store

CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""As Megatron-LM numbers them; 6 and 7 are floats."""
NAME = "text_document"
DATA_PATH = "data-path.txt"
BLOCK_DOCUMENTS = 1 << 20
_OPTIONS = {"train": "--train-data-path", "val": "--valid-data-path", "test": "--test-data-path"}


class Megatron(RawFormat):
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

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        if not options.settings["merge"]:
            parts = [
                _pair(store, split, _prefix(split, number), [number])
                for split, store in stores.items()
                for number in range(len(store.shards))
            ]
            return ExportPlan(parts=tuple(parts), index_files=(DATA_PATH,))
        if options.link is not FileLink.NEVER:
            raise UsageError(
                "a merged file has the ids of all shards, so it cannot be a link to one",
                hint="leave --link or merge out",
            )
        parts = [
            _pair(store, split, _prefix(split), range(len(store.shards)))
            for split, store in stores.items()
        ]
        return ExportPlan(parts=tuple(parts), index_files=(DATA_PATH,))

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        put_tokens(store, part, out)
        lengths: list[NDArray[Any]] = [
            np.asarray(store.map_shard(number).index.lengths) for number in shards_of(part)
        ]
        file = out.create(part.files[1])
        for block in index_blocks(lengths, dtype=store.dtype):
            file.write(block)

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        lines = []
        for split in stores:
            here = [part for part in parts if part.split == split]
            lines.append(_data_path(out.root, split, here, alone=len(stores) == 1))
        out.write(DATA_PATH, "".join(f"{line}\n" for line in lines).encode())
        short = [line if len(line) < 2000 else f"see {DATA_PATH}" for line in lines]
        return [f"paste into the command of Megatron-LM: {line}" for line in dict.fromkeys(short)]

    def detect(self, path: Path) -> Detection | None:
        pairs = _pairs(path)
        if pairs and file_head(pairs[0][2], len(MAGIC)) == MAGIC:
            return Detection(Sure.CERTAIN, f"{pairs[0][2].name} begins with MMIDIDX")
        return None

    def shards(self, path: Path, options: ImportOptions) -> list[RawShard]:
        pairs = _pairs(path)
        require_files(pairs, path, "a Megatron .bin with its .idx")
        found = []
        for name, tokens, index in pairs:
            header = read_header(index)
            if header.modes:
                raise damaged(
                    index,
                    "has a mode for every sequence: it is multimodal, which is more than ids",
                    hint="only text can be read",
                )
            found.append(
                RawShard(
                    name=name,
                    path=tokens,
                    dtype=header.dtype,
                    tokens=count_tokens(tokens, dtype=header.dtype),
                    split=split_of(name, options),
                    index=index,
                )
            )
        return found

    def count_documents(self, shard: RawShard, options: ImportOptions) -> int:
        assert shard.index is not None
        return read_header(shard.index).documents

    def borders(self, shard: RawShard, options: ImportOptions) -> DocumentBounds:
        assert shard.index is not None
        return read_borders(shard.index, tokens=shard.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexHeader:
    """The first 34 bytes of an `.idx`, checked against its size."""

    dtype: str
    sequences: int
    documents: int
    modes: bool


def read_header(path: Path) -> IndexHeader:
    """Read and check a header; SourceError names the file."""
    head, size = file_head(path, HEADER.size), file_size(path)
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
    return IndexHeader(
        dtype=CODES[code],
        sequences=sequences,
        documents=entries - 1,
        modes=size != plain,
    )


def read_borders(path: Path, *, tokens: int) -> EndBorders:
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
    return EndBorders(ends[entries[1:]])


def file_head(path: Path, count: int) -> bytes:
    """The first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror or error}") from error


def _pairs(path: Path) -> list[tuple[str, Path, Path]]:
    """Name, token file and index of every pair that a prefix, a file or a folder stands for."""
    if path.is_dir():
        found = find_files(path, ".idx")
    else:
        plain = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
        index = plain.with_name(f"{plain.name}.idx")
        found = [(index.name, index)] if index.is_file() else []
    return [
        (name.removesuffix(".idx") + ".bin", index.with_suffix(".bin"), index)
        for name, index in found
    ]


def _prefix(split: str, number: int | None = None) -> str:
    return f"{split}_{NAME}" if number is None else f"{split}_{number:05d}_{NAME}"


def _pair(store: Store, split: str, prefix: str, shards: Sequence[int]) -> ExportTask:
    return token_task(store, split, f"{prefix}.bin", shards=shards, others=[f"{prefix}.idx"])


def _data_path(root: Path, split: str, parts: Sequence[ExportTask], *, alone: bool) -> str:
    option = "--data-path" if alone else _OPTIONS.get(split, f"--{split}-data-path")
    paths = [shlex.quote(str(root / part.files[0].removesuffix(".bin"))) for part in parts]
    if len(paths) == 1:
        return f"{option} {paths[0]}"
    # Weights in tokens: every version of Megatron-LM takes them.
    weighted = " ".join(
        f"{part.tokens} {path}" for part, path in zip(parts, paths, strict=True) if part.tokens
    )
    return f"{option} {weighted}"
