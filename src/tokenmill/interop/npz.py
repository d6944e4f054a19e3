"""Arrays of numpy for training loops of one page: `input`, `target` and `mask`, row by row.

    train.npz                    the three arrays, not compressed; or, with --set kind=npy,
    train_input.npy, ...         each in a file of its own, which numpy can map

A row has `seq_len` inputs and their targets, which are the inputs shifted by one; `mask` is False
where a target is padding or does not count for the loss. Where each row will lie is known before it
is read, so that threads fill a file together. npz_files.py imports.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import tokenize
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    SharedFile,
    Sure,
    check_expansion,
    check_held,
    damaged,
    file_size,
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
    split_of,
    stretch_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions, PartDone
    from tokenmill.interop.export import PartFiles
    from tokenmill.interop.records import Columns, RecordChunk, Records
    from tokenmill.store.durable import Json
    from tokenmill.store.reader import Store


# -------------------------------------------------------------------------------------------------
# Files of numpy that are imported: arrays of ids, or inputs with their targets and masks.
#
# Arrays that are not compressed are mapped, so that parts of one file are read side by side; an
# archive's checksums are compared before that. Arrays of objects are refused: they are pickles.

ARRAYS = INPUT, TARGET, MASK = ("input", "target", "mask")
MAGIC = b"\x93NUMPY"
SUFFIXES = (".npz", ".npy")
_KNOWN = {*ID_NAMES, *ARRAYS, "labels", "attention_mask", "loss_mask"}
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, struct.error)
_NO_HEADER = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError)
_npz_files_numpy_format: Any = np.lib.format  # most of it has no types


class _Array(Protocol):
    """An array that is read from front to back."""

    shape: tuple[int, ...]

    def skip(self, count: int) -> None: ...

    def take(self, count: int) -> NDArray[Any]:
        """The next so many numbers."""
        ...

    def finish(self) -> None:
        """See that nothing is left."""
        ...


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
            whole = self._options.split_at_eos or not rows.are_mapped
            step = max(1, rows.count if whole else IMPORT_PART_BYTES // max(1, rows.row_bytes))
            for index, start in enumerate(range(0, max(1, rows.count), step)):
                end = min(start + step, rows.count)
                yield ForeignPart(
                    path=name,
                    index=index,
                    start=start,
                    end=end,
                    split=split_of(name.replace("_", "-"), self._options),
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
            name: _MappedArray(file, 0, file.stat().st_size)
            for name, file in files.items()
            if file.is_file()
        }
    archive = stack.enter_context(zipfile.ZipFile(path))
    found: dict[str, _Array] = {}
    for info in _members(archive):
        if info.filename.removesuffix(".npy") in found:
            raise damaged(path, f"has {info.filename!r} several times")
        if info.compress_type == zipfile.ZIP_STORED:
            array: _Array = _MappedArray(path, _data_offset(path, info), info.file_size)
        else:
            array = _PackedArray(archive, info, path, stack)
        found[info.filename.removesuffix(".npy")] = array
    return found


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Those that are arrays of interest."""
    return [
        info
        for info in archive.infolist()
        if info.filename.endswith(".npy") and info.filename.removesuffix(".npy") in _KNOWN
    ]


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin; the archive's directory tells of its header alone."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        magic, name, extra = struct.unpack("<4s22xHH", file.read(30))
    if magic != b"PK\x03\x04":
        raise damaged(path, f"has no {info.filename!r} where its directory says")
    return int(info.header_offset + 30 + name + extra)


def _check(path: Path) -> None:
    """Compare the checksums of what is mapped; those of packed members are when they are read."""
    if first_bytes(path).startswith(MAGIC):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            stored = [m for m in _members(archive) if m.compress_type == zipfile.ZIP_STORED]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda info: _check_member(path, info), stored))
    except _BROKEN as error:
        raise damaged(path, f"cannot be read: {error}") from error


def _check_member(path: Path, info: zipfile.ZipInfo) -> None:
    found, left = 0, info.file_size
    buffer = memoryview(bytearray(min(BLOCK_BYTES, left)))
    with path.open("rb", buffering=0) as file:
        file.seek(_data_offset(path, info))
        while left and (count := file.readinto(buffer[:left])):
            found = zlib.crc32(buffer[:count], found)
            left -= count
    if left or found != info.CRC:
        raise damaged(path, f"has a damaged {info.filename!r}: its checksum is another")


