"""datatrove's `.ds` with `.ds.index`, `.ds.metadata` and `.ds.loss`.

.ds            ids, 2 or 4 bytes each
.ds.index      where each document ends, in tokens, 8 bytes each
.ds.metadata   tokenizer|bytes of an id, tokens, tokens for people: three lines
.ds.loss       a byte for each token, 1 = counts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.interop.base import (
    About,
    Detection,
    ExportPlan,
    ExportTask,
    ImportOptions,
    Sure,
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
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import ExportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.store.reader import Store

BLOCK_DOCUMENTS = 1 << 18
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Datatrove(RawFormat):
    about = About(
        name="datatrove",
        title="datatrove .ds",
        read_by="datatrove, Nanotron",
        kept="documents, empty ones too, loss masks",
        lost="nothing",
        file_tokens=False,
        linkable=True,
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        parts = []
        for split, store in stores.items():
            kinds = (".index", ".metadata", *([".loss"] if store.has_mask else []))
            for number in range(len(store.shards)):
                name = f"{split}/{number:05d}_unshuffled.ds"
                others = [name + kind for kind in kinds]
                parts.append(token_task(store, split, name, shards=[number], others=others))
        return ExportPlan(parts=tuple(parts))

    def write(
        self,
        store: Store,
        part: ExportTask,
        options: ExportOptions,
        out: PartFiles,
    ) -> None:
        name, [number] = part.files[0], shards_of(part)
        put_tokens(store, part, out)
        ends = out.create(f"{name}.index")
        for block in _ends(store, number):
            ends.write(block)
        out.write(f"{name}.metadata", metadata(store, store.shards[number].tokens))
        if f"{name}.loss" in part.files:
            stream_mask(store, number, out.create(f"{name}.loss"))

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        size = next(iter(stores.values())).dtype.itemsize
        return [
            f'read with: DatatroveFolderDataset("{out.root / split}", seq_len=...,'
            f" token_size={size})"
            for split in stores
        ]

    def detect(self, path: Path) -> Detection | None:
        found = find_files(path, ".ds")
        if not found:
            return None
        if any(file.with_name(f"{file.name}.index").is_file() for _, file in found[:1]):
            return Detection(Sure.CERTAIN, f"{found[0][1].name} has an .index beside it")
        return Detection(Sure.LIKELY, f"{found[0][1].name} is named as datatrove does")

    def shards(self, path: Path, options: ImportOptions) -> list[RawShard]:
        found = find_files(path, ".ds")
        require_files(found, path, "datatrove .ds")
        return [self._shard(name, file, options) for name, file in found]

    def _shard(self, name: str, path: Path, options: ImportOptions) -> RawShard:
        index, loss = (path.with_name(path.name + kind) for kind in (".index", ".loss"))
        if not index.is_file():
            raise damaged(
                path,
                "has no .index beside it, so nothing says where its documents end",
                hint="get its .index too, or read it as raw ids: --from nanogpt --dtype uint16",
            )
        dtype = _named_dtype(path) or raw_dtype(options)
        return RawShard(
            name=name,
            path=path,
            dtype=dtype,
            tokens=count_tokens(path, dtype=dtype),
            split=split_of(name, options),
            index=index,
            mask=loss if loss.is_file() else None,
        )

    def count_documents(self, shard: RawShard, options: ImportOptions) -> int:
        assert shard.index is not None
        size = file_size(shard.index)
        if size % 8:
            raise damaged(shard.index, f"has {size:,} bytes, which is not a multiple of 8")
        return size // 8

    def borders(self, shard: RawShard, options: ImportOptions) -> DocumentBounds:
        assert shard.index is not None
        self.count_documents(shard, options)
        ends = np.frombuffer(map_file(shard.index), "<u8")
        check_ends(ends, tokens=shard.tokens, path=shard.index)
        return EndBorders(ends)


def metadata(store: Store, tokens: int) -> bytes:
    """The text of a `.metadata`: the tokenizer as far as one line can name it, and the tokens."""
    kind = store.manifest.identity.tokenizer
    name = f"{kind.kind}-{kind.fingerprint[:12]}"
    lines = [f"{name}|{store.dtype.itemsize}", str(tokens), for_people(tokens)]
    return "\n".join(lines).encode()


def for_people(tokens: int) -> str:
    """'1.23 MT': three digits and a unit, as datatrove writes it."""
    value, place = float(tokens), 0
    while abs(value) >= 1000 and place < len(_PREFIXES) - 1:
        value, place = value / 1000, place + 1
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {_PREFIXES[place]}T"


def _named_dtype(path: Path) -> str | None:
    """The type of ids that a `.metadata` names; None where there is none."""
    file = path.with_name(f"{path.name}.metadata")
    if not file.is_file():
        return None
    try:
        first = file_head(file, 1 << 16).decode().splitlines()[0]
        return {"2": "uint16", "4": "uint32"}[first.rpartition("|")[2].strip()]
    except (OSError, ValueError, KeyError, IndexError):
        raise damaged(
            file,
            "does not name the bytes of an id, 2 or 4, at the end of its first line",
            hint="correct it, or remove it and give --dtype",
        ) from None


def _ends(store: Store, number: int) -> Iterator[bytes]:
    index = store.map_shard(number).index
    width = index.dtype.itemsize
    for first in range(0, len(index.lengths), BLOCK_DOCUMENTS):
        here = slice(first, first + BLOCK_DOCUMENTS)
        ends = index.offsets[here] // width + index.lengths[here]
        yield ends.astype("<u8").tobytes()
