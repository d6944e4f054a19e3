"""LitData's chunks for its TokensLoader, as litgpt reads them.

    chunk-0-0.bin    u32 items | u32 offsets, one more | ids of all items back to back
    index.json       chunks with their items and tokens, and the type of the ids

TokensLoader sees a chunk as one stretch of ids and cuts it into blocks of its own size, so items
only matter to who reads them back: they are the documents, or rows. Rows have one token more than
`seq_len`, since litgpt asks for blocks of that size; with them no chunk has a rest that would be
dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    About,
    Detection,
    DocumentBlock,
    ExportPlan,
    Foreign,
    ForeignPart,
    Format,
    Setting,
    Sure,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.records import (
    BATCH_TOKENS,
    IDS_SETTING,
    UNPACKED_BYTES,
    Folders,
    cut_at_eos,
    id_dtype,
    json_bytes,
    note_of,
    open_records,
    padding_note,
    ranges,
    read_json,
    split_folders,
    stretch_of,
    stretch_part,
    unpack,
    whole_number,
)
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ExportTask, ImportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.interop.records import Records
    from tokenmill.store.layout import Json
    from tokenmill.store.reader import Store

INDEX = "index.json"
CHUNK_BYTES = 64 << 20
MAX_CHUNK_BYTES = (1 << 32) - 1
ONE_LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
"""How LitData writes down that an item is one array and nothing around it."""
FORMATS = {"int32": ("no_header_tensor:16", "tensor"), "uint16": ("no_header_numpy:5", "json")}
"""Type of ids -> LitData's names for it: uint16 tensors are unknown to its older readers."""
TENSOR_CODES = {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8"}
TENSOR_CODES[20] = "u2"
NUMPY_CODES = {0: "i1", 1: "i2", 2: "i4", 3: "i8", 4: "u1", 5: "u2", 6: "u4", 7: "u8"}


class LitData(Format):
    """Folders of chunks."""

    about = About(
        name="litdata",
        title="LitData chunks for TokensLoader",
        read_by="litdata, litgpt",
        kept="documents or rows, as items, which TokensLoader does not look at",
        lost="loss masks",
        masks=False,
        row_overlap=1,
        rows=True,
        settings={
            "ids": IDS_SETTING,
            "chunk_bytes": Setting(default=CHUNK_BYTES, help="bytes of ids in a chunk, at most"),
        },
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        """A part to a chunk."""
        folders = Folders(tuple(stores))
        parts = []
        for split, store in stores.items():
            width, budget = id_dtype(store, options).itemsize, _chunk_bytes(store, options)
            records = open_records(store, options, overlap=1)
            stretches = records.cut(lambda lengths: lengths, budget=budget // width)
            for number, stretch in enumerate(stretches):
                file = folders.name(split, f"chunk-0-{number}.bin")
                parts.append(stretch_part(split, stretch, file))
        indexes = tuple(folders.name(split, INDEX) for split in stores)
        return ExportPlan(parts=tuple(parts), index_files=indexes)

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        """One chunk."""
        records = open_records(store, options, overlap=1)
        dtype = id_dtype(store, options)
        first, last = stretch_of(part)
        lengths = records.lengths(first, last)
        file = out.create(part.files[0])
        file.write(_header(lengths, dtype, store))
        for block in _encode(records, first, last, dtype):
            file.write(block)

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        """The index of each split."""
        folders = Folders(tuple(stores))
        block = "SEQ_LEN + 1" if options.seq_len is None else str(options.seq_len + 1)
        loader = f"litdata.TokensLoader(block_size={block})"
        notes = [
            f"read it with: litdata.StreamingDataset({folder!r}, item_loader={loader})"
            for folder in folders.paths(out.root)
        ]
        for split, store in stores.items():
            chunks = [_entry(part, out.root) for part in parts if part.split == split]
            index = {
                "chunks": chunks,
                "config": _config(store, options),
                "updated_at": _version(store),
            }
            out.write(folders.name(split, INDEX), json_bytes(index))
            notes += padding_note(open_records(store, options, overlap=1), split, ())
        return notes

    def detect(self, path: Path) -> Detection | None:
        """By the index."""
        if not _find_indexes(path):
            return None
        return Detection(Sure.CERTAIN, f"its {INDEX} lists LitData chunks")

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Chunks by their index."""
        return LitDataFolder(path, options)


def _chunk_bytes(store: Store, options: ExportOptions) -> int:
    if options.file_tokens is not None:
        found = options.file_tokens * id_dtype(store, options).itemsize
    else:
        found = int(options.settings["chunk_bytes"])
    if not 1 <= found <= MAX_CHUNK_BYTES // 2:
        raise UsageError(
            f"chunks of {found:,} bytes cannot be: offsets in them are of 32 bits",
            hint=f"choose up to {MAX_CHUNK_BYTES // 2:,}: --set chunk_bytes={CHUNK_BYTES}",
        )
    return found


def _header(lengths: NDArray[np.int64], dtype: np.dtype[Any], store: Store) -> bytes:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths * dtype.itemsize, out=offsets[1:])
    offsets += 4 + 4 * len(offsets)
    if int(offsets[-1]) > MAX_CHUNK_BYTES:
        raise UsageError(
            f"{str(store.path)!r} has a document of {int(lengths.max()):,} tokens, or very many"
            " without any, that do not fit a chunk, whose offsets are of 32 bits",
            hint="export rows instead: --seq-len 2048",
        )
    return np.array([len(lengths)], "<u4").tobytes() + offsets.astype("<u4").tobytes()


def _encode(
    records: Records, first: int, last: int, dtype: np.dtype[Any]
) -> Iterator[memoryview | bytes]:
    for batch in records.batches(first, last):
        rows = batch.tokens if batch.tokens.ndim == 2 else batch.tokens[None]
        # A long document comes as one view of the store: it is widened piece by piece.
        for start in range(0, rows.shape[1], BATCH_TOKENS):
            piece = rows[:, start : start + BATCH_TOKENS].astype(dtype, order="C", copy=False)
            yield np.ascontiguousarray(piece).data.cast("B")


def _entry(part: ExportTask, root: Path) -> dict[str, Json]:
    first, last = stretch_of(part)
    return {
        "chunk_bytes": (root / part.files[0]).stat().st_size,
        "chunk_size": last - first,
        "dim": part.tokens,
        "filename": part.files[0].rpartition("/")[2],
    }


def _config(store: Store, options: ExportOptions) -> dict[str, Json]:
    tag, kind = FORMATS[id_dtype(store, options).name]
    return {
        "chunk_bytes": _chunk_bytes(store, options),
        "chunk_size": None,
        "compression": None,
        "compression_batch_size": None,
        "compression_level": None,
        "data_format": [tag],
        "data_spec": ONE_LEAF,
        "encryption": None,
        "ipc_compression": None,
        "item_loader": "TokensLoader",
        "types": kind,
    }


def _version(store: Store) -> str:
    """LitData puts the time here, and caches under it: a number that changes with the content."""
    return str(float(int(store.content[:8], 16)))


def _find_indexes(path: Path) -> list[tuple[str, Path, dict[str, Any]]]:
    """Folders whose index lists chunks: what their files' names begin with, path, index."""
    found = []
    for prefix, folder in split_folders(path, INDEX):
        index = read_json(folder / INDEX)
        if isinstance(index, dict) and isinstance(index.get("chunks"), list) and "config" in index:
            found.append((prefix, folder, index))
    return found


class LitDataFolder(Foreign):
    """One or more splits of chunks."""

    has_borders = True

    def __init__(self, path: Path, options: ImportOptions) -> None:
        indexes = _find_indexes(path)
        if not indexes:
            raise damaged(
                path,
                f"has no {INDEX} of chunks that can be read",
                hint=f"name the folder that holds the {INDEX}",
            )
        self._options = options
        self._chunks: dict[str, _Chunk] = {}
        parts: list[ForeignPart] = []
        for prefix, folder, index in indexes:
            for entry in index["chunks"]:
                chunk = _Chunk(folder, entry, index["config"])
                name = f"{prefix}{chunk.path.name}"
                self._chunks[name] = chunk
                parts += chunk.cut(name, options, split_of(prefix, options))
        self.parts = tuple(parts)
        self.files = {name: chunk.path for name, chunk in self._chunks.items()}
        self.note = note_of(options)

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The items of a part."""
        chunk = self._chunks[part.path]
        return cut_at_eos(chunk.read(part), self._options, path=chunk.path)


class _Chunk:
    """A chunk, as the index describes it."""

    def __init__(self, folder: Path, entry: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        index = folder / INDEX
        try:
            name, self.items = str(entry["filename"]), whole_number(entry["chunk_size"], path=index)
            tokens = entry["dim"]
            self._tokens = None if tokens is None else whole_number(tokens, path=index)
            self._dtype = _dtype_of(config, index)
            self._packed = config.get("compression") is not None
            # The index of a packed chunk tells its size before it was packed.
            self._bytes = whole_number(entry["chunk_bytes"], path=index, most=UNPACKED_BYTES)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(index, f"lacks what a chunk needs: {error!r}") from error
        if "/" in name or "\\" in name or name.startswith("."):
            raise damaged(index, f"names a chunk {name!r} that is not in its own folder")
        self.path = folder / name
        file_size(self.path, size=None if self._packed else self._bytes)

    def cut(self, name: str, options: ImportOptions, split: str) -> Iterator[ForeignPart]:
        """Stretches of items; one where they must be unpacked or joined in order."""
        is_whole = self._packed or options.split_at_eos
        size = max(1, self._bytes) if is_whole else IMPORT_PART_BYTES
        stretches = ranges(self.items, total_bytes=self._bytes, part_bytes=size)
        for index, (start, end) in enumerate(stretches):
            share = (end - start) / max(1, self.items)
            yield ForeignPart(
                path=name,
                index=index,
                start=start,
                end=end,
                split=split,
                bytes=int(self._bytes * share),
            )

    def read(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        data = self._data()
        offsets = self._offsets(data)[part.start : None if part.end is None else part.end + 1]
        place = 0
        while place < len(offsets) - 1:
            upto = (
                int(np.searchsorted(offsets, int(offsets[place]) + BLOCK_BYTES, side="right")) - 1
            )
            upto = min(max(upto, place + 1), len(offsets) - 1)
            ids = data[int(offsets[place]) : int(offsets[upto])].view(self._dtype)
            yield DocumentBlock(ids, np.diff(offsets[place : upto + 1]) // self._dtype.itemsize)
            place = upto

    def _data(self) -> NDArray[np.uint8]:
        if self._packed:
            return unpack(self.path, "zstd", size=self._bytes)
        return np.frombuffer(map_file(self.path), np.uint8)

    def _offsets(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Where items begin, and the last ends; the whole table is checked."""
        count = int(data[:4].view("<u4")[0]) if len(data) >= 4 else -1
        if count != self.items or len(data) < 8 + 4 * count:
            raise damaged(self.path, f"says that it has {count:,} items, its index {self.items:,}")
        offsets = data[4 : 8 + 4 * count].view("<u4").astype(np.int64)
        lengths = np.diff(offsets)
        if offsets[0] != 8 + 4 * count or offsets[-1] != len(data) or (lengths < 0).any():
            raise damaged(self.path, "has offsets that do not run through its items to its end")
        if (lengths % self._dtype.itemsize).any():
            raise damaged(self.path, f"has an item that is not whole ids of {self._dtype.name}")
        if self._tokens not in (None, int(lengths.sum()) // self._dtype.itemsize):
            raise damaged(self.path, f"does not hold the {self._tokens:,} tokens of its index")
        return offsets


def _dtype_of(config: Mapping[str, Any], index: Path) -> np.dtype[Any]:
    """The type of ids; SourceError where items are not bare ids."""
    formats, loader = config["data_format"], config.get("item_loader")
    known = {"no_header_tensor": TENSOR_CODES, "no_header_numpy": NUMPY_CODES}
    kind, _, code = str(formats[0]).partition(":") if formats else ("", "", "")
    if loader != "TokensLoader" or len(formats) != 1 or kind not in known:
        raise SourceError(
            f"the chunks of {str(index)!r} are items of {formats} for {loader}, not tokens",
            hint="only chunks that were written with item_loader=TokensLoader() are read",
        )
    if config.get("encryption") is not None or config.get("compression") not in (None, "zstd"):
        raise SourceError(
            f"the chunks of {str(index)!r} are encrypted, or packed in a way that is not read",
            hint="write them again without",
        )
    if int(code) not in known[kind]:
        raise SourceError(
            f"the chunks of {str(index)!r} hold {formats[0]}, which are not whole numbers",
            hint="write them again from ids",
        )
    return np.dtype(f"<{known[kind][int(code)]}")
