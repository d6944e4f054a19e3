"""Plans of packed rows: which pieces of a split's tokens are in which row, kept beside the store.

    layouts/<packing>-<seq_len>-<content>.plan  =  sealed header | items | first item of each row

A plan is derived data. It is named after the content it was made from, so the plan of an earlier
state of the store is never taken for this one; a damaged one is written anew. A store that cannot
be written keeps its plans in the user's cache folder. Opening one maps it and reads its header.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import StoreError
from tokenmill.files import cache_folder
from tokenmill.store.facts import Checksum, Count, Fact, not_ours, read_fact
from tokenmill.store.format import map_file, map_of
from tokenmill.store.layout import StoreLayout, seal, sync_folder, unseal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

    from tokenmill.store.facts import Checksum
    from tokenmill.store.format import Ints
    from tokenmill.store.reader import Store

PLAN_VERSION = 1
HEADER_BYTES = 4096
LENGTH_BITS = 21
MAX_ITEM_TOKENS = 2**LENGTH_BITS - 1
MAX_STREAM_TOKENS = 2 ** (64 - LENGTH_BITS)
PLAN_FILE = re.compile(r"[a-z]+(-[a-z]+)*-[0-9]+-[0-9a-f]{16}\.plan")
BLOCK_BYTES = 1 << 20
_OPEN_TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTally:
    """Where the tokens of a split go, as far as whoever plans must count it."""

    documents: int
    tokens: int
    used: int
    dropped: int
    repeated: int
    split_documents: int
    cut_documents: int
    targets: int


class PlanFacts(Fact, frozen=True, kw_only=True):
    """The header of a plan."""

    packing: str
    seq_len: Count
    capacity: Count  # tokens of a row
    content: Checksum  # `Store.content` of the split that it is for
    rows: Count
    items: Count
    documents: Count
    tokens: Count
    used: Count
    dropped: Count
    repeated: Count
    padding: Count
    split_documents: Count
    cut_documents: Count
    targets: Count
    arrays: Checksum  # of all bytes after the header

    def __post_init__(self) -> None:
        if self.capacity != self.seq_len + 1:
            raise ValueError(f"rows of {self.capacity} tokens are not for seq_len {self.seq_len}")
        if self.tokens != self.used + self.dropped:
            raise ValueError("tokens are not those used and those dropped")
        if self.rows * self.capacity != self.used + self.repeated + self.padding:
            raise ValueError("the places of the rows are not those of its tokens and its padding")

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + 8 * self.items + 8 * (self.rows + 1)

    def to_bytes(self) -> bytes:
        header = seal({"plan_version": PLAN_VERSION, **self.to_json()})
        assert len(header) <= HEADER_BYTES
        return header.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path) -> PlanFacts:
        """Read a header; StoreError says what is wrong with it."""
        members = unseal(data.rstrip(b"\0"), path=path)
        version = members.pop("plan_version", None)
        if version != PLAN_VERSION or type(version) is not int:
            raise PlanVersionError(f"{str(path)!r} is a plan of version {version!r}")
        try:
            return read_fact(members, cls, where="plan")
        except ValueError as error:
            raise not_ours("plan", path, error, hint=None) from error


class PlanVersionError(StoreError):
    """A plan has a version that this tokenmill does not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """What a plan is a function of."""

    packing: str
    seq_len: int
    content: Checksum

    @property
    def file_name(self) -> str:
        return f"{self.packing}-{self.seq_len}-{self.content[:16]}.plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """An open plan: read-only views of its mapped file."""

    path: Path
    facts: PlanFacts
    # Pieces of the stream, row by row: `unpack_items` tells position and length.
    items: NDArray[np.uint64]
    row_starts: Ints  # where the items of each row begin; one entry more than rows

    def require_whole(self) -> None:
        """StoreError if its file was cut off since it was mapped."""
        mapped = map_of(self.items)
        if mapped is not None:
            mapped.require_whole()


def pack_items(positions: Ints, lengths: NDArray[np.integer] | int) -> NDArray[np.uint64]:
    """Pieces of a stream, each in one number: 43 bits of position, 21 of length."""
    packed = positions << LENGTH_BITS
    packed |= lengths
    return packed.view(np.uint64)


def unpack_items(items: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Positions and lengths."""
    positions = (items >> np.uint64(LENGTH_BITS)).view(np.int64)
    return positions, (items & np.uint64(MAX_ITEM_TOKENS)).view(np.int64)


