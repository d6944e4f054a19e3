"""nanoGPT's `train.bin` and `val.bin`, and llm.c's token files: ids, and no boundaries.

nanoGPT's are ids of 2 bytes back to back, and nothing else: an end-of-text after every document, as
a store has it. llm.c's have a header of 256 numbers of 4 bytes:

    [0] 20240520, [1] 1, [2] tokens          ids of 2 bytes: GPT-2; also modded-nanogpt
    [0] 20240801, [1] 7, [2] tokens          ids of 4 bytes: Llama 3

Their end-of-text is in front of every document, documents go on from one file into the next, and
all files but the last have the same number of tokens. A store has it after: then the whole stream
moves on by one token, the last end-of-text becomes the first, and not a single id is lost.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop import base
from tokenmill.interop.raw import RawFormat, RawShard, raw_shard, token_task
from tokenmill.store.stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import Store

HEADER_BYTES = 1024
# Magic number -> version and type of ids: those of 2 bytes, and of 4.
MAGICS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
FILE_TOKENS = 10**8
MOST_FILE_TOKENS = 2**31 - 1
NO_ID = -1


class LlmC(RawFormat):
    suffix = ".bin"
    eos_in_front = True
    about = base.About(
        name="llmc",
        title="llm.c .bin",
        read_by="llm.c, modded-nanogpt (ids of 2 bytes)",
        kept="documents, by the end-of-text id in front of each",
        lost="empty documents, loss masks",
        masks=False,
        settings={
            "name": base.Setting(default="tokens", help="what the names of the files begin with"),
            "eot": base.Setting(
                default=NO_ID,
                help="end-of-text id to put in front of documents, where the store has none",
            ),
        },
    )

    def plan(self, export: Export) -> list[base.ExportTask]:
        size = export.options.file_tokens or FILE_TOKENS
        if size > MOST_FILE_TOKENS:
            raise UsageError(
                f"files of {size:,} tokens are too large: llm.c counts them in 31 bits",
                hint=f"use at most --file-tokens {MOST_FILE_TOKENS}",
            )
        parts: list[base.ExportTask] = []
        # llm.c's own scripts put validation into the first file.
        for split in sorted(export.stores, key=lambda name: name != "val"):
            store = export.stores[split]
            total = _Framing(store, export.options).tokens
            for first in range(0, total, size):
                name = f"{export.options.settings['name']}_{split}_{len(parts):06d}.bin"
                tokens = min(size, total - first)
                sizes = {name: HEADER_BYTES + tokens * store.dtype.itemsize}
                parts.append(base.ExportTask(split, tokens, (name,), first, first + tokens, sizes))
        return parts

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        store, file = export.stores[part.split], out.create(part.files[0])
        magic, (version, _) = [*MAGICS.items()][store.dtype.itemsize > 2]
        file.write(struct.pack("<3i", magic, version, part.tokens).ljust(HEADER_BYTES, b"\0"))
        for block in _Framing(store, export.options).read(part.first, part.last):
            file.write(np.ascontiguousarray(block).data)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        name, letters = export.options.settings["name"], {"train": "-i", "val": "-j"}
        known = [split for split in export.stores if split in letters]
        files = " ".join(f'{letters[each]} "{export.root}/{name}_{each}_*.bin"' for each in known)
        return [f"give to train_gpt2cu: {files}"] if files else []

    def detect(self, path: Path) -> base.Detection | None:
        for _, file in base.find_files(path, self.suffix)[:1]:
            if _magic(file) in MAGICS:
                why = f"{file.name} begins with llm.c's magic number"
                return base.Detection(base.Sure.CERTAIN, why)
        return None

    def shard(self, name: str, path: Path, options: base.ImportOptions) -> RawShard:
        size, head = base.file_size(path), base.first_bytes(path, 12)
        magic, version, tokens = struct.unpack("<3i", head.ljust(12, b"\0"))
        if magic not in MAGICS:
            raise base.damaged(
                path, f"begins with {magic}, which is no magic number of llm.c's token files"
            )
        known, dtype = MAGICS[magic]
        if version != known:
            raise base.damaged(
                path, f"has the version {version}, and {known} goes with its magic number"
            )
        split = base.split_of(name, options)
        found = RawShard(
            name=name, path=path, dtype=dtype, tokens=tokens, split=split, offset=HEADER_BYTES
        )
        if tokens < 0 or size != found.size:
            raise base.damaged(
                path,
                f"has {size:,} bytes, and its header speaks of {tokens:,} tokens, which take"
                f" {found.size:,}: it was cut off or damaged",
            )
        return found


def _magic(path: Path) -> int:
    return int.from_bytes(base.first_bytes(path, 4), "little")


class _Framing:
    """A store's tokens as llm.c wants them: one stream, end-of-text in front of every document."""

    def __init__(self, store: Store, options: base.ExportOptions) -> None:
        self._store = store
        self._stream = open_stream(store)
        # A store may have the id in front already. One that has it after moves on by one token,
        # and into one that has none it is put.
        self._eot = store.eos_id
        self._inserted = store.eos_id is None and store.bos_id is None
        self.tokens = store.num_tokens
        if self._inserted:
            self._eot = int(options.settings["eot"])
            self.tokens += store.num_documents
            if self._eot == NO_ID or not 0 <= self._eot < store.vocab_size:
                raise UsageError(
                    "llm.c wants an end-of-text in front of every document, and this store has none"
                    + ("" if self._eot == NO_ID else f"; {self._eot} is not in its vocabulary"),
                    hint="name the id with --set eot=50256",
                )

    def read(self, first: int, last: int) -> Iterator[NDArray[Any]]:
        """Tokens `first` to `last` of what llm.c reads, some at a time."""
        step = base.BLOCK_BYTES // self._store.dtype.itemsize
        for low in range(first, last, step):
            high = min(last, low + step)
            if self._inserted:
                yield self._read_inserted(low, high)
            elif self._eot is None:
                yield self._read(low, high)
            else:
                if not low:
                    yield np.array([self._eot], self._store.dtype)
                yield self._read(max(0, low - 1), high - 1)

    def _read(self, first: int, last: int) -> NDArray[Any]:
        starts = np.array([first], np.int64)
        return self._stream.read(starts, np.array([last - first]), pad=0)

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
        return np.concatenate(pieces)

    def _place(self, number: int) -> int:
        return self._stream.document_span(number)[0] + number


