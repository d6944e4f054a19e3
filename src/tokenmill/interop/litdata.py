"""LitData's chunks for its TokensLoader, as litgpt reads them.

    chunk-0-0.bin    u32 items | u32 offsets, one more | ids of all items back to back
    index.json       chunks with their items and tokens, and the type of the ids

TokensLoader sees a chunk as one range of ids and cuts it into blocks of its own size, so items only
matter to who reads them back: they are the documents, or rows. Rows have one token more than
`seq_len`, since litgpt asks for blocks of that size; with them no chunk has a rest that would be
dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    About,
    Detection,
    DocumentBlock,
    ExportTask,
    Foreign,
    ForeignPart,
    ImportOptions,
    Setting,
    Sure,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.records import (
    BATCH_TOKENS,
    IDS_SETTING,
    MAX_OFFSET,
    Range,
    RowFormat,
    blocks_of,
    even_edges,
    find_indexes,
    id_dtype,
    json_bytes,
    offset_header,
    open_rows,
    read_offsets,
    row_parts,
    unpack,
    whole_number,
)
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.export import Export, PartFiles

INDEX = "index.json"
CHUNK_BYTES = 64 << 20
# How LitData writes down that an item is one array and nothing around it.
ONE_LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
# Type of ids -> LitData's names for it: uint16 tensors are unknown to its older readers.
FORMATS = {"int32": ("no_header_tensor:16", "tensor"), "uint16": ("no_header_numpy:5", "json")}
TENSOR_CODES = {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8"}
TENSOR_CODES[20] = "u2"
NUMPY_CODES = {0: "i1", 1: "i2", 2: "i4", 3: "i8", 4: "u1", 5: "u2", 6: "u4", 7: "u8"}


class LitData(RowFormat):
    """Folders of chunks."""

    index = (INDEX,)
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

    def _chunk_bytes(self, export: Export, split: str) -> int:
        options, found = export.options, int(export.options.settings["chunk_bytes"])
        if options.file_tokens is not None:
            found = options.file_tokens * id_dtype(export.stores[split], options).itemsize
        if not 1 <= found <= MAX_OFFSET // 2:
            raise UsageError(
                f"chunks of {found:,} bytes cannot be: offsets in them are of 32 bits",
                hint=f"choose up to {MAX_OFFSET // 2:,}: --set chunk_bytes={CHUNK_BYTES}",
            )
        return found

    def ranges(self, export: Export, split: str) -> list[Range]:
        width = id_dtype(export.stores[split], export.options).itemsize
        budget = self._chunk_bytes(export, split) // width
        return [*self.records(export, split).cut(lambda lengths: lengths, budget=budget)]

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"chunk-0-{number}.bin")

    def write(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        store, records = export.stores[part.split], self.records(export, part.split)
        dtype = id_dtype(store, export.options)
        lengths = records.lengths(part.first, part.last)
        try:
            header = offset_header(lengths * dtype.itemsize)
        except OverflowError:
            raise UsageError(
                f"{str(store.path)!r} has a document of {int(lengths.max()):,} tokens, or very many"
                " without any, that do not fit a chunk, whose offsets are of 32 bits",
                hint="export rows instead: --seq-len 2048",
            ) from None
        file = out.create(part.files[0])
        file.write(header)
        for batch in records.batches(part.first, part.last):
            rows = batch.tokens if batch.tokens.ndim == 2 else batch.tokens[None]
            # A long document comes as one view of the store: it is widened piece by piece.
            for start in range(0, rows.shape[1], BATCH_TOKENS):
                piece = rows[:, start : start + BATCH_TOKENS].astype(dtype, order="C", copy=False)
                file.write(np.ascontiguousarray(piece).data)

    def describe(self, export: Export, split: str, parts: Sequence[ExportTask]) -> list[bytes]:
        store = export.stores[split]
        tag, kind = FORMATS[id_dtype(store, export.options).name]
        index = {
            "chunks": [
                {
                    "chunk_bytes": (export.root / part.files[0]).stat().st_size,
                    "chunk_size": part.last - part.first,
                    "dim": part.tokens,
                    "filename": part.files[0].rpartition("/")[2],
                }
                for part in parts
            ],
            "config": {
                "chunk_bytes": self._chunk_bytes(export, split),
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
            },
            # LitData puts the time here, and caches under it: it must change with the content.
            "updated_at": str(float(int(store.content[:8], 16))),
        }
        return [json_bytes(index)]

    def how_to_read(self, export: Export) -> list[str]:
        length = export.options.seq_len
        loader = (
            f"litdata.TokensLoader(block_size={'SEQ_LEN + 1' if length is None else length + 1})"
        )
        return [
            f"read it with: litdata.StreamingDataset({folder!r}, item_loader={loader})"
            for folder in export.folders()
        ]

    def detect(self, path: Path) -> Detection | None:
        found = find_indexes(path, INDEX, _is_litdata)
        return Detection(Sure.CERTAIN, f"its {INDEX} lists LitData chunks") if found else None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        indexes = find_indexes(path, INDEX, _is_litdata)
        if not indexes:
            raise damaged(
                path,
                f"has no {INDEX} of chunks that can be read",
                hint=f"name the folder that holds the {INDEX}",
            )
        chunks: dict[str, _Chunk] = {}
        parts: list[ForeignPart] = []
        for prefix, folder, index in indexes:
            for entry in index["chunks"]:
                chunk = _open_entry(folder, entry, index["config"])
                name = f"{prefix}{chunk.path.name}"
                chunks[name] = chunk
                whole = chunk.packed or options.split_at_eos
                edges = even_edges(chunk.items, size=chunk.bytes, whole=whole)
                parts += row_parts(name, edges, size=chunk.bytes, split=split_of(prefix, options))
        files = {name: chunk.path for name, chunk in chunks.items()}
        return open_rows(files, parts, lambda part, _: _read(chunks[part.path], part), options)


def _is_litdata(index: Mapping[str, Any]) -> bool:
    return isinstance(index.get("chunks"), list) and "config" in index


class _Chunk(NamedTuple):
    """A chunk, as the index describes it."""

    path: Path
    items: int
    tokens: int | None
    dtype: np.dtype[Any]
    packed: bool
    bytes: int  # of a packed chunk: before it was packed


def _open_entry(folder: Path, entry: Mapping[str, Any], config: Mapping[str, Any]) -> _Chunk:
    index = folder / INDEX
    try:
        name, tokens = str(entry["filename"]), entry["dim"]
        chunk = _Chunk(
            folder / name,
            whole_number(entry["chunk_size"], path=index),
            None if tokens is None else whole_number(tokens, path=index),
            _dtype_of(config, index),
            config.get("compression") is not None,
            whole_number(entry["chunk_bytes"], path=index, most=MAX_OFFSET),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(index, f"lacks what a chunk needs: {error!r}") from error
    if "/" in name or "\\" in name or name.startswith("."):
        raise damaged(index, f"names a chunk {name!r} that is not in its own folder")
    file_size(chunk.path, size=None if chunk.packed else chunk.bytes)
    return chunk


def _read(chunk: _Chunk, part: ForeignPart) -> Iterator[DocumentBlock]:
    path, width = chunk.path, chunk.dtype.itemsize
    if chunk.packed:
        data = unpack(path, "zstd", size=chunk.bytes)
    else:
        data = np.frombuffer(map_file(path), np.uint8)
    offsets = read_offsets(data, chunk.items, path=path, what="items", gap=False)
    lengths = np.diff(offsets)
    if (lengths % width).any():
        raise damaged(path, f"has an item that is not whole ids of {chunk.dtype.name}")
    if chunk.tokens not in (None, int(lengths.sum()) // width):
        raise damaged(path, f"does not hold the {chunk.tokens:,} tokens of its index")
    begins, ends = offsets[part.start : part.end], offsets[part.start + 1 :]
    for low, high in blocks_of(begins, BLOCK_BYTES):
        ids = data[int(begins[low]) : int(ends[high - 1])].view(chunk.dtype)
        yield DocumentBlock(ids, (ends[low:high] - begins[low:high]) // width)


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
