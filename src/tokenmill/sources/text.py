"""Plain text: whole files as documents, or documents between separators.

Files that are one document each come in groups (see `groups`), because a unit per small file would
cost more than its text. A separator that cannot overlap itself is found from anywhere, so such
files are cut by byte range; any other separator is looked for from the front, as a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from tokenmill import files as files_module
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch
from tokenmill.sources.base import MEGABYTE, Unit, UnitEnd, check_unchanged, open_decompressed
from tokenmill.sources.columns import rows_of, too_large, utf8_error
from tokenmill.sources.lines import record_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import SourceFile, SourceOptions
    from tokenmill.sources.lines import LineBlock

BOM = b"\xef\xbb\xbf"


def _separator(options: SourceOptions) -> bytes:
    assert options.separator, "text without a separator comes in text-group files"
    return options.separator.encode()


class TextParser:
    """Rows of blocks of separated text."""

    def __init__(self, options: SourceOptions) -> None:
        self.separator = _separator(options)
        self._limit = record_limit(options)

    def rows(self, block: LineBlock, *, first_row: int) -> tuple[RowBatch, int]:
        """Rows of the block; each is a record."""
        pieces = self._split(block)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        starts = np.zeros(len(pieces), np.int64)
        np.cumsum(lengths[:-1] + len(self.separator), out=starts[1:])
        if block.offset == 0 and len(pieces[0]) <= self._limit:
            pieces[0] = pieces[0].removeprefix(BOM)
        batch = rows_of(
            pa.array(pieces, pa.large_binary()),
            first_row=first_row,
            num_bytes=block.num_bytes,
            max_document_bytes=self._limit,
            offsets=starts + block.offset,
            sizes=lengths,
        )
        return batch, len(pieces)

    def count(self, block: LineBlock) -> int:
        """Records of the block."""
        return len(self._split(block))

    def _split(self, block: LineBlock) -> list[bytes]:
        pieces = bytes(block.data).split(self.separator)
        return pieces if pieces[-1] else pieces[:-1]


class TextGroupSource:
    """A group of text files; the only unit is all of them."""

    read_seconds = 0.0

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        self._members = file.members
        self._batch_bytes = options.batch_bytes
        self._limit = options.max_document_bytes
        self._room = options.room_bytes
        self._end: UnitEnd | None = None

    def read(self, unit: Unit) -> Iterator[RowBatch]:  # noqa: ARG002
        """One row for each file."""
        self._end = None
        digest = xxhash.xxh3_128()
        pending = _Pending()
        for row, member in enumerate(self._members):
            content, size, file_digest = _read_file(member, limit=self._limit, room=self._room)
            digest.update(_member_key(member, file_digest))
            pending.add(row, member, content, size, limit=self._limit)
            if pending.num_bytes >= self._batch_bytes:
                yield pending.batch()
                pending = _Pending()
        if pending.num_rows:
            yield pending.batch()
        count = len(self._members)
        self._end = UnitEnd(digest=digest.hexdigest(), num_lines=count, is_last=True)

    def end(self) -> UnitEnd:
        """Facts about the group, once read."""
        assert self._end is not None, "end() before the unit's rows were all read"
        return self._end

    def exists(self, unit: Unit) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def count_rows(self, unit: Unit) -> int:  # noqa: ARG002
        """As many as files."""
        return len(self._members)

    def digest(self, unit: Unit) -> str:  # noqa: ARG002
        """The group's digest alone."""
        digest = xxhash.xxh3_128()
        for member in self._members:
            digest.update(_member_key(member, _read_file(member, limit=0, room=self._room)[2]))
        return digest.hexdigest()

    def close(self) -> None:
        """Files are open only while they are read."""


class _Pending:
    """Rows of a batch in the making."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._rows: list[int] = []
        self._rejects: list[Reject] = []
        self.num_bytes = 0
        self._largest = 0

    @property
    def num_rows(self) -> int:
        return len(self._texts) + len(self._rejects)

    def add(
        self, row: int, member: SourceFile, content: bytes | None, size: int, *, limit: int
    ) -> None:
        self.num_bytes += size
        if content is None:
            detail = too_large(size, limit)
            self._rejects.append(
                Reject(row, RejectReason.TOO_LARGE, detail, size=size, path=member.path)
            )
            return
        self._largest = max(self._largest, size)
        if why := utf8_error(content):
            self._rejects.append(Reject(row, RejectReason.INVALID_UTF8, why, path=member.path))
        else:
            self._texts.append(content.removeprefix(BOM))
            self._rows.append(row)

    def batch(self) -> RowBatch:
        return RowBatch(
            TextBatch.from_texts(self._texts),
            np.array(self._rows, np.int64),
            tuple(self._rejects),
            num_rows=self.num_rows,
            num_bytes=self.num_bytes,
            largest_row_bytes=self._largest,
        )


def _member_key(member: SourceFile, digest: bytes) -> bytes:
    # The path counts too: it is written into rejects and tells where a document came from.
    return member.path.encode(errors="surrogateescape") + b"\0" + digest


def _read_file(member: SourceFile, *, limit: int, room: int) -> tuple[bytes | None, int, bytes]:
    """Text of the file (None above the limit), its size and its digest."""
    hasher = xxhash.xxh3_128()
    chunks: list[bytes] = []
    size = 0
    step = min(member.size + 1, MEGABYTE) if member.compression is None else MEGABYTE
    reader = open_decompressed(member, room=room)
    try:
        while chunk := reader.read(step):
            size += len(chunk)
            hasher.update(chunk)
            if size <= limit:
                chunks.append(chunk)
            else:
                chunks.clear()
    except (OSError, EOFError) as error:
        raise files_module.unreadable(member.path, error) from error
    finally:
        reader.close()
    check_unchanged(member)
    return b"".join(chunks) if size <= limit else None, size, hasher.digest()