class NanoGpt(RawFormat):
    suffix = ".bin"
    eos_in_front = False
    about = base.About(
        name="nanogpt",
        title="nanoGPT train.bin and val.bin",
        read_by="nanoGPT, and whatever maps raw uint16",
        kept="ids of 2 bytes",
        lost="documents, but for the end-of-text id; loss masks",
        masks=False,
        file_tokens=False,
        linkable=True,
    )

    def plan(self, export: Export) -> list[base.ExportTask]:
        for split, store in export.stores.items():
            if store.dtype.itemsize != 2:
                raise UsageError(
                    f"nanoGPT reads ids of 2 bytes, and the vocabulary of {store.vocab_size:,}"
                    " takes 4",
                    hint="use another format, like olmo, which is the same with 4 bytes",
                )
            if export.options.link != "never" and len(store.shards) != 1:
                raise UsageError(
                    f"the split {split!r} has {len(store.shards)} shards and nanoGPT's file is one"
                    " file, which cannot be a link to several",
                    hint="leave --link out",
                )
        return [
            token_task(store, split, (f"{split}.bin",), 0, len(store.shards))
            for split, store in export.stores.items()
        ]

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        notes = ["documents are told apart by the end-of-text id alone"]
        missing = [f"{each}.bin" for each in ("train", "val") if each not in export.stores]
        if missing:
            notes.append(f"nanoGPT also wants {', '.join(missing)}")
        return notes

    def detect(self, path: Path) -> base.Detection | None:
        # Nothing beside a file or in it says that it is something else.
        found = [
            file
            for _, file in base.find_files(path, self.suffix)
            if not file.name.startswith("chunk-")
            and not file.with_suffix(".idx").is_file()
            and _magic(file) not in MAGICS
        ]
        if not found:
            return None
        if any(file.name in {"train.bin", "val.bin"} for file in found):
            why = "there is a train.bin or val.bin without an .idx"
            return base.Detection(base.Sure.LIKELY, why)
        return base.Detection(base.Sure.POSSIBLE, f"{found[0].name} may hold raw ids")

    def shard(self, name: str, path: Path, options: base.ImportOptions) -> RawShard:
        return raw_shard(name, path, options)
