"""nanoGPT's `train.bin` and `val.bin`: ids of 2 bytes back to back, and nothing else.

No borders are kept. nanoGPT puts an end-of-text behind every document, as a store does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.interop.base import (
    About,
    Detection,
    ExportPlan,
    Foreign,
    ImportOptions,
    Part,
    SharedFile,
    Sure,
)
from tokenmill.interop.eos_stream import EosForeign, eos_borders
from tokenmill.interop.llmc import MAGICS, read_magic
from tokenmill.interop.raw import (
    Borders,
    RawFormat,
    RawShard,
    count_tokens,
    find_files,
    no_borders,
    raw_dtype,
    require_files,
    split_of,
)
from tokenmill.interop.raw_export import one_link, put_tokens, token_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import ExportOptions, PartDone
    from tokenmill.interop.parts import PartFiles
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json


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
        shared, parts = [], []
        for split, store in stores.items():
            name = f"{split}.bin"
            if len(store.shards) == 1:
                task: dict[str, Json] = {"shard": 0, "name": name}
                tokens = store.num_tokens
                parts.append(Part(name=split, split=split, tokens=tokens, files=(name,), task=task))
            else:
                shared.append(SharedFile(name=name, bytes=store.num_tokens * 2))
                parts += token_parts(store, split, name)
        return ExportPlan(parts=tuple(parts), shared=tuple(shared))

    def write(
        self,
        store: Store,
        part: Part,
        options: ExportOptions,
        out: PartFiles,
    ) -> Mapping[str, Json]:
        name = part.task.get("name")
        return put_tokens(store, part, out, name=None if name is None else str(name))

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        done: Sequence[PartDone],
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

    def borders(self, shard: RawShard, options: ImportOptions) -> Borders:
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
