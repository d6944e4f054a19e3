"""Members of a JSON object, taken with their types checked.

Receipts and manifests are read through this: a member that is missing, of another type or unknown
is an error, never a default. Errors are ValueErrors here; whoever knows the file's name turns them
into StoreErrors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from types import NoneType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from tokenmill.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from _typeshed import DataclassInstance

    from tokenmill.store.sealed import Json

FORMAT_VERSION = 1
MASK_VERSION = 2
"""Of files that speak of masks; all others stay what an older tokenmill reads."""
PIECES_VERSION = 3
"""Of files that speak of rows in several pieces."""
UNLISTED_VERSION = 4
"""Of files that speak of rejected rows that are counted and not listed."""
_BRIEF_CHARACTERS = 200
_CHECKSUM = re.compile(r"[0-9a-f]{32}")

Checksum: TypeAlias = str
"""32 hexadecimal digits of xxh3-128; a field annotated so has its form checked by `into`."""

_Flat = TypeVar("_Flat", bound="DataclassInstance")


def brief(value: object) -> str:
    """A value for a message: cut where it is long, since someone may have made it so."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, too deep
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _BRIEF_CHARACTERS else f"{text[:_BRIEF_CHARACTERS]}..."


class FormatVersionError(StoreError):
    """A file of the store has a format version that this tokenmill does not read."""


class Fields:
    """One JSON object; each `take` removes a member, `finish` complains about those left."""

    __slots__ = ("_left", "_where")

    def __init__(self, value: Json, *, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {brief(value)}, not an object")
        self._left = dict(value)
        self._where = where

    def take(self, name: str) -> Json:
        try:
            return self._left.pop(name)
        except KeyError:
            raise ValueError(f"{self._where} has no member {name!r}") from None

    def has(self, name: str) -> bool:
        """Whether the member is there."""
        return name in self._left

    def integer(self, name: str) -> int:
        """A whole number of 0 or more: a store counts, and counts nothing below 0."""
        value = self.take(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, value, "a number of 0 or more")
        return value

    def optional_integer(self, name: str) -> int | None:
        if self._left.get(name, 0) is not None:
            return self.integer(name)
        self.take(name)
        return None

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, value, "a string or null")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, values, "a list of strings")
        return tuple(value for value in values if isinstance(value, str))

    def checksum(self, name: str) -> str:
        value = self.text(name)
        if not _CHECKSUM.fullmatch(value):
            raise self._wrong(name, value, "32 hexadecimal digits")
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def items(self, name: str) -> list[Json]:
        value = self.take(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.items(name)
        if not all(type(value) is int for value in values):
            raise self._wrong(name, values, "a list of numbers")
        return tuple(value for value in values if isinstance(value, int))

    def mapping(self, name: str) -> dict[str, Json]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def child(self, name: str) -> Fields:
        return Fields(self.take(name), where=f"{self._where}.{name}")

    def optional_child(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else Fields(value, where=f"{self._where}.{name}")

    def children(self, name: str) -> Iterator[Fields]:
        for number, item in enumerate(self.items(name)):
            yield Fields(item, where=f"{self._where}.{name}[{number}]")

    def into(self, cls: type[_Flat]) -> _Flat:
        """All members as a flat dataclass, each read as its field is annotated."""
        values: dict[str, Json | tuple[Json, ...]] = {}
        left = self._left
        for name, types, kind in _readers(cls):
            value = left.get(name)
            # There may be a million receipts to read, so what is plainly right is taken at once.
            if type(value) in types and (type(value) is not int or value >= 0) and name in left:
                values[name] = left.pop(name)
            else:
                values[name] = getattr(self, kind)(name)
        self.finish()
        return cls(**values)

    def finish(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left))[:_BRIEF_CHARACTERS]
            raise ValueError(f"{self._where} has unknown members: {names}")

    def _wrong(self, name: str, value: Json, expected: str) -> ValueError:
        return ValueError(f"{self._where}.{name} is {brief(value)}, not {expected}")


_READERS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "integer"),
    "int | None": ((int, NoneType), "optional_integer"),
    "str": ((str,), "text"),
    "bool": ((bool,), "boolean"),
    "Checksum": ((), "checksum"),
    "tuple[str, ...]": ((), "texts"),
}
"""Annotation -> types that need no second look, and the method that takes it with one."""


@functools.cache
def _readers(cls: type[DataclassInstance]) -> list[tuple[str, tuple[type, ...], str]]:
    # Annotations are strings here (postponed evaluation), so the alias Checksum is still visible.
    return [(field.name, *_READERS[str(field.type)]) for field in dataclasses.fields(cls)]


def version_of(*, masks: bool, pieces: bool, unlisted: bool) -> int:
    """The format version of a file: the lowest that can say what it has to say."""
    if unlisted:
        return UNLISTED_VERSION
    if pieces:
        return PIECES_VERSION
    return MASK_VERSION if masks else FORMAT_VERSION


def check_version(members: Mapping[str, Json], *, path: Path | str) -> None:
    """Raise FormatVersionError, which names the tokenmill to use, unless we read the version."""
    version = members.get("format_version")
    if type(version) is int and FORMAT_VERSION <= version <= UNLISTED_VERSION:
        return
    writer = members.get("created_by")
    newer = type(version) is int and version > UNLISTED_VERSION
    raise FormatVersionError(
        f"{str(path)!r} has the format version {brief(version)}"
        + (f", written by {brief(writer)}" if isinstance(writer, str) else "")
        + f"; this tokenmill reads the versions {FORMAT_VERSION} to {UNLISTED_VERSION}",
        hint="read it with a newer tokenmill: pip install --upgrade tokenmill"
        if newer
        else "build the store again with this tokenmill",
    )
