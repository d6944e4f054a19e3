"""Sealed JSON: a JSON object whose last member is a checksum of the bytes before it.

    {
    "format_version":1,
    "counts":{"rows":3},
    "checksum":"0123456789abcdef0123456789abcdef"}

The checksum is xxh3-128 of the file's bytes from its first up to, not including, the quote that
opens `"checksum"`. Bytes are hashed as they lie, not as they parse: a changed blank breaks the seal
too, and another program can check it without a canonical form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from tokenmill.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_TAIL = re.compile(rb'"checksum":"([0-9a-f]{32})"\}\n')
_TAIL_BYTES = len(b'"checksum":""}\n') + 32


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum used throughout a store: xxh3-128 as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(members: Mapping[str, Json | Iterator[Json]]) -> bytes:
    """A sealed file: one member to a line, and the items of a list of objects or lists too.

    A list may be an iterator: of a million items, no more than one is then held beside the text.
    """
    body = bytearray(b"{\n")
    for name, value in members.items():
        body += f"{_dumps(name)}:".encode("ascii")
        _append(body, value)
        body += b",\n"
    return _with_tail(body)


def seal_line(members: Mapping[str, Json]) -> bytes:
    """A sealed object on one line, for logs."""
    line = "{" + "".join(f"{_dumps(name)}:{_dumps(value)}," for name, value in members.items())
    return _with_tail(bytearray(line.encode("ascii")))


def unseal(data: bytes, *, path: Path | str) -> dict[str, Json]:
    """The members without the checksum; StoreError if any bit differs from what was sealed."""
    body = memoryview(data)[:-_TAIL_BYTES]
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    if tail is None:
        raise _damaged(path, "does not end with its checksum: it is cut off, or was edited")
    sealed, found = tail.group(1).decode(), checksum_of(body)
    if sealed != found:
        raise _damaged(path, f"was changed: its checksum is {found}, not the {sealed} it says")
    try:
        members = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise _damaged(path, "is not a JSON object")
    del members["checksum"]
    return members


def _with_tail(body: bytearray) -> bytes:
    with memoryview(body) as view:
        checksum = checksum_of(view)
    body += f'"checksum":"{checksum}"}}\n'.encode("ascii")
    return bytes(body)


def _append(body: bytearray, value: Json | Iterator[Json]) -> None:
    if isinstance(value, list) and not (value and isinstance(value[0], (dict, list))):
        body += _dumps(value).encode("ascii")
    elif isinstance(value, (list, Iterator)):
        opening = b"[\n"
        for item in value:
            body += opening + _dumps(item).encode("ascii")
            opening = b",\n"
        body += b"[]" if opening == b"[\n" else b"\n]"
    else:
        body += _dumps(value).encode("ascii")


def _dumps(value: Json) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _damaged(path: Path | str, problem: str) -> StoreError:
    return StoreError(
        f"{str(path)!r} {problem}; nothing it says can be trusted",
        hint="restore the file, or run the build again with the same command",
    )
