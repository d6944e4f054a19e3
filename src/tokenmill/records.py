"""The values that flow between the stages: text in, tokens out, and rows that could not be used.

Both batches have Arrow's layout of a variable-length column (flat values and n + 1 offsets), held
as numpy arrays, so that a stage hands buffers to the next one without making a Python object per
document.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Documents as UTF-8 back to back; document i is `data[offsets[i]:offsets[i + 1]]`."""

    data: NDArray[np.uint8]
    # n + 1 ascending positions in `data`; the first need not be 0, the last not its end.
    offsets: NDArray[np.int64]
    # A place in each document, in bytes, of which an engine may say how many ids are before it.
    marks: NDArray[np.int64] | None = None

    @classmethod
    def from_texts(cls, texts: Iterable[str | bytes]) -> TextBatch:
        """Join texts into one batch; raises UnicodeEncodeError for a lone surrogate."""
        encoded = [text.encode() if isinstance(text, str) else text for text in texts]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each document."""
        return np.diff(self.offsets)

    def bytes_at(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def text_at(self, index: int) -> str:
        return self.bytes_at(index).decode()

    def texts(self) -> list[str]:
        """All documents as Python strings: for engines that take nothing else."""
        first = int(self.offsets[0])
        joined = self.data[first : self.offsets[-1]].tobytes()
        bounds = (self.offsets - first).tolist()
        return [joined[a:b].decode() for a, b in itertools.pairwise(bounds)]

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> TextBatch:
        """The documents at `indices`, copied into a batch of their own."""
        chosen = np.asarray(indices, np.int64)
        begins, ends = self.offsets[chosen], self.offsets[chosen + 1]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(ends - begins, out=offsets[1:])
        data = self.data.data
        parts = [data[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
        return TextBatch(np.frombuffer(b"".join(parts), np.uint8), offsets)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Token ids of documents back to back; document i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: NDArray[np.uint32]
    # n + 1 ascending positions in `ids`; the first is 0, the last is its length.
    offsets: NDArray[np.int64]
    # For each id 1 if it counts for the loss, else 0; None where nobody says.
    mask: NDArray[np.uint8] | None = None
    # How many ids of each document are before its mark; -1 where that is not known.
    ids_before: NDArray[np.int64] | None = None

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[int] | NDArray[np.uint32]]) -> TokenBatch:
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(document) for document in documents], out=offsets[1:])
        ids = np.empty(offsets[-1], np.uint32)
        for i, document in enumerate(documents):
            ids[offsets[i] : offsets[i + 1]] = document
        return cls(ids, offsets)

    @classmethod
    def joined(cls, parts: Sequence[TokenBatch]) -> TokenBatch:
        """The documents of batches without masks, one after the other."""
        ids = [part.ids for part in parts] or [np.empty(0, np.uint32)]
        lengths = [part.lengths for part in parts] or [np.empty(0, np.int64)]
        offsets = np.append(0, np.cumsum(np.concatenate(lengths)))
        befores = [part.ids_before for part in parts if part.ids_before is not None]
        before = np.concatenate(befores) if parts and len(befores) == len(parts) else None
        return cls(np.concatenate(ids), offsets, ids_before=before)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[np.uint32]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> NDArray[np.uint32]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a batch of {len(self)}")
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)


def cut_ranges(offsets: NDArray[np.int64], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of documents with at most `most_bytes` each, or of one document."""
    first, count = 0, len(offsets) - 1
    while first < count:
        limit = int(offsets[first]) + most_bytes
        last = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
        yield first, last
        first = last


class RejectReason(enum.StrEnum):
    """Why a row was not used. The values are written into `rejects/`."""

    INVALID_JSON = "invalid-json"
    NOT_AN_OBJECT = "not-an-object"
    MISSING_FIELD = "missing-field"
    NULL_TEXT = "null-text"
    NOT_A_STRING = "not-a-string"
    INVALID_UTF8 = "invalid-utf8"
    LONE_SURROGATE = "lone-surrogate"
    TOO_LARGE = "too-large"
    SPECIAL_TOKEN = "special-token"
    CANNOT_ENCODE = "cannot-encode"
    MALFORMED_ROW = "malformed-row"
    BAD_CONVERSATION = "bad-conversation"
    UNKNOWN_ROLE = "unknown-role"
    NO_ASSISTANT_TURN = "no-assistant-turn"
    TEMPLATE_ERROR = "template-error"
    NOT_A_PREFIX = "not-a-prefix"
    TOO_LONG = "too-long"
    NOTHING_TO_TRAIN = "nothing-to-train-on"


