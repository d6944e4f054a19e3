"""Compressed files as one stream of bytes, all members, frames and streams of them.

Sits between `paths` and the block reader. A file that ends too early or goes wrong in the middle is
an OSError, never a silent end: Python's own `bz2` and `lzma` file objects take a damaged second
stream for trailing garbage and drop it, so they are not used.

Discovery looks into files through this module, so it imports Arrow only when it needs it.
"""

from __future__ import annotations

import contextlib
import io
import lzma
from typing import TYPE_CHECKING, Any, Protocol, cast

from tokenmill import paths
from tokenmill.config import format_size
from tokenmill.sources.base import check_room

if TYPE_CHECKING:
    from typing import BinaryIO

    from tokenmill.sources.base import SourceFile

SUFFIXES = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_ARROW_CODECS = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}
_CHUNK_BYTES = 1 << 18
_LZMA2 = 0x21
_XZ_BYTES = 1 << 20
"""What a decoder of xz holds beside its dictionary."""
_ZSTD_HEAD_BYTES = 18


class ByteReader(Protocol):
    """What the readers need of a file: the next bytes, into a buffer of theirs."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def read(self, size: int = -1, /) -> bytes: ...

    def close(self) -> None: ...


def open_decompressed(file: SourceFile, *, room: int | None = None) -> ByteReader:
    """Open a file for reading its text bytes from the front, within `room` bytes of memory."""
    raw = paths.open_binary(file.location)
    if file.compression is None:
        return cast("ByteReader", raw)
    if file.size == 0:
        raw.close()
        raise paths.unreadable(
            file.path, OSError(f"an empty file is not a complete {file.compression} file")
        )
    if file.compression == "xz":
        return cast("ByteReader", _XzReader(raw, path=file.path, room=room))
    if file.compression == "zst" and room is not None:
        window = _zstd_window(raw.read(_ZSTD_HEAD_BYTES))
        raw.seek(0)
        check_room(window, f"a zstd window of {format_size(window)}", path=file.path, room=room)
    import pyarrow as pa

    codec = _ARROW_CODECS[file.compression]
    return cast("ByteReader", pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec))


class _XzReader(io.RawIOBase):
    """Concatenated xz streams and the zero padding allowed between them."""

    def __init__(self, raw: BinaryIO, *, path: str, room: int | None) -> None:
        self._raw = raw
        self._path = path
        self._room = room
        self._decoder: lzma.LZMADecompressor | None = None
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while len(view):
            if self._decoder is None and not self._next_stream():
                return 0
            if data := self._decode(len(view)):
                view[: len(data)] = data
                return len(data)
        return 0

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _next_stream(self) -> bool:
        """Begin the next stream; False at the end of the file."""
        self._input = self._input.lstrip(b"\0")
        while not self._input:
            self._input = self._raw.read(_CHUNK_BYTES)
            if not self._input:
                return False
            self._input = self._input.lstrip(b"\0")
        if self._room is not None:
            needs = 0
            with contextlib.suppress(IndexError, ValueError):  # damage, which the decoder names
                needs = _xz_dictionary(self._input)
            what = f"an xz dictionary of {format_size(needs)}"
            check_room(needs + _XZ_BYTES, what, path=self._path, room=self._room)
        # A later block may have a larger one.
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=self._room)
        return True

    def _decode(self, size: int) -> bytes:
        assert self._decoder is not None
        if self._decoder.needs_input and not self._input:
            self._input = self._raw.read(_CHUNK_BYTES)
            if not self._input:
                raise OSError("Truncated compressed stream")
        try:
            data = self._decoder.decompress(self._input, size)
        except lzma.LZMAError as error:
            if self._room is not None and "limit exceeded" in str(error):
                what = "an xz dictionary that is larger than the first"
                check_room(2 * self._room, what, path=self._path, room=self._room)
            raise OSError(f"xz decompress failed: {error}") from error
        self._input = b""
        if self._decoder.eof:
            self._input, self._decoder = self._decoder.unused_data, None
        return data


def _xz_dictionary(head: bytes) -> int:
    """Size of the dictionary of the first block of an xz stream; 0 where there is none."""
    flags = head[13:14]
    if len(head) < 32 or not flags:
        return 0
    at = 14
    for bit in (0x40, 0x80):  # the sizes of the block, where it has them
        if flags[0] & bit:
            while head[at] & 0x80:
                at += 1
            at += 1
    for _ in range((flags[0] & 3) + 1):
        kind, size = head[at : at + 2]
        if kind == _LZMA2 and size == 1:
            bits = head[at + 2] & 63
            return (2 | bits & 1) << (bits // 2 + 11) if bits < 40 else (1 << 32) - 1
        at += 2 + size
    return 0


def _zstd_window(head: bytes) -> int:
    """Bytes that the first frame of a zstd file refers back to; 0 where there is none."""
    if len(head) < _ZSTD_HEAD_BYTES or head[:4] != b"\x28\xb5\x2f\xfd":
        return 0
    flags = head[4]
    if not flags & 0x20:
        base = 1 << (10 + (head[5] >> 3))
        return base + base // 8 * (head[5] & 7)
    size = 1 << (flags >> 6)
    at = 5 + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


def open_native(path: str) -> Any:
    """Open an uncompressed file for Arrow's own readers."""
    import pyarrow as pa

    found = paths.open_binary(path)
    if paths.is_remote(path):
        return pa.PythonFile(found, mode="r")
    found.close()  # it is a file: Arrow would wait for a pipe
    try:
        return pa.OSFile(path)
    except OSError as error:
        raise paths.unreadable(path, error) from error
