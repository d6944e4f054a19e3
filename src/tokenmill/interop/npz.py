"""Arrays of numpy for training loops of one page: `input`, `target` and `mask`, row by row.

    train.npz                    the three arrays, not compressed; or, with --set kind=npy,
    train_input.npy, ...         each in a file of its own, which numpy can map

A row has `seq_len` inputs and their targets, which are the inputs shifted by one; `mask` is False
where a target is padding or is not in the loss mask. Rows are written as they are read, an array
after the other, so that a file of any size costs no memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import tokenize
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    About,
    Detection,
    DocumentBlock,
    ExportPlan,
    ExportTask,
    Foreign,
    ForeignPart,
    Format,
    Setting,
    Sure,
    check_expansion,
    check_held,
    damaged,
    file_size,
    split_of,
)
from tokenmill.interop.records import (
    COLUMN_SETTING,
    ID_NAMES,
    IDS_SETTING,
    LABELS_SETTING,
    check_padding,
    choose_columns,
    cut_at_eos,
    files_below,
    first_bytes,
    id_dtype,
    make_block,
    note_of,
    open_records,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions
    from tokenmill.interop.export import PartFiles
    from tokenmill.interop.records import Columns, RecordChunk, Records
    from tokenmill.store.reader import Store


# -------------------------------------------------------------------------------------------------
# Reading: arrays of ids, or inputs with their targets and masks.
#
# Arrays are read from front to back, in parts where they are not compressed; the checksums of an
# archive are compared before that. Arrays of objects are refused: they are pickles.

ARRAYS = INPUT, TARGET, MASK = ("input", "target", "mask")
MAGIC = b"\x93NUMPY"
SUFFIXES = (".npz", ".npy")
_KNOWN = {*ID_NAMES, *ARRAYS, "labels", "attention_mask", "loss_mask"}
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, struct.error)
_NO_HEADER = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError)
_numpy_format: Any = np.lib.format  # most of it has no types


class NumpyFiles(Foreign):
    """Files of arrays of one or more splits; `a_input.npy` goes with `a_target.npy`."""

    has_borders = True

    def __init__(self, path: Path, options: ImportOptions) -> None:
        self._options = options
        found = files_below(path, SUFFIXES)
        if not found and path.is_file():
            found = [(path.name, path)]
        names = {name for name, _ in found}
        # Targets and masks are read with their inputs.
        read = [(name, file) for name, file in found if not _belongs_to_another(name, names)]
        if not read:
            raise damaged(path, "holds no numpy files", hint="name a .npz or .npy file")
        self.files = dict(read)
        self.note = note_of(options)
        for file in self.files.values():
            _check(file)
        self.parts = tuple(part for name in self.files for part in self._cut(name))
        # The array `mask` is there for padding as well; only what is read says whether it is more.
        self.has_mask = any(self._has_mask(file) for file in self.files.values())

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The rows of a part."""
        path = self.files[part.path]
        with _reading(path) as found:
            blocks = _Rows(found, self._options, path).blocks(part.start, part.end)
            yield from cut_at_eos(blocks, self._options, path=path)

    def _cut(self, name: str) -> Iterator[ForeignPart]:
        """Parts of some rows each; one where rows must be joined or unpacked in order."""
        path = self.files[name]
        size = file_size(path)
        with _reading(path) as found:
            rows = _Rows(found, self._options, path)
            whole = self._options.split_at_eos or rows.are_packed
            step = max(1, rows.count if whole else IMPORT_PART_BYTES // max(1, rows.row_bytes))
            for index, start in enumerate(range(0, max(1, rows.count), step)):
                end = min(start + step, rows.count)
                yield ForeignPart(
                    path=name,
                    index=index,
                    start=start,
                    end=end,
                    split=split_of(name, self._options),
                    bytes=size * (end - start) // max(1, rows.count),
                )

    def _has_mask(self, path: Path) -> bool:
        with _reading(path) as found:
            return _Rows(found, self._options, path).have_mask()


def _belongs_to_another(name: str, names: set[str]) -> bool:
    for other in (TARGET, MASK):
        stem = name.removesuffix(f"_{other}.npy")
        if stem != name and f"{stem}_{INPUT}.npy" in names:
            return True
    return False


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[dict[str, _Array]]:
    """The arrays of a file, or of the files that go together, by name."""
    with contextlib.ExitStack() as stack:
        try:
            yield _open_arrays(path, stack)
        except _BROKEN as error:
            raise damaged(path, f"cannot be read: {error}") from error


def _open_arrays(path: Path, stack: contextlib.ExitStack) -> dict[str, _Array]:
    if first_bytes(path).startswith(MAGIC):
        stem = path.name.removesuffix(f"_{INPUT}.npy")
        files = {"input_ids": path}
        if stem != path.name:
            files = {name: path.with_name(f"{stem}_{name}.npy") for name in ARRAYS}
        return {
            name: _Array(stack.enter_context(file.open("rb")), file_size(file), path=file)
            for name, file in files.items()
            if file.is_file()
        }
    archive = stack.enter_context(zipfile.ZipFile(path))
    found: dict[str, _Array] = {}
    for info in _members(archive):
        name = info.filename.removesuffix(".npy")
        if name in found:
            raise damaged(path, f"has {info.filename!r} several times")
        is_packed = info.compress_type != zipfile.ZIP_STORED
        if is_packed:
            if info.compress_type != zipfile.ZIP_DEFLATED:
                raise damaged(path, f"has {info.filename!r} packed in a way that numpy does not")
            check_expansion(path, info.file_size, packed=info.compress_size)
        stream = stack.enter_context(archive.open(info))
        found[name] = _Array(stream, info.file_size, path=path, is_packed=is_packed)
    return found


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Those that are arrays of interest."""
    return [
        info
        for info in archive.infolist()
        if info.filename.endswith(".npy") and info.filename.removesuffix(".npy") in _KNOWN
    ]


def _check(path: Path) -> None:
    """Compare checksums of members that are read in parts; zipfile does of those read whole."""
    if first_bytes(path).startswith(MAGIC):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for info in _members(archive):
                if info.compress_type == zipfile.ZIP_STORED:
                    with archive.open(info) as stream:
                        while stream.read(BLOCK_BYTES):
                            pass
    except _BROKEN as error:
        raise damaged(path, f"cannot be read: {error}") from error


class _Array:
    """An array that is read from front to back."""

    def __init__(
        self, stream: IO[bytes], size: int, *, path: Path, is_packed: bool = False
    ) -> None:
        """`size`: bytes of the stream, header included."""
        self._stream = stream
        self._path = path
        self.is_packed = is_packed
        self.shape, self._dtype = _read_header(stream, path)
        left = size - stream.tell()
        wanted = math.prod(self.shape) * self._dtype.itemsize
        if left < wanted:
            raise damaged(path, "ends before its arrays do")
        if left > wanted:
            raise damaged(path, "goes on after its arrays")
        if is_packed:
            check_held(path, self.shape[-1] * self._dtype.itemsize, "packed rows")

    def skip(self, count: int) -> None:
        self._stream.seek(count * self._dtype.itemsize, os.SEEK_CUR)

    def take(self, count: int) -> NDArray[Any]:
        """The next so many numbers."""
        wanted = count * self._dtype.itemsize
        data = self._stream.read(wanted)
        if len(data) != wanted:
            raise damaged(self._path, "ends before its arrays do")
        return np.frombuffer(data, self._dtype)

    def finish(self) -> None:
        """See that nothing is left; it makes zipfile compare the checksum of the last piece."""
        if self._stream.read(1):
            raise damaged(self._path, "goes on after its arrays")


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
    """The rows of arrays that go together; inputs get the last target behind them."""

    def __init__(self, found: Mapping[str, _Array], options: ImportOptions, path: Path) -> None:
        self._columns: Columns = choose_columns([*found], options, path=path)
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

    @property
    def are_packed(self) -> bool:
        return any(array.is_packed for array in self._arrays.values())

    @property
    def _step(self) -> int:
        """Rows of a block."""
        return max(1, BLOCK_BYTES // (8 * max(1, self._length)))

    @property
    def row_bytes(self) -> int:
        """About: of ids, targets and a mask."""
        return self._length * 4 * len(self._arrays)

    def blocks(self, first: int, last: int | None) -> Iterator[DocumentBlock]:
        """The rows from one to another."""
        last = self.count if last is None else last
        for array in self._arrays.values():
            array.skip(first * self._length)
        for begin in range(first, last, self._step):
            end = min(begin + self._step, last)
            yield self._block(end - begin, ends=end == self.count)
        if last == self.count:
            for array in self._arrays.values():
                array.finish()

    def _block(self, rows: int, *, ends: bool) -> DocumentBlock:
        taken = {name: array.take(rows * self._length) for name, array in self._arrays.items()}
        if self._with_target and self._length:
            shape = rows, self._length
            whole = {name: each.reshape(shape) for name, each in taken.items()}
            return self._whole(whole, ends=ends)
        lengths = np.full(rows, self._length, np.int64)
        return make_block(taken, self._columns, lengths, self._options, path=self._path)

    def have_mask(self) -> bool:
        """Whether something but padding does not count."""
        if not self._with_target:
            return self._columns.has_mask
        if MASK not in self._arrays:
            return False
        step = self._step
        return any(
            self._have_mask(min(step, self.count - begin)) for begin in range(0, self.count, step)
        )

    def _have_mask(self, rows: int) -> bool:
        """The same of the next rows; those that count as a whole are not looked at twice."""
        shape = rows, self._length
        taken = {
            name: array.take(rows * self._length).reshape(shape)
            for name, array in self._arrays.items()
        }
        partly = ~(taken[MASK] != 0).all(axis=1)
        if not partly.any():
            return False
        rows_of = {name: each[partly] for name, each in taken.items()}
        return self._whole(rows_of, ends=True).mask is not None

    def _whole(self, taken: Mapping[str, NDArray[Any]], *, ends: bool) -> DocumentBlock:
        """Rows of inputs and the last target, without the padding at their ends.

        Padding is an end whose mask is False and whose targets are all the same. Where rows are
        joined again, the last target is left out, since it is the next row's first input; behind
        the row with which a file `ends`, there is none.
        """
        inputs, targets = taken[INPUT], taken[TARGET]
        rows, length = inputs.shape
        mask = np.ones_like(inputs, np.bool_) if MASK not in taken else taken[MASK] != 0
        self._check_targets(inputs, targets, mask)
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

    def _check_targets(
        self, inputs: NDArray[Any], targets: NDArray[Any], mask: NDArray[np.bool_]
    ) -> None:
        differs = inputs[:, 1:] != targets[:, :-1]
        if differs.any() and (differs & mask[:, :-1]).any():
            raise damaged(
                self._path,
                f"has a {TARGET!r} that is not its {INPUT!r} shifted by one, so the two are no"
                " rows of one text",
                hint=f"import the inputs alone with: --set column={INPUT}",
            )


# -------------------------------------------------------------------------------------------------
# Writing.


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
        """A part to a file."""
        parts = []
        for split, store in stores.items():
            id_dtype(store, options)
            records = open_records(store, options, overlap=1)
            assert records.length is not None
            files: dict[str, tuple[str, ...]] = {f"{split}.npz": ARRAYS}
            if options.settings["kind"] == "npy":
                files = {f"{split}_{name}.npy": (name,) for name in ARRAYS}
            parts += [
                ExportTask(
                    split=split,
                    tokens=records.count * (records.length - 1) * len(arrays),
                    files=(file,),
                    task={"arrays": [*arrays]},
                )
                for file, arrays in files.items()
            ]
        return ExportPlan(parts=tuple(parts))

    def write(self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles) -> None:
        """One file."""
        records, dtype = open_records(store, options, overlap=1), id_dtype(store, options)
        file = out.create(part.files[0])
        if options.settings["kind"] == "npy":
            arrays = part.task["arrays"]
            assert isinstance(arrays, list)
            _write_array(file, records, str(arrays[0]), dtype)
            return
        with zipfile.ZipFile(file, "w") as archive:
            for name in ARRAYS:
                # Without a date: the same rows must make the same bytes.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    _write_array(member, records, name, dtype)

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        parts: Sequence[ExportTask],
        out: PartFiles,
    ) -> Sequence[str]:
        """Nothing to write: the files say all."""
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


def _write_array(target: IO[bytes], records: Records, name: str, dtype: np.dtype[Any]) -> None:
    assert records.length is not None
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
    if counts is None:
        return np.ones((len(batch.lengths), batch.tokens.shape[1] - 1), np.bool_)
    return counts[:, 1:]
