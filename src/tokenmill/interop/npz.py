"""Arrays of numpy for training loops of one page: `input`, `target` and `mask`, row by row.

    train.npz                    the three arrays, not compressed; or, with --set kind=npy,
    train_input.npy, ...         each in a file of its own, which numpy can map

A row has `seq_len` inputs and their targets, which are the inputs shifted by one; `mask` is False
where a target is padding or is not in the loss mask. Rows are written as they are read, an array
after the other, so that a file of any size costs no memory.

Read are arrays of ids, or inputs with their targets and masks: mapped, in parts where they are not
compressed; the checksums of an archive are compared before that. Arrays of objects are refused:
they are pickles.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import shutil
import struct
import tempfile
import tokenize
import zipfile
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    About,
    Detection,
    DocumentBlock,
    ExportTask,
    Foreign,
    ForeignPart,
    Format,
    ImportOptions,
    Setting,
    Sure,
    check_expansion,
    check_held,
    damaged,
    file_size,
    find_files,
    first_bytes,
    reading,
    split_of,
)
from tokenmill.interop.records import (
    ID_NAMES,
    IDS_SETTING,
    READ_SETTINGS,
    RecordChunk,
    RowRecords,
    check_padding,
    choose_columns,
    id_dtype,
    make_block,
    open_records,
    open_rows,
    row_files,
    row_parts,
)
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles

ARRAYS = INPUT, TARGET, MASK = ("input", "target", "mask")
MAGIC = b"\x93NUMPY"
SUFFIXES = (".npz", ".npy")
_KNOWN = {*ID_NAMES, *ARRAYS, "labels", "attention_mask", "loss_mask"}
_NO_HEADER = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError)
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
            **READ_SETTINGS,
        },
    )

    def plan(self, export: Export) -> list[ExportTask]:
        parts = []
        for split in export.stores:
            records = _records(export, split)
            files = [(f"{split}.npz", 0, len(ARRAYS))]
            if export.options.settings["kind"] == "npy":
                files = [(f"{split}_{name}.npy", i, i + 1) for i, name in enumerate(ARRAYS)]
            for file, first, last in files:
                tokens = records.count * (records.length - 1) * (last - first)
                parts.append(
                    ExportTask(split=split, tokens=tokens, files=(file,), first=first, last=last)
                )
        return parts

    def write(self, export: Export, part: ExportTask, out: PartFiles) -> None:
        file = out.create(part.files[0])
        if export.options.settings["kind"] == "npy":
            _write_array(file, export, part.split, ARRAYS[part.first])
            return
        with zipfile.ZipFile(file, "w") as archive:
            for name in ARRAYS:
                # Without a date: the same rows must make the same bytes.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    _write_array(member, export, part.split, name)

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        mapped = ', mmap_mode="r"' if export.options.settings["kind"] == "npy" else ""
        return [f"read it with: numpy.load(FILE{mapped})"]

    def detect(self, path: Path) -> Detection | None:
        for _, file in find_files(path, *SUFFIXES)[:1]:
            first = first_bytes(file)
            if file.suffix == ".npz" and first.startswith(b"PK"):
                return Detection(Sure.CERTAIN, "is a zip file named .npz")
            if first.startswith(MAGIC):
                return Detection(Sure.CERTAIN, "begins with NUMPY")
        return None

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        hint = "name a .npz or .npy file"
        found = dict(row_files(path, *SUFFIXES, what="numpy files", hint=hint))
        # Targets and masks are read with their inputs.
        others = {
            name.removesuffix(f"_{INPUT}.npy") + f"_{other}.npy"
            for name in found
            for other in (TARGET, MASK)
            if name.endswith(f"_{INPUT}.npy")
        }
        files = {name: file for name, file in found.items() if name not in others}
        parts: list[ForeignPart] = []
        has_mask = False
        for name, file in files.items():
            with _reading(file):
                rows = _Rows(_find_arrays(file, check=True), options, file)
                # Rows that must be joined or unpacked in order are one part.
                whole = options.split_at_eos or rows.are_packed
                step = max(1, rows.count if whole else IMPORT_PART_BYTES // max(1, rows.row_bytes))
                edges = [*range(0, max(1, rows.count), step), rows.count]
                size, split = file_size(file), split_of(name, options)
                parts += row_parts(name, edges, size=size, split=split)
                # The array `mask` is there for padding as well; what is read says if it is more.
                has_mask = has_mask or rows.have_mask()

        def read(part: ForeignPart, file: Path) -> Iterator[DocumentBlock]:
            with _reading(file):
                rows = _Rows(_find_arrays(file), options, file)
                yield from rows.blocks(part.start, rows.count if part.end is None else part.end)

        return open_rows(files, parts, read, options, has_mask=has_mask)


def _records(export: Export, split: str) -> RowRecords:
    id_dtype(export.stores[split], export.options)
    records = open_records(export.stores[split], export.options, overlap=1)
    assert isinstance(records, RowRecords)
    return records


def _write_array(target: IO[bytes], export: Export, split: str, name: str) -> None:
    records, dtype = _records(export, split), id_dtype(export.stores[split], export.options)
    kind = np.dtype(np.bool_) if name == MASK else dtype
    shape = records.count, records.length - 1
    header = {"descr": kind.str, "fortran_order": False, "shape": shape}
    _numpy_format.write_array_header_1_0(target, header)
    for batch in records.batches(0, records.count):
        target.write(np.ascontiguousarray(_select(batch, name), kind).data.cast("B"))


def _select(batch: RecordChunk, name: str) -> NDArray[Any]:
    if name == INPUT:
        return batch.tokens[:, :-1]
    if name == TARGET:
        return batch.tokens[:, 1:]
    counts = batch.counts
    return np.ones_like(batch.tokens[:, 1:], np.bool_) if counts is None else counts[:, 1:]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    with reading(path):
        try:
            yield
        except OSError as error:
            raise damaged(path, f"cannot be read: {error}") from error


def _find_arrays(path: Path, *, check: bool = False) -> dict[str, _Array]:
    """The arrays of a file, or of the files that go together, by name; checksums if asked."""
    if first_bytes(path).startswith(MAGIC):
        stem = path.name.removesuffix(f"_{INPUT}.npy")
        files = {"input_ids": path}
        if stem != path.name:
            files = {name: path.with_name(f"{stem}_{name}.npy") for name in ARRAYS}
        return {name: _Array(file) for name, file in files.items() if file.is_file()}
    found: dict[str, _Array] = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename or name not in _KNOWN:
                continue
            if name in found:
                raise damaged(path, f"has {info.filename!r} several times")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise damaged(path, f"has {info.filename!r} packed in a way that numpy does not")
            found[name] = _Array(path, info)
            if check and not found[name].is_packed:  # zipfile compares those that are unpacked
                with archive.open(info) as stream:
                    while stream.read(BLOCK_BYTES):
                        pass
    return found


class _Array:
    """An array in a file, or in a member of an archive."""

    def __init__(self, path: Path, member: zipfile.ZipInfo | None = None) -> None:
        self._path = path
        self._member = member
        self.is_packed = member is not None and member.compress_type != zipfile.ZIP_STORED
        if member is not None and self.is_packed:
            check_expansion(path, member.file_size, packed=member.compress_size)
        with self._open() as stream:
            self.shape, self._dtype = _read_header(stream, path)
            self._offset = stream.tell()
        left = (file_size(path) if member is None else member.file_size) - self._offset
        wanted = math.prod(self.shape) * self._dtype.itemsize
        if left < wanted:
            raise damaged(path, "ends before its arrays do")
        if left > wanted:
            raise damaged(path, "goes on after its arrays")
        if self.is_packed:
            check_held(path, self.shape[-1] * self._dtype.itemsize, "packed rows")

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if self._member is None:
            with self._path.open("rb") as file:
                yield file
        else:
            with zipfile.ZipFile(self._path) as archive, archive.open(self._member) as stream:
                yield stream

    @cached_property
    def values(self) -> NDArray[Any]:
        """All of it, mapped; what is packed is unpacked by way of the disk."""
        start, data = self._offset, map_file(self._path)
        if self.is_packed:
            with self._open() as stream, tempfile.TemporaryFile() as file:
                shutil.copyfileobj(stream, file, BLOCK_BYTES)
                file.flush()
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        elif self._member is not None:
            at = self._member.header_offset
            start += at + 30 + sum(struct.unpack_from("<HH", data, at + 26))  # name, extra field
        count = math.prod(self.shape)
        return np.frombuffer(data, self._dtype, count, start).reshape(self.shape)


def _read_header(stream: Any, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array that begins here."""
    try:
        version = _numpy_format.read_magic(stream)
        read = _numpy_format.read_array_header_1_0
        read = _numpy_format.read_array_header_2_0 if version[0] > 1 else read
        shape, fortran, dtype = read(stream)
    except _NO_HEADER as error:
        raise damaged(path, f"does not begin as an array: {error}") from error
    if dtype.hasobject:
        raise damaged(
            path,
            "holds an array of objects, which is a pickle; loading it could run anything",
            hint="save the ids as an array of whole numbers",
        )
    sizes_hold = all(type(size) is int and size >= 0 for size in shape)
    if (
        fortran
        or len(shape) not in (1, 2)
        or dtype.kind not in "iub"
        or not sizes_hold
        or (len(shape) == 2 and shape[0] and not shape[1])
    ):
        raise damaged(
            path,
            f"holds {dtype} of shape {shape}{' by columns' if fortran else ''}; ids are rows of"
            " whole numbers",
        )
    return tuple(shape), dtype


