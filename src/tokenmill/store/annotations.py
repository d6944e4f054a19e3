"""Columns that were given to the documents of a store: a score, a language, a domain.

    annotations/<column>.column  =  head | values | sealed JSON

There is a value, or none, for each document of all splits, in the order of `split=None`. A column
knows what its store held, and is refused beside another: its values would be other documents'. It
is mapped; its checksum is looked at when it is first used.
"""

from __future__ import annotations

import re
import shlex
import struct
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.facts import Checksum, Count, Fact, contents_of, not_ours, read_fact
from tokenmill.store.format import map_file
from tokenmill.store.layout import checksum_of, replace_file, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.store.facts import Manifest
    from tokenmill.store.format import Ints
    from tokenmill.store.layout import StoreLayout

ANNOTATION_VERSION = 1
MAGIC = b"tokenmill column"
SUFFIX = ".column"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HEAD = struct.Struct("<16sQQ")  # and where the JSON begins, and its bytes
_TYPES = {"integer": "<i8", "number": "<f8", "flag": "u1"}


class Numbers(NamedTuple):
    """A column of numbers, or of flags as 0 and 1."""

    values: NDArray[Any]
    given: NDArray[np.bool_] | None = None  # which documents have one; None: all of them

    def of(self, documents: slice | Ints) -> Numbers:
        """The column of some of its documents."""
        given = None if self.given is None else self.given[documents]
        return Numbers(self.values[documents], given)

    @property
    def missing(self) -> int:
        return 0 if self.given is None else int(np.count_nonzero(~self.given))


class Labels(NamedTuple):
    """A column of texts: the different ones, and which of them each document has; -1 is none."""

    texts: tuple[str, ...]
    places: NDArray[np.integer]

    def of(self, documents: slice | Ints) -> Labels:
        """The column of some of its documents."""
        return Labels(self.texts, self.places[documents])

    @property
    def missing(self) -> int:
        return int(np.count_nonzero(self.places < 0))


Column: TypeAlias = "Numbers | Labels"


class AnnotationFacts(Fact, frozen=True, kw_only=True):
    """The JSON of a column."""

    name: str
    type: Literal["integer", "number", "flag", "text"]
    key: str  # what named the documents
    documents: Count
    missing: Count  # of those without a value
    values: Count  # different ones, of text; else 0
    contents: dict[str, Checksum]  # `Store.content` of each split
    data: Checksum  # of all before the JSON

    def to_bytes(self) -> bytes:
        return seal({"annotation_version": ANNOTATION_VERSION, **self.to_json()})


class Annotation:
    """A column of an open store."""

    def __init__(self, path: Path, facts: AnnotationFacts, data: NDArray[np.uint8]) -> None:
        self.path, self.facts, self._data = path, facts, data

    @cached_property
    def column(self) -> Column:
        """All of it, mapped; StoreError where it was changed."""
        facts, data = self.facts, self._data
        if checksum_of(data.data) != facts.data:
            raise StoreError(
                f"the annotation {str(self.path)!r} was changed: its checksum is not {facts.data}",
                hint="annotate the store again, or copy the file again",
            )
        body, count = data[_HEAD.size :], facts.documents
        if facts.type == "text":
            ends = body[: 8 * (facts.values + 1)].view("<i8")
            places = body[8 * len(ends) :][: 4 * count].view("<i4")
            text = body[8 * len(ends) + 4 * count :].tobytes()
            texts = [text[a:b].decode() for a, b in pairwise(ends.tolist())]
            return Labels(tuple(texts), places)
        kind = np.dtype(_TYPES[facts.type])
        numbers, bits = body[: kind.itemsize * count].view(kind), body[kind.itemsize * count :]
        given = np.unpackbits(bits, count=count).astype(np.bool_) if len(bits) else None
        return Numbers(numbers, given)


def write_annotation(
    layout: StoreLayout, manifest: Manifest, column: Column, *, name: str, key: str
) -> AnnotationFacts:
    """Put a column beside a store; one of the same name is replaced."""
    if isinstance(column, Numbers):
        kinds = {np.dtype(kind): name for name, kind in _TYPES.items()}
        type_: Any = kinds[column.values.dtype]
        parts = [np.ascontiguousarray(column.values)]
        if column.given is not None:
            parts.append(np.packbits(column.given))
    else:
        texts = [text.encode() for text in column.texts]
        ends = np.cumsum([0, *map(len, texts)], dtype="<i8")
        body = np.frombuffer(b"".join(texts), np.uint8)
        type_, parts = "text", [ends, column.places.astype("<i4"), body]
    begin = _HEAD.size + sum(part.nbytes for part in parts)

    def facts_of(checksum: str) -> AnnotationFacts:
        return AnnotationFacts(
            name=name,
            type=type_,
            key=key,
            documents=manifest.totals.documents,
            missing=column.missing,
            values=len(column.texts) if isinstance(column, Labels) else 0,
            contents=contents_of(manifest),
            data=checksum,
        )

    size = len(facts_of("0" * 32).to_bytes())
    data = b"".join([_HEAD.pack(MAGIC, begin, size), *(part.tobytes() for part in parts)])
    facts = facts_of(checksum_of(data))
    layout.annotations.mkdir(exist_ok=True)
    replace_file(layout, layout.annotations / f"{name}{SUFFIX}", data + facts.to_bytes())
    layout.remove_empty_tmp()
    return facts


def find_annotations(layout: StoreLayout) -> Iterator[Path]:
    """The files of a store's columns, in the order of their names."""
    if layout.annotations.is_dir():
        yield from sorted(layout.annotations.glob(f"*{SUFFIX}"))


def open_annotation(path: Path, manifest: Manifest) -> Annotation:
    """A column; StoreError where it is damaged, or of another state of the store."""
    found = read_annotation(path)
    if found.facts.contents != contents_of(manifest):
        store = shlex.quote(str(path.parent.parent))
        raise StoreError(
            f"the annotation {str(path)!r} was made of another state of its store: its values would"
            " be those of other documents",
            hint=f"make it again with: tokenmill annotate {store} TABLE --key ...",
        )
    return found


def read_annotation(path: Path) -> Annotation:
    """A column of whatever state of the store; StoreError where it is damaged."""
    data = map_file(path)
    begin = size = 0
    if len(data) >= _HEAD.size:
        magic, begin, size = _HEAD.unpack_from(data)
    if begin < _HEAD.size or magic != MAGIC or begin + size != len(data):
        raise StoreError(
            f"{str(path)!r} is no annotation, or cut off",
            hint="annotate the store again, or remove the file",
        )
    members = unseal(bytes(data[begin:]), path=path)
    version = members.pop("annotation_version", None)
    if type(version) is not int or version != ANNOTATION_VERSION:
        raise StoreError(
            f"{str(path)!r} is an annotation of version {version!r}; this tokenmill reads version"
            f" {ANNOTATION_VERSION}",
            hint="read it with a newer tokenmill: pip install --upgrade tokenmill",
        )
    try:
        facts = read_fact(members, AnnotationFacts, where="annotation")
        if path.name != f"{facts.name}{SUFFIX}":
            raise ValueError(f"it is the column {facts.name!r}")
    except ValueError as error:
        raise not_ours("annotation", path, error, hint="annotate the store again") from error
    return Annotation(path, facts, np.frombuffer(data, np.uint8)[:begin])
