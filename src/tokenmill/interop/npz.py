"""Arrays of numpy for training loops of one page: `input`, `target` and `mask`, row by row.

    train.npz                    the three arrays, not compressed; or, with --set kind=npy,
    train_input.npy, ...         each in a file of its own, which numpy can map

A row has `seq_len` inputs and their targets, which are the inputs shifted by one; `mask` is False
where a target is padding or does not count for the loss. Where each row will lie is known before it
is read, so that threads fill a file together. npz_files.py imports.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.interop.base import (
    About,
    Detection,
    ExportPlan,
    Foreign,
    Format,
    Part,
    Setting,
    SharedFile,
    Sure,
)
from tokenmill.interop.columns import COLUMN_SETTING, LABELS_SETTING, files_below, first_bytes
from tokenmill.interop.npz_files import ARRAYS, INPUT, MAGIC, MASK, SUFFIXES, TARGET, NumpyFiles
from tokenmill.interop.records import IDS_SETTING, id_dtype, open_records, stretch_of
from tokenmill.interop.stored_zip import Member, StoredZip, join_checksums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions, PartDone
    from tokenmill.interop.parts import PartFiles
    from tokenmill.interop.records import Batch, Records
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json

PART_TOKENS = 16 << 20
_numpy_format: Any = np.lib.format  # most of it has no types


class Npz(Format):
    """Files of numpy."""

    about = About(
        name="npz",
        title="numpy arrays (.npz, .npy)",
        read_by="numpy.load",
        kept="rows as inputs, targets and mask",
        lost="where documents end",
        row_overlap=1,
        tells_overlap=True,
        file_tokens=False,
        rows=True,
        rows_only=True,
        settings={
            "ids": IDS_SETTING,
            "kind": Setting(
                default="npz",
                help="npz: a file for each split; npy: a file for each array",
                choices=("npz", "npy"),
            ),
            "column": COLUMN_SETTING,
            "labels": LABELS_SETTING,
        },
    )

    def plan(self, stores: Mapping[str, Store], options: ExportOptions) -> ExportPlan:
        """A part to a few rows of all arrays of a split."""
        parts, shared = [], []
        for split, store in stores.items():
            records = open_records(store, options, overlap=1)
            shared += _layout(split, records, store, options).files
            stretches = records.cut(lambda lengths: lengths, budget=PART_TOKENS)
            parts += [
                Part(
                    name=f"{split}-{number:06d}",
                    split=split,
                    tokens=tokens,
                    task={"first": first, "last": last},
                )
                for number, (first, last, tokens) in enumerate(stretches)
            ]
        return ExportPlan(parts=tuple(parts), shared=tuple(shared))

    def write(
        self, store: Store, part: Part, options: ExportOptions, out: PartFiles
    ) -> Mapping[str, Json]:
        """Some rows of each array, and their checksums."""
        records = open_records(store, options, overlap=1)
        layout = _layout(part.split, records, store, options)
        first, last = stretch_of(part)
        places = {name: layout.place(name, first) for name in ARRAYS}
        files = {name: out.stretch(file, offset=offset) for name, (file, offset) in places.items()}
        checksums = dict.fromkeys(ARRAYS, 0)
        for batch in records.batches(first, last):
            for name, file in files.items():
                kind = layout.types[name]
                data = np.ascontiguousarray(_select(batch, name), kind).data.cast("B")
                file.write(data)
                if layout.zip is not None:
                    checksums[name] = zlib.crc32(data, checksums[name])
        return {"checksums": {**checksums}}

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        done: Sequence[PartDone],
        out: PartFiles,
    ) -> Sequence[str]:
        """What stands in front of the arrays, and behind them all."""
        for split, store in stores.items():
            records = open_records(store, options, overlap=1)
            layout = _layout(split, records, store, options)
            layout.write_headers([each for each in done if each.part.split == split], out)
        mapped = ', mmap_mode="r"' if options.settings["kind"] == "npy" else ""
        return [f"read it with: numpy.load(FILE{mapped})"]

    def detect(self, path: Path) -> Detection | None:
        """By names and first bytes."""
        for _, file in files_below(path, SUFFIXES)[:1]:
            first = first_bytes(file)
            if file.suffix == ".npz" and first.startswith(b"PK"):
                return Detection(Sure.CERTAIN, "is a zip file named .npz")
            if first.startswith(MAGIC):
                return Detection(Sure.CERTAIN, "begins with NUMPY")
        return None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Files in the order of their names."""
        return NumpyFiles(path, options)


