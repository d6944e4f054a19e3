"""Writes what `torch.save` writes for a dict of tensors, without torch, column by column.

    data.pkl         the dict, as the few opcodes that `torch.load(weights_only=True)` allows
    data/0, data/1   the values of each tensor, aligned, so that they can be mapped
    byteorder, version, .format_version, .storage_alignment

A file is a zip archive that is not compressed. Rows go into it as they are read, so its size costs
no memory, and no worker spends seconds on importing torch.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ROOT = "archive"
ALIGNMENT = 64
MAX_TENSOR_BYTES = (1 << 31) - 1
"""Beyond it zip needs headers of another form."""
STORAGES = {"int8": "CharStorage", "int32": "IntStorage", "int64": "LongStorage"}
RECORDS = {
    ".format_version": b"1",
    ".storage_alignment": str(ALIGNMENT).encode(),
    "byteorder": b"little",
    "version": b"3\n",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of two dimensions that is to be written."""

    dtype: np.dtype[Any]
    shape: tuple[int, int]
    blocks: Callable[[], Iterable[np.ndarray[Any, Any]]]
    """Its rows, in order."""


def write_tensors(target: Any, tensors: Mapping[str, Tensor]) -> None:
    """A file that `torch.load` opens as a dict of these tensors."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(f"{ROOT}/data.pkl"), _pickle(tensors))
        for number, tensor in enumerate(tensors.values()):
            record = _aligned(archive, f"{ROOT}/data/{number}")
            with archive.open(record, "w") as member:
                for block in tensor.blocks():
                    member.write(np.ascontiguousarray(block, tensor.dtype).data.cast("B"))
        for name, data in RECORDS.items():
            archive.writestr(zipfile.ZipInfo(f"{ROOT}/{name}"), data)


def _aligned(archive: Any, name: str) -> zipfile.ZipInfo:
    """A record whose data begins at a multiple of `ALIGNMENT`, by an extra field of zeros."""
    record = zipfile.ZipInfo(name)
    begin = archive.fp.tell() + 30 + len(name) + 4
    record.extra = struct.pack("<2sH", b"FB", -begin % ALIGNMENT) + bytes(-begin % ALIGNMENT)
    return record


def _pickle(tensors: Mapping[str, Tensor]) -> bytes:
    """Protocol 2: an empty dict, then name and tensor of each item."""
    items = [_text(name) + _tensor(each, number) for number, (name, each) in _numbered(tensors)]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def _numbered(tensors: Mapping[str, Tensor]) -> Iterable[tuple[int, tuple[str, Tensor]]]:
    return enumerate(tensors.items())


def _tensor(tensor: Tensor, number: int) -> bytes:
    """A call of torch's own function that puts a tensor on top of its storage."""
    rows, length = tensor.shape
    kind = tensor.dtype.name
    count, storage = rows * length, _global("torch", STORAGES.get(kind, ""))
    function, dtype = "_rebuild_tensor_v2", b""
    if kind not in STORAGES:  # the unsigned types are younger than typed storages
        count, storage = count * tensor.dtype.itemsize, _global("torch.storage", "UntypedStorage")
        function, dtype = "_rebuild_tensor_v3", _global("torch", kind)
    key = b"(" + _text("storage") + storage + _text(str(number)) + _text("cpu") + _number(count)
    shape = _number(rows) + _number(length) + b"\x86"
    strides = _number(length) + _number(1) + b"\x86"
    hooks = _global("collections", "OrderedDict") + b")R"
    arguments = key + b"tQ" + _number(0) + shape + strides + b"\x89" + hooks + dtype
    return _global("torch._utils", function) + b"(" + arguments + b"tR"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode("ascii")


def _number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]
