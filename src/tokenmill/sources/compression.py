"""Compressed files as one stream of bytes, all members, frames and streams of them.

Sits between `paths` and the block reader. A file that ends too early or goes wrong in the middle is
an OSError, never a silent end: Python's own `bz2` and `lzma` file objects take a damaged second
stream for trailing garbage and drop it, so they are not used.

Discovery looks into files through this module, so it imports Arrow only when it needs it.
"""

from __future__ import annotations

import io
import lzma
from typing import TYPE_CHECKING, Any, Protocol, cast

from tokenmill import paths

if TYPE_CHECKING:
    from typing import BinaryIO

    from tokenmill.sources.base import SourceFile

SUFFIXES = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_ARROW_CODECS = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}
_CHUNK_BYTES = 1 << 18


class ByteReader(Protocol):
    """What the readers need of a file: the next bytes, into a buffer of theirs."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def read(self, size: int = -1, /) -> bytes: ...

    def close(self) -> None: ...


def open_decompressed(file: SourceFile) -> ByteReader:
    """Open a file for reading its text bytes from the front."""
    raw = paths.open_binary(file.location)
    if file.compression is None:
        return cast("ByteReader", raw)
    if file.size == 0:
        raw.close()
        raise paths.unreadable(
            file.path, OSError(f"an empty file is not a complete {file.compression} file")
        )
    if file.compression == "xz":
        return cast("ByteReader", _XzReader(raw))
    import pyarrow as pa

    codec = _ARROW_CODECS[file.compression]
    return cast("ByteReader", pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec))


class _XzReader(io.RawIOBase):
    """Concatenated xz streams and the zero padding allowed between them."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
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
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
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
            raise OSError(f"xz decompress failed: {error}") from error
        self._input = b""
        if self._decoder.eof:
            self._input, self._decoder = self._decoder.unused_data, None
        return data


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