def _layout(split: str, records: Records, store: Store, options: ExportOptions) -> _Layout:
    assert records.length is not None
    dtype = id_dtype(store, options)
    return _Layout(
        split=split,
        shape=(records.count, records.length - 1),
        types={INPUT: dtype, TARGET: dtype, MASK: np.dtype(np.bool_)},
        is_zip=options.settings["kind"] == "npz",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where everything of a split will lie."""

    split: str
    shape: tuple[int, int]
    types: Mapping[str, np.dtype[Any]]
    is_zip: bool

    @property
    def zip(self) -> StoredZip | None:
        if not self.is_zip:
            return None
        return StoredZip([Member(f"{name}.npy", self._bytes(name)) for name in ARRAYS])

    @property
    def files(self) -> list[SharedFile]:
        if self.zip is not None:
            return [SharedFile(name=f"{self.split}.npz", bytes=self.zip.size)]
        return [SharedFile(name=self._file(name), bytes=self._bytes(name)) for name in ARRAYS]

    def place(self, array: str, row: int) -> tuple[str, int]:
        """The file of an array, and where a row of it begins."""
        base = 0 if self.zip is None else self.zip.data(ARRAYS.index(array))
        row_bytes = self.shape[1] * self.types[array].itemsize
        return self._file(array), base + len(self._header(array)) + row * row_bytes

    def write_headers(self, done: Sequence[PartDone], out: PartFiles) -> None:
        """Everything but the rows."""
        if self.zip is None:
            for name in ARRAYS:
                out.stretch(self._file(name), offset=0).write(self._header(name))
            return
        checksums = [self._checksum(name, done) for name in ARRAYS]
        for number, name in enumerate(ARRAYS):
            file = out.stretch(self._file(name), offset=self.zip.header(number))
            file.write(self.zip.local_header(number, checksums[number]) + self._header(name))
        end = out.stretch(self.files[0].name, offset=self.zip.header(len(ARRAYS)))
        end.write(self.zip.directory(checksums))

    def _checksum(self, array: str, done: Sequence[PartDone]) -> int:
        row_bytes = self.shape[1] * self.types[array].itemsize
        stretches = [(zlib.crc32(self._header(array)), len(self._header(array)))]
        for each in done:
            found = each.facts["checksums"]
            assert isinstance(found, dict)
            first, last = stretch_of(each.part)
            stretches.append((int(str(found[array])), (last - first) * row_bytes))
        return join_checksums(stretches)

    def _file(self, array: str) -> str:
        return f"{self.split}.npz" if self.is_zip else f"{self.split}_{array}.npy"

    def _header(self, array: str) -> bytes:
        """What a file of numpy begins with."""
        header = {"descr": self.types[array].str, "fortran_order": False, "shape": self.shape}
        buffer = io.BytesIO()
        _numpy_format.write_array_header_1_0(buffer, header)
        return buffer.getvalue()

    def _bytes(self, array: str) -> int:
        rows, length = self.shape
        return len(self._header(array)) + rows * length * self.types[array].itemsize


def _select(batch: Batch, name: str) -> NDArray[Any]:
    if name == INPUT:
        return batch.tokens[:, :-1]
    if name == TARGET:
        return batch.tokens[:, 1:]
    counts = batch.counts
    if counts is None:
        return np.ones((len(batch.lengths), batch.tokens.shape[1] - 1), np.bool_)
    return counts[:, 1:]
