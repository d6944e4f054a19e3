"""Rows of one length in files of tensors (`.pt`) and of numpy arrays (`.npz`, `.npy`).

    chunk_000000.pt    {"input_ids": (rows, seq_len), ...}, for torch.load(..., weights_only=True)
    metadata.json      tokenizer, length of rows, type, padding, and the files with their rows

    train.npz                    `input`, `target` and `mask`, not compressed; or, with kind=npy,
    train_input.npy, ...         each in a file of its own, which numpy can map

Rows that are padded, if only the last one, have an `attention_mask` (.pt) or False in their `mask`.

Tensors: an import also reads bare ones, and lists of them. Whatever is not a tensor is refused:
loading it would mean to run what the file says.

Arrays are for training loops of one page. A row has `seq_len` inputs and their targets, which are
the inputs shifted by one; `mask` is False where a target is padding or is not in the loss mask.
Where it may be either, in stores with masks, `lengths` has the tokens of each row, its last target
counted.
Rows are written as they are read, an array after the other, so that a file of any size costs no
memory. Read are arrays of ids, or inputs with their targets and masks: mapped, in parts where they
are not compressed; the checksums of an archive are compared before that. Arrays of objects are
refused: they are pickles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import pickle
import shutil
import struct
import tempfile
import tokenize
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import MissingExtraError, SourceError
from tokenmill.interop import base, records
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles

METADATA = "metadata.json"
TENSOR_SUFFIXES = (".pt", ".pth")
ZIP_MAGIC = b"PK\x03\x04"
# 64 MB as int32: a file is in memory while it is written.
TENSOR_FILE_TOKENS = 16 << 20
MOST_FILE_TOKENS = 1 << 28
TYPES = {"labels": np.int64, "attention_mask": np.int8, "loss_mask": np.int8}


class Pt(records.RowFormat):
    """Files of tensors."""

    index = (METADATA,)
    about = base.About(
        name="pt",
        title="PyTorch tensors (.pt)",
        read_by="torch.load(..., weights_only=True)",
        kept="rows, loss masks",
        lost="where documents end",
        rows_only=True,
        settings=records.SETTINGS,
    )

    def ranges(self, export: Export, split: str) -> list[records.Range]:
        _require_torch("writing .pt files")
        budget = min(export.options.file_tokens or TENSOR_FILE_TOKENS, MOST_FILE_TOKENS)
        return [*self.records(export, split).cut(lambda lengths: lengths, budget=budget)]

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return export.name(split, f"chunk_{number:06d}.pt")

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        import torch

        source = self.rows(export, part.split)
        dtype = self.dtype(export, part.split)
        shape = part.last - part.first, source.length
        names = (records.IDS, *self.columns(export))
        found = {name: np.empty(shape, TYPES.get(name, dtype)) for name in names}
        place = 0
        for batch in source.batches(part.first, part.last):
            here = slice(place, place + len(batch.lengths))
            for name, array in found.items():
                is_ids = name == records.IDS
                array[here] = batch.tokens if is_ids else batch.column(name, dtype=dtype)
            place = here.stop
        tensors = {name: torch.from_numpy(array) for name, array in found.items()}
        torch.save(tensors, out.create(part.files[0]))

    def describe(self, export: Export, split: str, parts: Sequence[base.ExportTask]) -> list[bytes]:
        store, source = export.stores[split], self.rows(export, split)
        tokenizer = store.manifest.identity.tokenizer
        facts = {
            "tokenizer": {
                "kind": tokenizer.kind,
                "files": sorted(tokenizer.files),
                "fingerprint": tokenizer.fingerprint,
            },
            "rows": source.count,
            "seq_len": source.length,
            "packing": export.options.packing,
            "columns": [records.IDS, *self.columns(export)],
            "dtype": self.dtype(export, split).name,
            "pad_id": source.pad_id,
            "padding": source.padding,
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

    def detect(self, path: Path) -> base.Detection | None:
        files = base.find_files(path, *TENSOR_SUFFIXES)
        if files and base.first_bytes(files[0][1]).startswith(ZIP_MAGIC):
            return base.Detection(base.Sure.CERTAIN, "holds zip files named .pt")
        return base.Detection(base.Sure.LIKELY, "holds files named .pt") if files else None

    def open(self, path: Path, options: base.ImportOptions) -> base.Foreign:
        _require_torch("reading .pt files")
        parts = [
            base.ForeignPart(
                path=name, file=file, split=base.split_of(name, options), bytes=base.file_size(file)
            )
            for name, file in records.row_files(path, *TENSOR_SUFFIXES, what=".pt files")
        ]
        opened = records.open_rows(
            parts,
            lambda part: _read_tensors(part.file, options),
            options,
            has_mask=any(
                records.Columns.choose([*_tensors(part.file)], options, path=part.file).has_mask
                for part in parts
            ),
        )
        return dataclasses.replace(opened, tokenizer=_tokenizer_of(path))


def _tokenizer_of(path: Path) -> str | None:
    """The fingerprint of the tokenizer that made the ids, where a file beside them says it."""
    for _, folder in records.split_folders(path, METADATA):
        with contextlib.suppress(KeyError, TypeError):
            found = records.read_json(folder / METADATA)["tokenizer"]["fingerprint"]
            return found if isinstance(found, str) else None
    return None


def _require_torch(purpose: str) -> None:
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose=purpose)


def _read_tensors(path: Path, options: base.ImportOptions) -> base.Blocks:
    found = _tensors(path)
    columns = records.Columns.choose([*found], options, path=path)
    rows = {name: _tensor_rows(found[name], name, path) for name in columns.names}
    count = len(rows[columns.ids])
    if any(len(each) != count for each in rows.values()):
        raise base.damaged(path, "has tensors of different numbers of rows")
    # Rows of about a block's size.
    some = [len(row) for row in rows[columns.ids][:64]]
    step = max(1, base.BLOCK_BYTES // (8 * max(1, sum(some) // max(1, len(some)))))
    for first in range(0, count, step):
        here = {name: each[first : first + step] for name, each in rows.items()}
        lengths = np.array([len(row) for row in here[columns.ids]], np.int64)
        flat = {
            name: each.reshape(-1) if isinstance(each, np.ndarray) else np.concatenate(each)
            for name, each in here.items()
        }
        yield columns.block(flat, lengths)


def _tensors(path: Path) -> dict[str, Any]:
    """What a file holds, by name; a tensor or list that has none is the ids."""
    import torch

    try:
        with base.reading(path):
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
    named = found if isinstance(found, dict) else {records.IDS: found}
    outlines = outline.values() if isinstance(outline, dict) else [outline]
    tensors = [each for value in outlines for each in _listed(value)]
    if not all(type(each) is torch.Tensor and each.is_meta for each in tensors):
        raise base.damaged(path, "holds other things than tensors of whole numbers")
    if not all(each.is_contiguous() for each in tensors):
        raise base.damaged(
            path,
            "has tensors whose values are not one after the other, or the same ones again, by a"
            " stride",
            hint="write them again with: torch.save(tensor.contiguous(), FILE)",
        )
    if sum(each.numel() * each.element_size() for each in tensors) > base.file_size(path):
        raise base.damaged(
            path,
            "has tensors that are larger than the file: the same bytes several times, by a stride"
            " of 0 or in a list",
            hint="write them again with: torch.save(tensor.clone(), FILE)",
        )
    return {str(name): value for name, value in named.items()}


def read_saved(path: Path) -> object:
    """What a program wrote with torch.save: plain values, and tensors without their bytes."""
    _require_torch("reading .pt files")
    import torch

    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch makes of bytes that it did not write
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise SourceError(
            f"{str(path)!r} cannot be read as plain values and tensors alone: {reason}; to load it"
            " in another way would run what it says",
            hint="write the loader's state to a file of its own, where the file was made:"
            " json.dump(loader.state_dict(), open('state.json', 'w'))",
        ) from error


def _check_archive(path: Path) -> None:
    """Refuse what torch would read otherwise than as bytes that are in the file."""
    if not base.first_bytes(path).startswith(ZIP_MAGIC):
        raise base.damaged(
            path,
            "is no archive of tensors, as torch writes them since version 1.6",
            hint="write it again with: torch.save(torch.load(FILE, weights_only=True), FILE)",
        )
    base.file_size(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(each.compress_type or each.file_size != each.compress_size for each in members):
        raise base.damaged(path, "is a compressed archive, which torch does not write")


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _tensor_rows(value: Any, name: str, path: Path) -> Any:
    """A tensor of rows, or a list of tensors that are rows, as numpy arrays."""
    import torch

    tensors = _listed(value)
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise base.damaged(path, f"holds {type(value).__name__} under {name!r}, not tensors")
    arrays = [each.numpy() for each in tensors]
    if isinstance(value, torch.Tensor) and value.ndim == 2:
        return arrays[0]
    if all(array.ndim == 1 for array in arrays):
        return arrays
    raise base.damaged(path, f"holds tensors of {arrays[0].ndim} dimensions under {name!r}")


ARRAYS = INPUT, TARGET, MASK = ("input", "target", "mask")
LENGTHS = "lengths"
MAGIC = b"\x93NUMPY"
ARRAY_SUFFIXES = (".npz", ".npy")
_KNOWN = {*records.ID_NAMES, *ARRAYS, LENGTHS, "labels", "attention_mask", "loss_mask"}
_NO_HEADER = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError)
_numpy_format: Any = np.lib.format  # most of it has no types


class Npz(records.RowFormat):
    """Files of numpy."""

    about = base.About(
        name="npz",
        title="numpy arrays (.npz, .npy)",
        read_by="numpy.load",
        kept="rows as inputs, targets and mask",
        lost="where documents end",
        row_overlap=1,
        tells_overlap=True,
        file_tokens=False,
        rows_only=True,
        settings={
            "ids": records.IDS_SETTING,
            "kind": base.Setting(
                default="npz",
                help="npz: a file for each split; npy: a file for each array",
                choices=("npz", "npy"),
            ),
            **records.READ_SETTINGS,
        },
    )

    def columns(self, export: Export) -> tuple[str, ...]:
        return ("attention_mask",)  # the array `mask`: nobody has to be told of padding

    def ranges(self, export: Export, split: str) -> list[records.Range]:
        """The arrays of each file, by their numbers."""
        source, count = self.rows(export, split), len(self._arrays(export, split))
        tokens = source.count * (source.length - 1)
        if export.options.settings["kind"] == "npz":
            return [(0, count, tokens * count)]
        return [(number, number + 1, tokens) for number in range(count)]

    def _arrays(self, export: Export, split: str) -> tuple[str, ...]:
        """Three, and one that says what of rows is padding where the mask alone does not."""
        return (*ARRAYS, LENGTHS) if export.stores[split].has_mask else ARRAYS

    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        return f"{split}.npz" if count == 1 else f"{split}_{(*ARRAYS, LENGTHS)[number]}.npy"

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        file = out.create(part.files[0])
        if export.options.settings["kind"] == "npy":
            name = self._arrays(export, part.split)[part.first]
            self._write_array(file, export, part.split, name)
            return
        with zipfile.ZipFile(file, "w") as archive:
            for name in self._arrays(export, part.split):
                # Without a date: the same rows must make the same bytes.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    self._write_array(member, export, part.split, name)

    def _write_array(self, target: IO[bytes], export: Export, split: str, name: str) -> None:
        source = self.rows(export, split)
        if name == LENGTHS:
            self._write_lengths(target, source)
            return
        shape = source.count, source.length - 1
        kind = np.dtype(np.bool_) if name == MASK else self.dtype(export, split)
        header = {"descr": kind.str, "fortran_order": False, "shape": shape}
        _numpy_format.write_array_header_1_0(target, header)
        for batch in source.batches(0, source.count):
            values: NDArray[Any] | None = batch.tokens if name != MASK else batch.counts
            if values is None:
                values = np.ones(batch.tokens.shape, np.bool_)
            values = values[:, :-1] if name == INPUT else values[:, 1:]
            target.write(np.ascontiguousarray(values, kind).data.cast("B"))

    def _write_lengths(self, target: IO[bytes], source: records.RowRecords) -> None:
        kind = np.dtype("<i4")
        header = {"descr": kind.str, "fortran_order": False, "shape": (source.count,)}
        _numpy_format.write_array_header_1_0(target, header)
        for batch in source.batches(0, source.count):
            found = batch.lengths if batch.real is None else batch.real.sum(axis=1)
            target.write(found.astype(kind).data.cast("B"))

    def how_to_read(self, export: Export) -> list[str]:
        mapped = ', mmap_mode="r"' if export.options.settings["kind"] == "npy" else ""
        return [f"read it with: numpy.load(FILE{mapped})"]

    def detect(self, path: Path) -> base.Detection | None:
        for _, file in base.find_files(path, *ARRAY_SUFFIXES)[:1]:
            first = base.first_bytes(file)
            if file.suffix == ".npz" and first.startswith(b"PK"):
                return base.Detection(base.Sure.CERTAIN, "is a zip file named .npz")
            if first.startswith(MAGIC):
                return base.Detection(base.Sure.CERTAIN, "begins with NUMPY")
        return None

    def open(self, path: Path, options: base.ImportOptions) -> base.Foreign:
        hint = "name a .npz or .npy file"
        found = dict(records.row_files(path, *ARRAY_SUFFIXES, what="numpy files", hint=hint))
        # Targets and masks are read with their inputs.
        others = {
            name.removesuffix(f"_{INPUT}.npy") + f"_{other}.npy"
            for name in found
            for other in (TARGET, MASK, LENGTHS)
            if name.endswith(f"_{INPUT}.npy")
        }
        files = {name: file for name, file in found.items() if name not in others}
        parts: list[base.ForeignPart] = []
        has_mask = False
        for name, file in files.items():
            with base.reading(file):
                rows = _Rows(_find_arrays(file, check=True), options, file)
                # Rows that must be joined or unpacked in order are one part.
                whole = options.split_at_eos or rows.are_packed
                step = rows.count if whole else base.IMPORT_PART_BYTES // max(1, rows.row_bytes)
                edges = [*range(0, max(1, rows.count), max(1, step)), rows.count]
                size, split = base.file_size(file), base.split_of(name, options)
                parts += records.row_parts(name, file, edges, size=size, split=split)
                # The array `mask` is there for padding as well; what is read says if it is more.
                has_mask = has_mask or rows.have_mask()

        def read(part: base.ForeignPart) -> base.Blocks:
            with base.reading(part.file):
                assert part.end is not None
                rows = _Rows(_find_arrays(part.file), options, part.file)
                yield from rows.blocks(part.start, part.end)

        return records.open_rows(parts, read, options, has_mask=has_mask)


def _find_arrays(path: Path, *, check: bool = False) -> dict[str, _Array]:
    """The arrays of a file, or of the files that go together, by name; checksums if asked."""
    if base.first_bytes(path).startswith(MAGIC):
        stem = path.name.removesuffix(f"_{INPUT}.npy")
        files = {"input_ids": path}
        if stem != path.name:
            files = {name: path.with_name(f"{stem}_{name}.npy") for name in (*ARRAYS, LENGTHS)}
        return {name: _Array(file) for name, file in files.items() if file.is_file()}
    found: dict[str, _Array] = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename or name not in _KNOWN:
                continue
            if name in found:
                raise base.damaged(path, f"has {info.filename!r} several times")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise base.damaged(
                    path, f"has {info.filename!r} packed in a way that numpy does not"
                )
            found[name] = _Array(path, info)
    if check:
        with ThreadPoolExecutor() as pool:
            list(pool.map(_Array.check, found.values()))
    return found


class _Array:
    """An array in a file, or in a member of an archive."""

    def __init__(self, path: Path, member: zipfile.ZipInfo | None = None) -> None:
        self._path = path
        self._member = member
        self.is_packed = member is not None and member.compress_type != zipfile.ZIP_STORED
        if member is not None and self.is_packed:
            base.check_expansion(path, member.file_size, packed=member.compress_size)
        with self._open() as stream:
            self.shape, self._dtype = _read_header(stream, path)
            self._offset = stream.tell()
        left = (base.file_size(path) if member is None else member.file_size) - self._offset
        wanted = math.prod(self.shape) * self._dtype.itemsize
        if left < wanted:
            raise base.damaged(path, "ends before its arrays do")
        if left > wanted:
            raise base.damaged(path, "goes on after its arrays")
        if self.is_packed:
            base.check_held(path, self.shape[-1] * self._dtype.itemsize, "packed rows")

    def check(self) -> None:
        """Let zipfile compare the checksum, as it does by itself where it unpacks."""
        if not self.is_packed:
            with self._open() as stream:
                while stream.read(1 << 20):  # larger pieces would be new memory each time
                    pass

    def _open(self) -> IO[bytes]:
        if self._member is None:
            return self._path.open("rb")
        with zipfile.ZipFile(self._path) as archive:  # what is open in it stays open
            return archive.open(self._member)

    @cached_property
    def values(self) -> NDArray[Any]:
        """All of it, mapped; what is packed is unpacked by way of the disk."""
        start, data = self._offset, map_file(self._path)
        if self.is_packed:
            with self._open() as stream, tempfile.TemporaryFile() as file:
                shutil.copyfileobj(stream, file, base.BLOCK_BYTES)
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
        raise base.damaged(path, f"does not begin as an array: {error}") from error
    if dtype.hasobject:
        raise base.damaged(
            path,
            "holds an array of objects, which is a pickle; loading it could run anything",
            hint="save the ids as an array of whole numbers",
        )
    are_sizes = all(type(size) is int and size >= 0 for size in shape) and len(shape) in (1, 2)
    is_void = are_sizes and len(shape) == 2 and shape[0] and not shape[1]
    if fortran or dtype.kind not in "iub" or not are_sizes or is_void:
        raise base.damaged(
            path,
            f"holds {dtype} of shape {shape}{' by columns' if fortran else ''}; ids are rows of"
            " whole numbers",
        )
    return tuple(shape), dtype


class _Rows:
    """The rows of arrays that go together; inputs get the last target after them."""

    def __init__(
        self, found: Mapping[str, _Array], options: base.ImportOptions, path: Path
    ) -> None:
        self._columns = records.Columns.choose([*found], options, path=path)
        shape = found[self._columns.ids].shape
        named = bool(options.settings.get("column"))
        self._with_target = self._columns.ids == INPUT and TARGET in found and not named
        names = {*self._columns.names} | ({TARGET} if self._with_target else set())
        self._arrays = {name: found[name] for name in sorted(names)}
        if any(array.shape != shape for array in self._arrays.values()):
            raise base.damaged(path, "has arrays of different shapes")
        if self._with_target and LENGTHS in found:
            if found[LENGTHS].shape != shape[:1]:
                raise base.damaged(path, f"has other {LENGTHS} than one for each row")
            self._arrays[LENGTHS] = found[LENGTHS]
        self.count, self._length = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        self.are_packed = any(array.is_packed for array in self._arrays.values())
        self.row_bytes = self._length * 4 * len(self._arrays)  # about

    def blocks(self, first: int, last: int) -> base.Blocks:
        """The rows from one to another."""
        for taken in self._blocks(first, last):
            rows = len(taken[self._columns.ids])
            first += rows
            if self._with_target and self._length:
                yield self._whole(taken, ends=first == self.count)
                continue
            flat = {name: each.reshape(-1) for name, each in taken.items()}
            lengths = np.full(rows, self._length, np.int64)
            yield self._columns.block(flat, lengths)

    def _blocks(self, first: int, last: int) -> Iterator[dict[str, NDArray[Any]]]:
        step = max(1, base.BLOCK_BYTES // (8 * max(1, self._length)))
        shape = self.count, self._length
        values = {
            name: array.values if name == LENGTHS else array.values.reshape(shape)
            for name, array in self._arrays.items()
        }
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

    def _whole(self, taken: Mapping[str, NDArray[Any]], *, ends: bool) -> base.DocumentBlock:
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
            raise base.damaged(
                self._columns.path,
                f"has a {TARGET!r} that is not its {INPUT!r} shifted by one, so the two are no"
                " rows of one text",
                hint=f"import the inputs alone with: --set column={INPUT}",
            )
        ids = np.concatenate((inputs, targets[:, -1:]), axis=1)
        joins = self._columns.options.split_at_eos
        if mask.all() and not joins:
            return base.DocumentBlock(ids.reshape(-1), np.full(rows, length + 1, np.int64))
        padded = ~mask & (targets == targets[:, -1:])
        tail = np.logical_and.accumulate(padded[:, ::-1], axis=1).sum(axis=1)
        if LENGTHS in taken:
            tail = length + 1 - taken[LENGTHS].astype(np.int64)
            if (tail < 0).any() or (tail > length).any():
                raise base.damaged(self._columns.path, f"has {LENGTHS} that rows cannot have")
        self._columns.check_padding(tail)
        most = np.full(rows, length if joins else length + 1)
        most[-1:] += joins and ends
        kept = np.minimum(length + 1 - tail, most)
        real = np.arange(length + 1) < kept[:, None]
        counts = np.concatenate((np.ones((rows, 1), np.bool_), mask), axis=1)[real]
        has_mask = not counts.all()
        return base.DocumentBlock(
            ids[real], kept.astype(np.int64), counts.astype(np.uint8) if has_mask else None
        )
