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
    ExportTask,
    ImportOptions,
    Sure,
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
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import Store

BLOCK_DOCUMENTS = 1 << 18
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Datatrove(RawFormat):
    suffix = ".ds"
    about = About(
        name="datatrove",
        title="datatrove .ds",
        read_by="datatrove, Nanotron",
        kept="documents, empty ones too, loss masks",
        lost="nothing",
        file_tokens=False,
        linkable=True,
    )

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        name = f"{split}/{number:05d}_unshuffled.ds"
        loss = (f"{name}.loss",) if store.has_mask else ()
        return name, f"{name}.index", f"{name}.metadata", *loss

    def write_beside(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        name, store = part.files[0], export.stores[part.split]
        file = out.create(f"{name}.index")
        for _, ends in document_ends(store, part.first, BLOCK_DOCUMENTS):
            file.write(ends.astype("<u8").data)
        # The tokenizer as far as one line can name it.
        kind = store.manifest.identity.tokenizer
        named = f"{kind.kind}-{kind.fingerprint[:12]}|{store.dtype.itemsize}"
        lines = [named, str(part.tokens), for_people(part.tokens)]
        out.write(f"{name}.metadata", "\n".join(lines).encode())
        put_mask(export, part, f"{name}.loss", out)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        size = next(iter(export.stores.values())).dtype.itemsize
        return [
            f'read with: DatatroveFolderDataset("{export.root / split}", seq_len=...,'
            f" token_size={size})"
            for split in export.stores
        ]

    def detect(self, path: Path) -> Detection | None:
        for _, file in self.token_files(path)[:1]:
            if file.with_name(f"{file.name}.index").is_file():
                return Detection(Sure.CERTAIN, f"{file.name} has an .index beside it")
            return Detection(Sure.LIKELY, f"{file.name} is named as datatrove does")
        return None

    def shard(self, name: str, path: Path, options: ImportOptions) -> RawShard:
        index, loss = (path.with_name(path.name + kind) for kind in (".index", ".loss"))
        if not index.is_file():
            raise damaged(
                path,
                "has no .index beside it, so nothing says where its documents end",
                hint="get its .index too, or read it as raw ids: --from nanogpt --dtype uint16",
            )
        mask = loss if loss.is_file() else None
        return raw_shard(name, path, options, dtype=_named_dtype(path), index=index, mask=mask)

    def count_documents(self, shard: RawShard, options: ImportOptions) -> int:
        assert shard.index is not None
        size = file_size(shard.index)
        if size % 8:
            raise damaged(shard.index, f"has {size:,} bytes, which is not a multiple of 8")
        return size // 8

    def ends(self, shard: RawShard, options: ImportOptions) -> NDArray[np.int64]:
        assert shard.index is not None
        count = self.count_documents(shard, options)
        ends = np.frombuffer(map_file(shard.index), "<i8", count)
        check_ends(ends, tokens=shard.tokens, path=shard.index)
        return ends


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
        first = first_bytes(file, 1 << 16).decode().splitlines()[0]
        return {"2": "uint16", "4": "uint32"}[first.rpartition("|")[2].strip()]
    except (OSError, ValueError, KeyError, IndexError):
        raise damaged(
            file,
            "does not name the bytes of an id, 2 or 4, at the end of its first line",
            hint="correct it, or remove it and give --dtype",
        ) from None
