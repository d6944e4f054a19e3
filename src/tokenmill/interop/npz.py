"""Arrays of numpy for training loops of one page: `input`, `target` and `mask`, row by row.

    train.npz                    the three arrays, not compressed; or, with --set kind=npy,
    train_input.npy, ...         each in a file of its own, which numpy can map

A row has `seq_len` inputs and their targets, which are the inputs shifted by one; `mask` is False
where a target is padding or does not count for the loss. An import reads files of this kind, and
arrays of ids under the usual names. Arrays of objects are refused: they are pickles.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.interop.base import (
    BLOCK_BYTES,
    About,
    Block,
    Detection,
    ExportPlan,
    Foreign,
    ForeignPart,
    Format,
    Part,
    Setting,
    Sure,
    damaged,
)
from tokenmill.interop.columns import (
    COLUMN_SETTING,
    ID_NAMES,
    LABELS_SETTING,
    choose_columns,
    cut_at_eos,
    files_below,
    first_bytes,
    make_block,
    note_of,
    require_file,
    split_of,
)
from tokenmill.interop.records import IDS_SETTING, id_dtype, open_records
from tokenmill.interop.tables import Sink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions, PartDone
    from tokenmill.interop.parts import PartFiles
    from tokenmill.interop.records import Batch, Records
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json

ARRAYS = INPUT, TARGET, MASK = ("input", "target", "mask")
MAGIC = b"\x93NUMPY"
SUFFIXES = (".npz", ".npy")
_numpy_format: Any = np.lib.format  # most of it has no types


class Npz(Format):
    """Files of numpy."""

    about = About(
        name="npz",
        title="numpy arrays (.npz, .npy)",
        read_by="numpy.load",
        kept="rows as inputs, targets and mask",
        lost="where documents end",
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
            tokens = records.count * (records.length or 0)
            if options.settings["kind"] == "npz":
                parts.append(Part(name=split, split=split, tokens=tokens, files=(f"{split}.npz",)))
                continue
            parts += [
                Part(
                    name=f"{split}-{name}",
                    split=split,
                    tokens=tokens // 3,
                    files=(f"{split}_{name}.npy",),
                    task={"array": name},
                )
                for name in ARRAYS
            ]
        return ExportPlan(parts=tuple(parts))

    def write(
        self, store: Store, part: Part, options: ExportOptions, out: PartFiles
    ) -> Mapping[str, Json]:
        """One file."""
        records, dtype = open_records(store, options, overlap=1), id_dtype(store, options)
        sink = Sink(out.create(part.files[0]))
        if "array" in part.task:
            _write_array(sink, records, str(part.task["array"]), dtype)
            return {}
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
            for name in ARRAYS:
                # Without a date, so that the same rows make the same bytes.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    _write_array(member, records, name, dtype)
        return {}

    def finish(
        self,
        stores: Mapping[str, Store],
        options: ExportOptions,
        done: Sequence[PartDone],
        out: PartFiles,
    ) -> Sequence[str]:
        """Nothing to write: the files say all."""
        del stores
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


def _write_array(target: Any, records: Records, name: str, dtype: np.dtype[Any]) -> None:
    """Header and rows of one of the three arrays."""
    assert records.length is not None
    kind = np.dtype(np.bool_) if name == MASK else dtype
    header = {
        "descr": kind.str,
        "fortran_order": False,
        "shape": (records.count, records.length - 1),
    }
    _numpy_format.write_array_header_1_0(target, header)
    for batch in records.batches(0, records.count):
        values = np.ascontiguousarray(_select(batch, name), kind)
        target.write(values.data.cast("B"))


def _select(batch: Batch, name: str) -> NDArray[Any]:
    if name == INPUT:
        return batch.tokens[:, :-1]
    if name == TARGET:
        return batch.tokens[:, 1:]
    counts = batch.counts
    if counts is None:
        return np.ones((len(batch.lengths), batch.tokens.shape[1] - 1), np.bool_)
    return counts[:, 1:]


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
        self.parts = tuple(
            ForeignPart(
                path=name,
                index=0,
                start=0,
                end=None,
                split=split_of(name.replace("_", "-"), options),
                bytes=require_file(file),
            )
            for name, file in read
        )
        self.note = note_of(options)
        # The array `mask` is there for padding as well; only what is read says whether it is more.
        self.has_mask = any(
            block.mask is not None for part in self.parts for block in self.blocks(part)
        )

    def blocks(self, part: ForeignPart) -> Iterator[Block]:
        """The rows of a file."""
        return cut_at_eos(self._read(self.files[part.path]), self._options)

    def _read(self, path: Path) -> Iterator[Block]:
        with contextlib.ExitStack() as stack:
            try:
                found = _open_arrays(path, stack)
                yield from _rows(found, self._options, path)
            except (
                zipfile.BadZipFile,
                zlib.error,
                OSError,
                EOFError,
                NotImplementedError,
            ) as error:
                raise damaged(path, f"cannot be read: {error}") from error


def _belongs_to_another(name: str, names: set[str]) -> bool:
    for other in (TARGET, MASK):
        stem = name.removesuffix(f"_{other}.npy")
        if stem != name and f"{stem}_{INPUT}.npy" in names:
            return True
    return False


def _open_arrays(path: Path, stack: contextlib.ExitStack) -> dict[str, _ArrayReader]:
    """The arrays of a file, or of the files that go together, by name."""
    if first_bytes(path).startswith(MAGIC):
        stem = path.name.removesuffix(f"_{INPUT}.npy")
        files = {"input_ids": path}
        if stem != path.name:
            files = {name: path.with_name(f"{stem}_{name}.npy") for name in ARRAYS}
        opened = {
            name: stack.enter_context(file.open("rb"))
            for name, file in files.items()
            if file.is_file()
        }
        return {name: _ArrayReader(stream, files[name]) for name, stream in opened.items()}
    archive = stack.enter_context(zipfile.ZipFile(path))
    members = [name for name in archive.namelist() if name.endswith(".npy")]
    return {
        name.removesuffix(".npy"): _ArrayReader(stack.enter_context(archive.open(name)), path)
        for name in members
        if name.removesuffix(".npy")
        in {*ID_NAMES, *ARRAYS, "labels", "attention_mask", "loss_mask"}
    }


class _ArrayReader:
    """An array of a file, read from front to back: nothing is loaded that is not asked for."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream = stream
        self._path = path
        try:
            version = _numpy_format.read_magic(stream)
            read = _numpy_format.read_array_header_1_0
            read = _numpy_format.read_array_header_2_0 if version[0] > 1 else read
            self.shape, fortran, self._dtype = read(stream)
        except ValueError as error:
            raise damaged(path, f"does not begin as an array: {error}") from error
        if self._dtype.hasobject:
            raise damaged(
                path,
                "holds an array of objects, which is a pickle; loading it could run anything",
                hint="save the ids as an array of whole numbers",
            )
        if fortran or len(self.shape) not in (1, 2) or self._dtype.kind not in "iub":
            raise damaged(
                path,
                f"holds {self._dtype} of shape {self.shape}{' by columns' if fortran else ''}; ids"
                " are rows of whole numbers",
            )

    def take(self, count: int) -> NDArray[Any]:
        """The next so many numbers."""
        wanted = count * self._dtype.itemsize
        data = self._stream.read(wanted)
        if len(data) != wanted:
            raise damaged(self._path, "ends before its arrays do")
        return np.frombuffer(data, self._dtype)

    def finish(self) -> None:
        """See that nothing is left: it makes zipfile compare the checksum of the last piece."""
        if self._stream.read(1):
            raise damaged(self._path, "goes on behind its arrays")


