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
    ExportPlan,
    Foreign,
    ForeignPart,
    Format,
    Sure,
    damaged,
    file_size,
    reading,
    split_of,
)
from tokenmill.interop.records import (
    IDS,
    Folders,
    choose_columns,
    column,
    columns_of,
    cut_at_eos,
    extra_columns,
    files_below,
    first_bytes,
    id_dtype,
    make_block,
    note_of,
    open_records,
    padding_note,
    stretch_of,
    stretch_part,
)
from tokenmill.interop.tables import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ExportTask, ImportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.interop.records import Records
    from tokenmill.store.layout import Json
    from tokenmill.store.reader import Store


METADATA = "metadata.json"
ZIP_MAGIC = b"PK\x03\x04"
FILE_TOKENS = 16 << 20
"""64 MB as int32: a file is in memory while it is written."""
MOST_FILE_TOKENS = 1 << 28
TYPES = {"labels": np.int64, "attention_mask": np.int8, "loss_mask": np.int8}


class Pt(Format):
    """Files of tensors."""

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

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        """A part to a file."""
        _require_torch("writing .pt files")
        columns = extra_columns(stores, options)
        folders = Folders(tuple(stores))
        parts: list[ExportTask] = []
        for split, store in stores.items():
            id_dtype(store, options)
            records = open_records(store, options)
            stretches = records.cut(lambda lengths: lengths, budget=_file_tokens(options))
            for number, stretch in enumerate(stretches):
                file = folders.name(split, f"chunk_{number:06d}.pt")
                parts.append(stretch_part(split, stretch, file, columns=columns))
        files = tuple(folders.name(split, METADATA) for split in stores)
        return ExportPlan(parts=tuple(parts), index_files=files)

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        """One file."""
        import torch

        records, dtype = open_records(store, options), id_dtype(store, options)
        first, last = stretch_of(part)
        assert records.length is not None
        names = (IDS, *columns_of(part))
        shape = last - first, records.length
        found = {name: np.empty(shape, TYPES.get(name, dtype)) for name in names}
        place = 0
        for batch in records.batches(first, last):
            here = slice(place, place + len(batch.lengths))
            for name, array in found.items():
                array[here] = batch.tokens if name == IDS else column(batch, name, dtype=dtype)
            place = here.stop
        tensors = {name: torch.from_numpy(array) for name, array in found.items()}
        torch.save(tensors, out.create(part.files[0]))

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        """What describes the files of each split."""
        folders = Folders(tuple(stores))
        columns = extra_columns(stores, options)
        notes = ["read it with: torch.load(FILE, weights_only=True, mmap=True)"]
        for split, store in stores.items():
            chunks: list[Json] = [
                {"file": part.files[0].rpartition("/")[2], "rows": last - first}
                for part in parts
                for first, last in [stretch_of(part)]
                if part.split == split
            ]
            records = open_records(store, options)
            facts = _metadata(store, records, options, [IDS, *columns]) | {"chunks": chunks}
            text = json.dumps(facts, indent=1) + "\n"
            out.write(folders.name(split, METADATA), text.encode())
            notes += padding_note(records, split, columns)
        return notes

    def detect(self, path: Path) -> Detection | None:
        """By names and first bytes."""
        files = files_below(path, [".pt", ".pth"])
        if files and first_bytes(files[0][1]).startswith(ZIP_MAGIC):
            return Detection(Sure.CERTAIN, "holds zip files named .pt")
        return Detection(Sure.LIKELY, "holds files named .pt") if files else None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Files in the order of their names."""
        return PtFiles(path, options)


def _require_torch(purpose: str) -> None:
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose=purpose)


def _file_tokens(options: ExportOptions) -> int:
    return min(options.file_tokens or FILE_TOKENS, MOST_FILE_TOKENS)


def _metadata(
    store: Store, records: Records, options: ExportOptions, columns: list[str]
) -> dict[str, Json]:
    return {
        "rows": records.count,
        "seq_len": records.length,
        "packing": options.packing,
        "columns": [*columns],
        "dtype": id_dtype(store, options).name,
        "pad_id": getattr(records, "pad_id", None),
        "eos_id": store.eos_id,
        "vocab_size": store.vocab_size,
        "tokens": store.num_tokens,
    }


class PtFiles(Foreign):
    """Files of tensors of one or more splits."""

    has_borders = True

    def __init__(self, path: Path, options: ImportOptions) -> None:
        _require_torch("reading .pt files")
        self._options = options
        found = files_below(path, [".pt", ".pth"])
        if not found and path.is_file():
            found = [(path.name, path)]
        if not found:
            raise damaged(path, "holds no .pt files", hint="name a file or a folder of them")
        self.files = dict(found)
        self.parts = tuple(
            ForeignPart(
                path=name,
                index=0,
                start=0,
                end=None,
                split=split_of(name, options),
                bytes=file_size(file),
            )
            for name, file in found
        )
        self.note = note_of(options)
        self.has_mask = any(
            choose_columns([*_tensors(file)], options, path=file).has_mask for _, file in found
        )

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The rows of a file."""
        path = self.files[part.path]
        return cut_at_eos(self._read(path), self._options, path=path)

    def _read(self, path: Path) -> Iterator[DocumentBlock]:
        found = _tensors(path)
        columns = choose_columns([*found], self._options, path=path)
        rows = {name: _rows(found[name], name, path) for name in columns.names}
        count = len(rows[columns.ids])
        if any(len(each) != count for each in rows.values()):
            raise damaged(path, "has tensors of different numbers of rows")
        step = _step(rows[columns.ids])
        for first in range(0, count, step):
            here = {name: each[first : first + step] for name, each in rows.items()}
            lengths = np.array([len(row) for row in here[columns.ids]], np.int64)
            flat = {name: _flat(each) for name, each in here.items()}
            yield make_block(flat, columns, lengths, self._options, path=path)


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


def _step(rows: Any) -> int:
    """Rows of about a block's size."""
    mean = sum(map(len, rows[:64])) // max(1, len(rows[:64]))
    return max(1, BLOCK_BYTES // (8 * max(1, mean)))


def _flat(rows: Any) -> NDArray[Any]:
    if isinstance(rows, np.ndarray):
        return rows.reshape(-1)
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)