class _MappedArray:
    """An array whose bytes are a stretch of a file."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        with path.open("rb") as file:
            file.seek(offset)
            self.shape, dtype = _read_header(file, path)
            offset, size = file.tell(), size - (file.tell() - offset)
        wanted = math.prod(self.shape) * dtype.itemsize
        if size < wanted:
            raise damaged(path, "ends before its arrays do")
        if size > wanted:
            raise damaged(path, "goes on behind its arrays")
        count = wanted // dtype.itemsize
        self._values: NDArray[Any] = np.zeros(0, dtype)
        if count:
            self._values = np.asarray(np.memmap(path, dtype, "r", offset, shape=(count,)))
        self._place = 0

    def skip(self, count: int) -> None:
        self._place += count

    def take(self, count: int) -> NDArray[Any]:
        """A view of the map."""
        first = self._place
        self._place += count
        return self._values[first : self._place]

    def finish(self) -> None:
        """Nothing: its size was compared."""


class _PackedArray:
    """An array that must be unpacked from front to back; nothing is kept that was read."""

    def __init__(
        self,
        archive: zipfile.ZipFile,
        info: zipfile.ZipInfo,
        path: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        if info.compress_type != zipfile.ZIP_DEFLATED:
            raise damaged(path, f"has {info.filename!r} packed in a way that numpy does not")
        check_expansion(path, info.file_size, packed=info.compress_size)
        self._stream = stack.enter_context(archive.open(info))
        self._path = path
        self.shape, self._dtype = _read_header(self._stream, path)
        if math.prod(self.shape) * self._dtype.itemsize > info.file_size:
            raise damaged(path, f"has {info.filename!r} of fewer bytes than its shape takes")
        check_held(path, self.shape[-1] * self._dtype.itemsize, "packed rows")

    def skip(self, count: int) -> None:
        while count:
            step = min(count, BLOCK_BYTES)
            self.take(step)
            count -= step

    def take(self, count: int) -> NDArray[Any]:
        """The next so many numbers."""
        wanted = count * self._dtype.itemsize
        data = self._stream.read(wanted)
        if len(data) != wanted:
            raise damaged(self._path, "ends before its arrays do")
        return np.frombuffer(data, self._dtype)

    def finish(self) -> None:
        """It makes zipfile compare the checksum of the last piece."""
        if self._stream.read(1):
            raise damaged(self._path, "goes on behind its arrays")


def _read_header(stream: Any, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array that begins here."""
    try:
        version = _npz_files_numpy_format.read_magic(stream)
        read = _npz_files_numpy_format.read_array_header_1_0
        read = _npz_files_numpy_format.read_array_header_2_0 if version[0] > 1 else read
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
    def are_mapped(self) -> bool:
        return all(isinstance(array, _MappedArray) for array in self._arrays.values())

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
# Zip archives of members that are not compressed and whose sizes are known before their bytes.
#
# So it is known where every byte will lie, and several threads can fill one file, each its own
# stretches. What is known last are the checksums: those of stretches are joined, then the headers
# are written into the gaps that were left for them.

_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23  # polynomials of CRC-32 have their lowest power in the highest bit
_ZIP64_BYTES = 20
"""Of the extra field with 64-bit sizes; every header has one, so that all have the same length."""
_VERSION = 45
_DATE = 1 << 5 | 1  # 1980-01-01, since the same rows must make the same bytes
_FULL = 0xFFFFFFFF


class Member(NamedTuple):
    """A file of an archive."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredZip:
    """The layout of an archive."""

    members: Sequence[Member]

    def header(self, number: int) -> int:
        """Where the header of a member lies."""
        before = self.members[:number]
        return sum(_header_bytes(member) + member.bytes for member in before)

    def data(self, number: int) -> int:
        """Where the bytes of a member begin."""
        return self.header(number) + _header_bytes(self.members[number])

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.header(len(self.members)) + len(self.directory([0] * len(self.members)))

    def local_header(self, number: int, checksum: int) -> bytes:
        """What stands in front of a member's bytes."""
        name, size = self.members[number]
        info = zipfile.ZipInfo(name)
        info.CRC, info.file_size, info.compress_size = checksum, size, size
        return info.FileHeader(zip64=True)

    def directory(self, checksums: Sequence[int]) -> bytes:
        """What stands behind all members; readers begin with it."""
        entries = b"".join(
            _entry(member, checksum, self.header(number))
            for number, (member, checksum) in enumerate(zip(self.members, checksums, strict=True))
        )
        begin, count = self.header(len(self.members)), len(self.members)
        end = struct.pack(
            "<IQHHIIQQQQ",
            *(0x06064B50, 44, _VERSION, _VERSION, 0, 0),
            *(count, count, len(entries), begin),
        )
        locator = struct.pack("<IIQI", 0x07064B50, 0, begin + len(entries), 1)
        old_end = struct.pack(
            "<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(entries), min(begin, _FULL), 0
        )
        return entries + end + locator + old_end


def _header_bytes(member: Member) -> int:
    return 30 + len(member.name) + _ZIP64_BYTES


def _entry(member: Member, checksum: int, header: int) -> bytes:
    extra = struct.pack("<HHQQQ", 1, 24, member.bytes, member.bytes, header)
    fixed = struct.pack(
        "<IHHHHHHIIIHHHHHII",
        *(0x02014B50, _VERSION, _VERSION, 0, zipfile.ZIP_STORED, 0, _DATE),
        *(checksum, _FULL, _FULL, len(member.name), len(extra), 0, 0, 0),
        *(0o600 << 16, _FULL),
    )
    return fixed + member.name.encode("ascii") + extra


def join_checksums(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of stretches back to back, from the CRC-32 and the length of each."""
    joined = 0
    for checksum, length in parts:
        joined = _multiply(_shift(length), joined) ^ checksum
    return joined


def _shift(length: int) -> int:
    """What bytes behind others multiply the checksum of those by: x to the power of their bits."""
    power, square = _ONE, _X8
    while length:
        if length & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(left: int, right: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product


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
                ExportTask(
                    name=f"{split}-{number:06d}",
                    split=split,
                    tokens=tokens,
                    task={"first": first, "last": last},
                )
                for number, (first, last, tokens) in enumerate(stretches)
            ]
        return ExportPlan(parts=tuple(parts), shared=tuple(shared))

    def write(
        self, store: Store, part: ExportTask, options: ExportOptions, out: PartFiles
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


def _select(batch: RecordChunk, name: str) -> NDArray[Any]:
    if name == INPUT:
        return batch.tokens[:, :-1]
    if name == TARGET:
        return batch.tokens[:, 1:]
    counts = batch.counts
    if counts is None:
        return np.ones((len(batch.lengths), batch.tokens.shape[1] - 1), np.bool_)
    return counts[:, 1:]