def _rows(found: Mapping[str, _ArrayReader], options: ImportOptions, path: Path) -> Iterator[Block]:
    """Rows of the arrays; inputs get the last target behind them."""
    columns = choose_columns([*found], options, path=path)
    shape = found[columns.ids].shape
    with_target = columns.ids == INPUT and TARGET in found
    wanted = {*columns.names} | ({TARGET} if with_target else set())
    if any(found[name].shape != shape for name in wanted):
        raise damaged(path, "has arrays of different shapes")
    count, length = shape if len(shape) == 2 else (1, shape[0])
    step = max(1, BLOCK_BYTES // (8 * max(1, length)))
    for first in range(0, count, step):
        rows = min(step, count - first)
        taken = {name: found[name].take(rows * length) for name in wanted}
        if with_target and length:
            yield _whole_rows(taken, (rows, length), options)
        else:
            lengths = np.full(rows, length, np.int64)
            yield make_block(taken, columns, lengths, path=path)
    for name in wanted:
        found[name].finish()


def _whole_rows(
    taken: Mapping[str, NDArray[Any]], shape: tuple[int, int], options: ImportOptions
) -> Block:
    """Rows of inputs and the last target, without the padding at their ends.

    Padding is an end whose mask is False and whose targets are all the same. Where rows are joined
    again, the last target is left out, since it is the next row's first input.
    """
    inputs, targets = taken[INPUT].reshape(shape), taken[TARGET].reshape(shape)
    ids = np.concatenate((inputs[:, :1], targets), axis=1)
    mask = np.ones(shape, np.bool_) if MASK not in taken else taken[MASK].reshape(shape) != 0
    if not options.split_at_eos and mask.all():
        return Block(ids.reshape(-1), np.full(shape[0], shape[1] + 1, np.int64))
    padded = ~mask & (targets == targets[:, -1:])
    tail = np.logical_and.accumulate(padded[:, ::-1], axis=1).sum(axis=1)
    kept = shape[1] + 1 - tail
    if options.split_at_eos:
        kept = np.minimum(kept, shape[1])
    real = np.arange(shape[1] + 1) < kept[:, None]
    counts = np.concatenate((np.ones((shape[0], 1), np.bool_), mask), axis=1)
    has_mask = MASK in taken and not counts[real].all()
    return Block(
        ids[real], kept.astype(np.int64), counts[real].astype(np.uint8) if has_mask else None
    )