class _Rows:
    """The rows of arrays that go together; inputs get the last target after them."""

    def __init__(self, found: Mapping[str, _Array], options: ImportOptions, path: Path) -> None:
        self._columns = choose_columns([*found], options, path=path)
        self._options = options
        self._path = path
        shape = found[self._columns.ids].shape
        named = bool(options.settings.get("column"))
        self._with_target = self._columns.ids == INPUT and TARGET in found and not named
        names = {*self._columns.names} | ({TARGET} if self._with_target else set())
        self._arrays = {name: found[name] for name in sorted(names)}
        if any(array.shape != shape for array in self._arrays.values()):
            raise damaged(path, "has arrays of different shapes")
        self.count, self._length = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        self.are_packed = any(array.is_packed for array in self._arrays.values())
        self.row_bytes = self._length * 4 * len(self._arrays)  # about

    def blocks(self, first: int, last: int) -> Iterator[DocumentBlock]:
        """The rows from one to another."""
        for taken in self._blocks(first, last):
            rows = len(taken[self._columns.ids])
            first += rows
            if self._with_target and self._length:
                yield self._whole(taken, ends=first == self.count)
                continue
            flat = {name: each.reshape(-1) for name, each in taken.items()}
            lengths = np.full(rows, self._length, np.int64)
            yield make_block(flat, self._columns, lengths, self._options, path=self._path)

    def _blocks(self, first: int, last: int) -> Iterator[dict[str, NDArray[Any]]]:
        step = max(1, BLOCK_BYTES // (8 * max(1, self._length)))
        shape = self.count, self._length
        values = {name: array.values.reshape(shape) for name, array in self._arrays.items()}
        for begin in range(first, last, step):
            end = min(begin + step, last)
            yield {name: each[begin:end] for name, each in values.items()}

    def have_mask(self) -> bool:
        """Whether something but padding does not count."""
        if not self._with_target:
            return self._columns.has_mask
        if MASK not in self._arrays:
            return False
        for taken in self._blocks(0, self.count):
            # Rows that count as a whole are not looked at twice.
            partly = ~(taken[MASK] != 0).all(axis=1)
            some = {name: each[partly] for name, each in taken.items()} if partly.any() else {}
            if some and self._whole(some, ends=True).mask is not None:
                return True
        return False

    def _whole(self, taken: Mapping[str, NDArray[Any]], *, ends: bool) -> DocumentBlock:
        """Rows of inputs and the last target, without the padding at their ends.

        Padding is an end whose mask is False and whose targets are all the same. Where rows are
        joined again, the last target is left out, since it is the next row's first input; after
        the row with which a file `ends`, there is none.
        """
        inputs, targets = taken[INPUT], taken[TARGET]
        rows, length = inputs.shape
        mask = np.ones_like(inputs, np.bool_) if MASK not in taken else taken[MASK] != 0
        differs = inputs[:, 1:] != targets[:, :-1]
        if differs.any() and (differs & mask[:, :-1]).any():
            raise damaged(
                self._path,
                f"has a {TARGET!r} that is not its {INPUT!r} shifted by one, so the two are no"
                " rows of one text",
                hint=f"import the inputs alone with: --set column={INPUT}",
            )
        ids = np.concatenate((inputs, targets[:, -1:]), axis=1)
        joins = self._options.split_at_eos
        if mask.all() and not joins:
            return DocumentBlock(ids.reshape(-1), np.full(rows, length + 1, np.int64))
        padded = ~mask & (targets == targets[:, -1:])
        tail = np.logical_and.accumulate(padded[:, ::-1], axis=1).sum(axis=1)
        check_padding(tail, self._options, path=self._path)
        most = np.full(rows, length if joins else length + 1)
        most[-1:] += joins and ends
        kept = np.minimum(length + 1 - tail, most)
        real = np.arange(length + 1) < kept[:, None]
        counts = np.concatenate((np.ones((rows, 1), np.bool_), mask), axis=1)[real]
        has_mask = not counts.all()
        return DocumentBlock(
            ids[real], kept.astype(np.int64), counts.astype(np.uint8) if has_mask else None
        )
