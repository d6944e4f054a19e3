"""nanoGPT's `train.bin` and `val.bin`: ids of 2 bytes back to back, and nothing else.

No borders are kept. nanoGPT puts an end-of-text behind every document, as a store does.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    About,
    Detection,
    ExportPlan,
    ExportTask,
    Foreign,
    ImportOptions,
    Setting,
    Sure,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.raw import (
    DTYPES,
    DocumentBounds,
    EosForeign,
    RawFormat,
    RawShard,
    count_tokens,
    eos_borders,
    find_files,
    no_borders,
    one_link,
    put_tokens,
    raw_dtype,
    require_files,
    token_task,
)
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.store.reader import Store


# -------------------------------------------------------------------------------------------------
# llm.c's token files: a header of 256 numbers of 4 bytes, then ids.
#
#   | [0] 20240520, [1] 1, [2] tokens          ids of 2 bytes: GPT-2; also modded-nanogpt
#   | [0] 20240801, [1] 7, [2] tokens          ids of 4 bytes: Llama 3
#
# The end-of-text stands in front of every document, documents go on from one file into the next,
# and all files but the last have the same number of tokens. A store has it behind: then the whole
# stream moves on by one token, the last end-of-text becomes the first, and not a single id is
# lost.

HEADER_BYTES = 1024
MAGICS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Magic number -> version and type of ids."""
FILE_TOKENS = 10**8
MOST_FILE_TOKENS = 2**31 - 1
NO_ID = -1


class LlmC(RawFormat):
    about = About(
        name="llmc",
        title="llm.c .bin",
        read_by="llm.c, modded-nanogpt (ids of 2 bytes)",
        kept="documents, by the end-of-text id in front of each",
        lost="empty documents, loss masks",
        masks=False,
        settings={
            "name": Setting(default="tokens", help="what the names of the files begin with"),
            "eot": Setting(
                default=NO_ID,
                help="end-of-text id to put in front of documents, where the store has none",
            ),
        },
    )
    has_borders = False

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        size = options.file_tokens or FILE_TOKENS
        if size > MOST_FILE_TOKENS:
            raise UsageError(
                f"files of {size:,} tokens are too large: llm.c counts them in 31 bits",
                hint=f"use at most --file-tokens {MOST_FILE_TOKENS}",
            )
        parts: list[ExportTask] = []
        # llm.c's own scripts put validation into the first file.
        for split in sorted(stores, key=lambda name: name != "val"):
            total = _Framing.of(stores[split], options).tokens
            for first in range(0, total, size):
                name = f"{options.settings['name']}_{split}_{len(parts):06d}.bin"
                last = min(first + size, total)
                parts.append(
                    ExportTask(
                        split=split,
                        tokens=last - first,
                        files=(name,),
                        sizes={name: HEADER_BYTES + (last - first) * stores[split].dtype.itemsize},
                        task={"first": first, "last": last},
                    )
                )
        return ExportPlan(parts=tuple(parts))

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        first, last = part.task["first"], part.task["last"]
        assert isinstance(first, int)
        assert isinstance(last, int)
        file = out.create(part.files[0])
        file.write(header(last - first, width=store.dtype.itemsize))
        for block in _Framing.of(store, options).read(first, last):
            file.write(np.ascontiguousarray(block).data)

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        name, root = options.settings["name"], out.root
        letters = {"train": "-i", "val": "-j"}
        known = [split for split in stores if split in letters]
        files = " ".join(f'{letters[each]} "{root}/{name}_{each}_*.bin"' for each in known)
        return [f"give to train_gpt2cu: {files}"] if files else []

    def detect(self, path: Path) -> Detection | None:
        found = find_files(path, ".bin")
        if found and read_magic(found[0][1]) in MAGICS:
            return Detection(Sure.CERTAIN, f"{found[0][1].name} begins with llm.c's magic number")
        return None

    def shards(self, path: Path, options: ImportOptions) -> list[RawShard]:
        found = find_files(path, ".bin") or ([(path.name, path)] if path.is_file() else [])
        require_files(found, path, "llm.c .bin")
        return [
            RawShard(
                name=name,
                path=file,
                dtype=dtype,
                tokens=tokens,
                split=split_of(name, options),
                offset=HEADER_BYTES,
            )
            for name, file in found
            for dtype, tokens in [read_header(file)]
        ]

    def borders(self, shard: RawShard, options: ImportOptions) -> DocumentBounds:
        if options.split_at_eos:
            return eos_borders(shard, options, in_front=True)
        return no_borders(shard.tokens)

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        if options.split_at_eos:
            return EosForeign(self.shards(path, options), options, in_front=True)
        return super().open(path, options)


def header(tokens: int, *, width: int) -> bytes:
    """The 1024 bytes in front of so many ids of a width."""
    magic, (version, _) = next(
        (magic, facts) for magic, facts in MAGICS.items() if DTYPES[facts[1]].itemsize == width
    )
    return struct.pack("<3i", magic, version, tokens).ljust(HEADER_BYTES, b"\0")


