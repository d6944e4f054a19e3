"""Files of tensors for `torch.load(..., weights_only=True)`: rows of one length, many to a file.

    chunk_000000.pt    {"input_ids": (rows, seq_len), ...}
    metadata.json      length of rows, type, padding, and the files with their rows

An import also reads bare tensors, and lists of them. Whatever is not a tensor is refused: loading
it would mean to run what the file says.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import MissingExtraError, SourceError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    About,
    Detection,
    DocumentBlock,
    ExportTask,
    Foreign,
    ForeignPart,
    ImportOptions,
    Sure,
    damaged,
    file_size,
    find_files,
    first_bytes,
    reading,
    split_of,
)
from tokenmill.interop.records import (
    IDS,
    SETTINGS,
    Range,
    RowFormat,
    RowRecords,
    choose_columns,
    extra_columns,
    id_dtype,
    make_block,
    open_rows,
    row_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tokenmill.interop.export import Export, PartFiles

METADATA = "metadata.json"
SUFFIXES = (".pt", ".pth")
ZIP_MAGIC = b"PK\x03\x04"
# 64 MB as int32: a file is in memory while it is written.
FILE_TOKENS = 16 << 20
MOST_FILE_TOKENS = 1 << 28
TYPES = {"labels": np.int64, "attention_mask": np.int8, "loss_mask": np.int8}


class Pt(RowFormat):
    """Files of tensors."""

    index = (METADATA,)
    about = About(
        name="pt",
        title="PyTorch tensors (.pt)",
        read_by="torch.load(..., weights_only=True)",
        kept="rows, loss masks",
        lost="where documents end",
        rows=True,
        rows_only=True,
        settings=SETTINGS,
    )

    def ranges(self, export: Export, split: str) -> list[Range]:
        _require_torch("writing .pt files")
        budget = min(export.options.file_tokens or FILE_TOKENS, MOST_FILE_TOKENS)
        return [*self.records(export, split).cut(lambda lengths: lengths, budget=budget)]

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"chunk_{number:06d}.pt")

    def write(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        import torch

        records = self.records(export, part.split)
        dtype = id_dtype(export.stores[part.split], export.options)
        assert isinstance(records, RowRecords)
        shape = part.last - part.first, records.length
        names = (IDS, *extra_columns(export))
        found = {name: np.empty(shape, TYPES.get(name, dtype)) for name in names}
        place = 0
        for batch in records.batches(part.first, part.last):
            here = slice(place, place + len(batch.lengths))
            for name, array in found.items():
                array[here] = batch.tokens if name == IDS else batch.column(name, dtype=dtype)
            place = here.stop
        tensors = {name: torch.from_numpy(array) for name, array in found.items()}
        torch.save(tensors, out.create(part.files[0]))

    def describe(self, export: Export, split: str, parts: Sequence[ExportTask]) -> list[bytes]:
        store, records = export.stores[split], self.records(export, split)
        assert isinstance(records, RowRecords)
        facts = {
            "rows": records.count,
            "seq_len": records.length,
            "packing": export.options.packing,
            "columns": [IDS, *extra_columns(export)],
            "dtype": id_dtype(store, export.options).name,
            "pad_id": records.pad_id,
            "eos_id": store.eos_id,
            "vocab_size": store.vocab_size,
            "tokens": store.num_tokens,
            "chunks": [
                {"file": part.files[0].rpartition("/")[2], "rows": part.last - part.first}
                for part in parts
            ],
        }
        return [(json.dumps(facts, indent=1) + "\n").encode()]

    def how_to_read(self, export: Export) -> list[str]:
        return ["read it with: torch.load(FILE, weights_only=True, mmap=True)"]

    def detect(self, path: Path) -> Detection | None:
        files = find_files(path, *SUFFIXES)
        if files and first_bytes(files[0][1]).startswith(ZIP_MAGIC):
            return Detection(Sure.CERTAIN, "holds zip files named .pt")
        return Detection(Sure.LIKELY, "holds files named .pt") if files else None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        _require_torch("reading .pt files")
        files = dict(row_files(path, *SUFFIXES, what=".pt files"))
        parts = [
            ForeignPart(path=name, split=split_of(name, options), bytes=file_size(file))
            for name, file in files.items()
        ]
        has_mask = any(
            choose_columns([*_tensors(file)], options, path=file).has_mask
            for file in files.values()
        )
        return open_rows(
            files, parts, lambda _, file: _read(file, options), options, has_mask=has_mask
        )


def _require_torch(purpose: str) -> None:
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose=purpose)


def _read(path: Path, options: ImportOptions) -> Iterator[DocumentBlock]:
    found = _tensors(path)
    columns = choose_columns([*found], options, path=path)
    rows = {name: _rows(found[name], name, path) for name in columns.names}
    count = len(rows[columns.ids])
    if any(len(each) != count for each in rows.values()):
        raise damaged(path, "has tensors of different numbers of rows")
    # Rows of about a block's size.
    some = [len(row) for row in rows[columns.ids][:64]]
    step = max(1, BLOCK_BYTES // (8 * max(1, sum(some) // max(1, len(some)))))
    for first in range(0, count, step):
        here = {name: each[first : first + step] for name, each in rows.items()}
        lengths = np.array([len(row) for row in here[columns.ids]], np.int64)
        flat = {
            name: each.reshape(-1) if isinstance(each, np.ndarray) else np.concatenate(each)
            for name, each in here.items()
        }
        yield make_block(flat, columns, lengths, options, path=path)


def _tensors(path: Path) -> dict[str, Any]:
    """What a file holds, by name; a tensor or list that has none is the ids."""
    import torch

    try:
        with reading(path):
            _check_archive(path)
            # First without any bytes: a tensor that has some then is not of the file, but memory
            # that a call in the pickle asked for and nobody filled.
            outline = torch.load(path, map_location="meta", weights_only=True, mmap=True)
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{str(path)!r} holds more than tensors, or is damaged; to load it in another way would"
            " run what it says",
            hint="write the tensors alone with torch.save, in a place where you trust the file",
        ) from error
    named = found if isinstance(found, dict) else {IDS: found}
    outlines = outline.values() if isinstance(outline, dict) else [outline]
    tensors = [each for value in outlines for each in _listed(value)]
    if not all(type(each) is torch.Tensor and each.is_meta for each in tensors):
        raise damaged(path, "holds other things than tensors of whole numbers")
    if sum(each.numel() * each.element_size() for each in tensors) > file_size(path):
        raise damaged(
            path,
            "has tensors that are larger than the file: the same bytes several times, by a stride"
            " of 0 or in a list",
            hint="write them again with: torch.save(tensor.clone(), FILE)",
        )
    return {str(name): value for name, value in named.items()}


def _check_archive(path: Path) -> None:
    """Refuse what torch would read otherwise than as bytes that lie in the file."""
    if not first_bytes(path).startswith(ZIP_MAGIC):
        raise damaged(
            path,
            "is no archive of tensors, as torch writes them since version 1.6",
            hint="write it again with: torch.save(torch.load(FILE, weights_only=True), FILE)",
        )
    file_size(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(each.compress_type or each.file_size != each.compress_size for each in members):
        raise damaged(path, "is a compressed archive, which torch does not write")


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _rows(value: Any, name: str, path: Path) -> Any:
    """A tensor of rows, or a list of tensors that are rows, as numpy arrays."""
    import torch

    tensors = _listed(value)
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise damaged(path, f"holds {type(value).__name__} under {name!r}, not tensors")
    arrays = [each.numpy() for each in tensors]
    if isinstance(value, torch.Tensor) and value.ndim == 2:
        return arrays[0]
    if all(array.ndim == 1 for array in arrays):
        return arrays
    raise damaged(path, f"holds tensors of {arrays[0].ndim} dimensions under {name!r}")