def field_of(row: dict[str, Any], field: str) -> Any:
    """The value of a field, dots reaching into objects; KeyError where there is none.

    A key literally named "a.b" goes before b inside a, unless it is null. What would be inside
    null is null.
    """
    names = field.split(".")
    if len(names) == 1 or row.get(field) is not None or (field in row and names[0] not in row):
        return row[field]
    value: Any = row
    for name in names:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(field)
        value = value[name]
    return value


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


class Reject(NamedTuple):
    """A row that could not be used, and where it is."""

    row: int  # position among the rows of its unit, counted from 0
    reason: RejectReason
    # One line for a person: the parser's words, the size found, the field that is missing.
    detail: str
    offset: int | None = None  # byte position in the (decompressed) file, where the format has one
    size: int | None = None  # bytes of a row that is too large, and only of such a row
    # The file, and the row's number in it, where a unit holds many; None means the unit's own.
    path: str | None = None
    row_in_file: int | None = None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a unit: those with text, those rejected while reading, those left out."""

    # Text of the usable rows, in order. Empty strings are usable here; the build counts them.
    texts: TextBatch
    rows: NDArray[np.int64]  # position of each usable row among the rows of its unit
    rejects: tuple[Reject, ...]
    num_rows: int  # len(texts) + len(rejects) + len(left_out): every row is one of them
    num_bytes: int  # bytes of input (decompressed) that this batch consumed: for progress and rates
    # Size of the largest row that was within the limit, in what the limit counts: bytes of a JSON
    # line, of a record or of a text. A smaller limit would have rejected it.
    largest_row_bytes: int
    # Byte position of each usable row in the (decompressed) file, where the format has one; -1
    # where the format of one file among several has none.
    places: NDArray[np.int64] | None = None
    blank_lines: int = 0  # among the lines of the rows
    # Of a unit that holds many files: the first row of each that has rows here, and its path.
    files: tuple[tuple[int, str], ...] = ()
    # Rows that a condition leaves out, and those among them for which it is not false either.
    left_out: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    undecided: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def file_of(self, row: int) -> tuple[str | None, int | None]:
        """The file of a row, and the row's number in it, where a unit holds many."""
        if not self.files:
            return None, None
        first, path = self.files[bisect.bisect_right(self.files, row, key=itemgetter(0)) - 1]
        return path, row - first


# -------------------------------------------------------------------------------------------------
# A property that is computed once, without a lock.
#
# `functools.cached_property` took one until Python 3.12, the same for all objects of a class: it
# costs 3 microseconds, makes threads wait for each other, and hangs the child of a fork that
# happened while a thread held it. Two threads may compute a value twice here; one of the two is
# kept.

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (used as a decorator)
    """Computes a value when it is first asked for, and keeps it in the object."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | Self:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


# -------------------------------------------------------------------------------------------------
# Which split a document belongs to: a hash of its text, so that it never moves.
#
# The text itself is the identity: a document keeps its split when its file is renamed, cut
# otherwise or grows, and two equal documents are never in both training and
# validation.

VAL = "val"

_SEED = 0x746F6B656E6D696C  # 'tokenmil': fixed for ever, or documents would move


def in_validation(texts: TextBatch, fraction: float) -> NDArray[np.bool_]:
    """True for the documents of the split `val`."""
    threshold = int(fraction * 2**64)
    data = np.ascontiguousarray(texts.data).data
    bounds = texts.offsets.tolist()
    digest = xxhash.xxh3_64_intdigest
    chosen = (digest(data[a:b], _SEED) < threshold for a, b in itertools.pairwise(bounds))
    return np.fromiter(chosen, np.bool_, count=len(texts))