def read_magic(path: Path) -> int | None:
    """The first number of a file; None where it has none."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return None
    return int.from_bytes(head, "little") if len(head) == 4 else None


def read_header(path: Path) -> tuple[str, int]:
    """Type and number of ids, checked against the size of the file."""
    size = file_size(path)
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, tokens = struct.unpack("<3i", head.ljust(12, b"\0"))
    if magic not in MAGICS:
        raise damaged(path, f"begins with {magic}, which is no magic number of llm.c's token files")
    known, dtype = MAGICS[magic]
    if version != known:
        raise damaged(path, f"has the version {version}, and {known} goes with its magic number")
    wanted = HEADER_BYTES + tokens * DTYPES[dtype].itemsize
    if tokens < 0 or size != wanted:
        raise damaged(
            path,
            f"has {size:,} bytes, and its header speaks of {tokens:,} tokens, which take"
            f" {wanted:,}: it was cut off or damaged",
        )
    return dtype, tokens


class _Framing:
    """A store's tokens as llm.c wants them: one stream, end-of-text in front of every document."""

    def __init__(self, store: Store, *, eot: int | None, inserted: bool, shifted: bool) -> None:
        self._stream = TokenStream(store)
        self._store = store
        self._eot = eot
        self._inserted = inserted
        self._shifted = shifted
        self.tokens = store.num_tokens + (store.num_documents if inserted else 0)

    @classmethod
    def of(cls, store: Store, options: ExportOptions) -> _Framing:
        if store.eos_id is not None:
            return cls(store, eot=store.eos_id, inserted=False, shifted=True)
        if store.bos_id is not None:
            return cls(store, eot=None, inserted=False, shifted=False)
        eot = int(options.settings["eot"])
        if eot == NO_ID or not 0 <= eot < store.vocab_size:
            raise UsageError(
                "llm.c wants an end-of-text in front of every document, and this store has none"
                + ("" if eot == NO_ID else f"; {eot} is not in its vocabulary"),
                hint="name the id with --set eot=50256",
            )
        return cls(store, eot=eot, inserted=True, shifted=False)

    def read(self, first: int, last: int) -> Iterator[NDArray[Any]]:
        """Tokens `first` to `last` of what llm.c reads, some at a time."""
        step = BLOCK_BYTES // self._store.dtype.itemsize
        for low in range(first, last, step):
            high = min(last, low + step)
            if self._inserted:
                yield self._read_inserted(low, high)
            elif self._shifted:
                yield self._read_shifted(low, high)
            else:
                yield self._read(low, high)

    def _read(self, first: int, last: int) -> NDArray[Any]:
        starts = np.array([first], np.int64)
        found: NDArray[Any] = self._stream.read(starts, np.array([last - first]), pad=0)
        return found

    def _read_shifted(self, first: int, last: int) -> NDArray[Any]:
        if first:
            return self._read(first - 1, last - 1)
        head = np.array([self._eot], self._store.dtype)
        return np.concatenate([head, self._read(0, last - 1)]) if last > 1 else head

    def _read_inserted(self, first: int, last: int) -> NDArray[Any]:
        """Document d begins at its own place plus d, with the id that was put in front of it."""
        documents = range(self._store.num_documents)
        number = bisect_right(documents, first, key=self._place) - 1
        pieces: list[NDArray[Any]] = []
        position = self._place(number)
        while position < last:
            ids = self._store[number]
            if position >= first:
                pieces.append(np.array([self._eot], ids.dtype))
            pieces.append(ids[max(0, first - position - 1) : last - position - 1])
            position += 1 + len(ids)
            number += 1
        found: NDArray[Any] = np.concatenate(pieces)
        return found

    def _place(self, number: int) -> int:
        return self._stream.document_span(number)[0] + number


class NanoGpt(RawFormat):
    about = About(
        name="nanogpt",
        title="nanoGPT train.bin and val.bin",
        read_by="nanoGPT, and whatever maps raw uint16",
        kept="ids of 2 bytes",
        lost="documents, but for the end-of-text id; loss masks",
        masks=False,
        file_tokens=False,
        linkable=True,
    )
    has_borders = False

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        for store in stores.values():
            if store.dtype.itemsize != 2:
                raise UsageError(
                    f"nanoGPT reads ids of 2 bytes, and the vocabulary of {store.vocab_size:,}"
                    " takes 4",
                    hint="use another format, like olmo, which is the same with 4 bytes",
                )
        one_link(stores, options, what="nanoGPT's file")
        parts = [
            token_task(store, split, f"{split}.bin", shards=range(len(store.shards)))
            for split, store in stores.items()
        ]
        return ExportPlan(parts=tuple(parts))

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        put_tokens(store, part, out)

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        notes = ["documents are told apart by the end-of-text id alone"]
        missing = {"train", "val"} - set(stores)
        if missing:
            notes.append(
                f"nanoGPT also wants {', '.join(f'{each}.bin' for each in sorted(missing))}"
            )
        return notes

    def detect(self, path: Path) -> Detection | None:
        found = [(name, file) for name, file in find_files(path, ".bin") if _is_bare(file)]
        if not found:
            return None
        named = any(file.name in {"train.bin", "val.bin"} for _, file in found)
        if named:
            return Detection(Sure.LIKELY, "there is a train.bin or val.bin without an .idx")
        return Detection(Sure.POSSIBLE, f"{found[0][1].name} may hold raw ids")

    def shards(self, path: Path, options: ImportOptions) -> list[RawShard]:
        found = find_files(path, ".bin") or ([(path.name, path)] if path.is_file() else [])
        require_files(found, path, "nanoGPT .bin")
        dtype = raw_dtype(options)
        return [
            RawShard(
                name=name,
                path=file,
                dtype=dtype,
                tokens=count_tokens(file, dtype=dtype),
                split=split_of(name, options),
            )
            for name, file in found
        ]

    def borders(self, shard: RawShard, options: ImportOptions) -> DocumentBounds:
        if options.split_at_eos:
            return eos_borders(shard, options, in_front=False)
        return no_borders(shard.tokens)

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        if options.split_at_eos:
            return EosForeign(self.shards(path, options), options, in_front=False)
        return super().open(path, options)


def _is_bare(path: Path) -> bool:
    """Whether a file may be raw ids: nothing beside it or in it says that it is something else."""
    if path.with_suffix(".idx").is_file() or path.name.startswith("chunk-"):
        return False
    return read_magic(path) not in MAGICS