def open_plan(
    store: Store, key: PlanKey, *, make: Callable[[PlanWriter], PlanTally]
) -> PackingPlan:
    """The plan of a store, where there is a sound one; else `make` is called to write it.

    It is kept in the store's folder or the user's cache, unless the store says where: `keep_plans`.
    Several processes may do this at once: each writes the same bytes under a name of its own.
    """
    beside = store.files.plan_folder
    roots = [] if beside is None else [beside]
    with contextlib.suppress(RuntimeError):  # there is no home folder
        roots.append(cache_folder())
    own = [] if store.keep_plans is None else [store.keep_plans]
    for root in (*own, *roots):
        with contextlib.suppress(StoreError):
            return read_plan(StoreLayout(root).layouts / key.file_name, key=key)
    failures = []
    for root in own or roots:
        try:
            with PlanWriter(StoreLayout(root), key) as writer:
                path = writer.publish(make(writer))
            return read_plan(path, key=key)
        except OSError as error:
            failures.append(f"{str(root)!r}: {error.strerror or error}")
    raise StoreError(
        f"a plan of {key.packing} rows of {key.seq_len:,} tokens can be kept nowhere"
        f" ({'; '.join(failures)}), and every start would have to make it again",
        hint="set TOKENMILL_CACHE to a folder that can be written",
    )


def read_plan(path: Path, *, key: PlanKey) -> PackingPlan:
    """Map a plan and check all but its arrays; StoreError where it is not the one wanted."""
    data = map_file(path)
    facts = PlanFacts.from_bytes(data[:HEADER_BYTES], path=path)
    if (key.packing, key.seq_len, key.content) != (facts.packing, facts.seq_len, facts.content):
        raise StoreError(f"{str(path)!r} is a plan for something else")
    if len(data) != facts.file_bytes:
        raise StoreError(f"{str(path)!r} has {len(data):,} bytes instead of {facts.file_bytes:,}")
    items = np.frombuffer(data, "<u8", facts.items, HEADER_BYTES)
    row_starts = np.frombuffer(data, "<i8", facts.rows + 1, HEADER_BYTES + 8 * facts.items)
    return PackingPlan(path=path, facts=facts, items=items, row_starts=row_starts)


def check_plan(path: Path) -> PlanFacts:
    """Read a plan from end to end; StoreError says what is wrong with it."""
    digest, size = xxhash.xxh3_128(), HEADER_BYTES
    try:
        with path.open("rb") as file:
            facts = PlanFacts.from_bytes(file.read(HEADER_BYTES), path=path)
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    if size != facts.file_bytes:
        raise StoreError(f"{str(path)!r} has {size:,} bytes instead of {facts.file_bytes:,}")
    if digest.hexdigest() != facts.arrays:
        raise StoreError(f"{str(path)!r} was changed: its checksum is not {facts.arrays}")
    return facts


class PlanWriter:
    """Writes a plan row by row, under a temporary name; without `publish` nothing is left of it."""

    def __init__(self, layout: StoreLayout, key: PlanKey) -> None:
        self._layout = layout
        self._key = key
        self._staged = layout.tmp / f"{key.file_name}-{os.getpid()}-{secrets.token_hex(4)}"
        # How many items there will be is not known, so the rows wait in a file of their own.
        self._staged_rows = self._staged.with_name(f"{self._staged.name}-rows")
        self._digest = xxhash.xxh3_128()
        self._rows = 0
        self._items = 0
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            self._file = stack.enter_context(_create(self._staged))
            self._rows_file = stack.enter_context(_create(self._staged_rows))
            # A folder that cannot be made is better known now than after a minute of planning.
            layout.layouts.mkdir(exist_ok=True)
            self._file.seek(HEADER_BYTES)
            self._stack = stack.pop_all()

    def add(self, items: NDArray[np.uint64], *, row_starts: Ints) -> None:
        """Add whole rows: their items back to back, and where those of each row begin."""
        self._write(items.astype("<u8", copy=False).data.cast("B"))
        self._rows_file.write((row_starts + self._items).astype("<i8", copy=False).data)
        self._rows += len(row_starts)
        self._items += len(items)

    def publish(self, tally: PlanTally) -> Path:
        """Put the plan in place; returns where that is."""
        self._rows_file.write(np.array([self._items], "<i8").data)
        self._rows_file.seek(0)
        while block := self._rows_file.read(BLOCK_BYTES):
            self._write(block)
        capacity = self._key.seq_len + 1
        facts = PlanFacts(
            **asdict(self._key),
            capacity=capacity,
            rows=self._rows,
            items=self._items,
            padding=self._rows * capacity - tally.used - tally.repeated,
            arrays=self._digest.hexdigest(),
            **asdict(tally),
        )
        self._file.seek(0)
        self._file.write(facts.to_bytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        path = self._layout.layouts / self._key.file_name
        self._staged.replace(path)
        sync_folder(self._layout.layouts)
        sync_folder(self._layout.root)
        return path

    def _write(self, block: bytes | memoryview) -> None:
        self._digest.update(block)
        self._file.write(block)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._staged.unlink(missing_ok=True)
            self._staged_rows.unlink(missing_ok=True)
        self._layout.remove_empty_tmp()

    def __enter__(self) -> PlanWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _create(path: Path) -> BinaryIO:
    """A new file in tmp/; whoever finishes before us may remove that folder while it is empty."""
    for _ in range(_OPEN_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return path.open("x+b")
    raise FileNotFoundError(2, "the folder vanishes again and again", str(path.parent))
