"""Zip archives of members that are not compressed and whose sizes are known before their bytes.

So it is known where every byte will lie, and several threads can fill one file, each its own
stretches. What is known last are the checksums: those of stretches are joined, then the headers are
written into the gaps that were left for them.
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
