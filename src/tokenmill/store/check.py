"""Looks at every byte of a store: checksums, seals, indexes, ids, and that it all adds up.

    manifest -> per unit, in threads: receipt, .bin, .idx, .mask, rejects -> manifest made anew
    and compared -> plans

Files are read in blocks, so memory does not grow with the store. Problems are collected, not
raised: a person who has a damaged store wants the list.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import StoreError
from tokenmill.store.facts import (
    FileFacts,
    FormatVersionError,
    Manifest,
    ManifestAssembler,
    Receipt,
    facts_of,
    read_manifest,
    read_receipt_bytes,
    unlisted_rejects,
)
from tokenmill.store.format import (
    BLOCK_DOCUMENTS,
    check_index,
    counted_by_document,
    map_file,
    read_index,
)
from tokenmill.store.layout import shard_name, unseal, visit_layout
from tokenmill.store.plans import PLAN_FILE, PlanVersionError, check_plan
from tokenmill.store.reader import content_fingerprint, expected_files, find_problems

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tokenmill.store.facts import ShardEntry, StoreIdentity, UnitEntry
    from tokenmill.store.layout import StoreLayout


# -------------------------------------------------------------------------------------------------
# Reads the files of one unit from end to end and says what is wrong with them.
#
# Runs in several threads at once: reading, hashing and the largest id of a block all let the
# others run.

BLOCK_BYTES = 1 << 20
LAST_LINE_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitScan:
    """What reading a unit gave."""

    unit: str
    receipt: Receipt | None
    """None where it is damaged."""
    file: FileFacts
    """Of the receipt, as it lies there."""
    problems: list[tuple[Path, str]]
    bytes: int
    """Read, or due to be."""


def scan_unit(layout: StoreLayout, unit: UnitEntry, *, identity: StoreIdentity) -> UnitScan:
    """Read the receipt, the shards and the rejects of a unit."""
    problems: list[tuple[Path, str]] = []
    receipt, file = _scan_receipt(layout, unit, problems)
    size = unit.receipt_bytes
    for entry in unit.shards:
        problems += _scan_shard(layout, unit, entry, receipt=receipt, identity=identity)
        size += entry.bin_bytes(identity.dtype) + entry.idx_bytes
        size += 0 if entry.mask is None else entry.tokens
    if unit.rejects is not None:
        path, size = layout.rejects_file(unit.name), size + unit.rejects.bytes
        problems += [(path, problem) for problem in _scan_rejects(path, unit, receipt)]
    return UnitScan(unit=unit.name, receipt=receipt, file=file, problems=problems, bytes=size)


def scan_file(
    path: Path, *, expected: FileFacts, on_block: Callable[[memoryview], None] | None = None
) -> Iterator[str]:
    """Problems of a file that should have these facts; `on_block` sees its bytes as they pass."""
    digest, size = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(min(BLOCK_BYTES, expected.bytes + 1)))
    try:
        with path.open("rb") as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                size += count
                if on_block is not None:
                    on_block(block[:count])
    except FileNotFoundError:
        yield "is missing"
        return
    except OSError as error:
        yield f"cannot be read: {error.strerror or error}"
        return
    if size != expected.bytes:
        yield f"has {size:,} bytes instead of {expected.bytes:,}"
    elif digest.hexdigest() != expected.checksum:
        yield f"was changed: its checksum is {digest.hexdigest()}, not {expected.checksum}"


def _scan_receipt(
    layout: StoreLayout, unit: UnitEntry, problems: list[tuple[Path, str]]
) -> tuple[Receipt | None, FileFacts]:
    path = layout.receipt(unit.name)
    expected = file = FileFacts(bytes=unit.receipt_bytes, checksum=unit.receipt)
    try:
        data = read_receipt_bytes(layout, unit.name)
        file = facts_of(data)
        receipt = Receipt.from_bytes(data, path=path)
    except StoreError as error:
        problems.append((path, error.message))
        return None, file
    if file != expected:
        problems.append((path, "is not the receipt that the manifest was made from"))
    return receipt, file


def _scan_shard(
    layout: StoreLayout,
    unit: UnitEntry,
    entry: ShardEntry,
    *,
    receipt: Receipt | None,
    identity: StoreIdentity,
) -> Iterator[tuple[Path, str]]:
    name = shard_name(unit.name, split=entry.split)
    if entry.mask is not None:
        mask_path = layout.shard_file(name, "mask")
        idx_path = layout.shard_file(name, "idx")
        yield from ((mask_path, problem) for problem in _scan_mask(mask_path, entry, idx_path))
    bin_path, idx_path = layout.shard_file(name, "bin"), layout.shard_file(name, "idx")
    ids = _LargestId(itemsize=identity.dtype.itemsize)
    bin_facts = FileFacts(bytes=entry.bin_bytes(identity.dtype), checksum=entry.bin)
    for problem in scan_file(bin_path, expected=bin_facts, on_block=ids.see):
        yield bin_path, problem
    if not bin_path.is_file():
        return
    if ids.largest >= identity.tokenizer.vocab_size:
        yield bin_path, f"holds an id over {identity.tokenizer.vocab_size - 1}"
    facts = [] if receipt is None else [s for s in receipt.shards if s.split == entry.split]
    for shard in facts:
        if ids.largest != shard.max_id:
            yield bin_path, f"has {ids.largest} as its largest id, its receipt says {shard.max_id}"
    idx_facts = FileFacts(bytes=entry.idx_bytes, checksum=entry.idx)
    for problem in scan_file(idx_path, expected=idx_facts):
        yield idx_path, problem
    if not idx_path.is_file():
        return
    for problem in _scan_index(idx_path, bin_bytes=bin_facts.bytes, identity=identity):
        yield idx_path, problem


def _scan_index(path: Path, *, bin_bytes: int, identity: StoreIdentity) -> Iterator[str]:
    try:
        index = read_index(path)
        check_index(index, path=path)
    except StoreError as error:
        yield error.message
        return
    if index.dtype != identity.dtype or index.bin_bytes != bin_bytes:
        yield f"is for {index.bin_bytes:,} bytes of {index.dtype.name}, not for its .bin"


def _scan_mask(path: Path, entry: ShardEntry, idx_path: Path) -> Iterator[str]:
    assert entry.mask is not None
    largest = 0

    def see(block: memoryview) -> None:
        nonlocal largest
        largest = max(largest, int(np.frombuffer(block, np.uint8).max(initial=0)))

    facts = FileFacts(bytes=entry.tokens, checksum=entry.mask)
    problems = list(scan_file(path, expected=facts, on_block=see))
    yield from problems
    if largest > 1:
        yield f"holds {largest}: a mask holds 0 and 1"
    elif not problems:
        yield from _scan_counted(path, entry, idx_path)


def _scan_counted(path: Path, entry: ShardEntry, idx_path: Path) -> Iterator[str]:
    """Whether a sound mask is of documents as the manifest says."""
    mask = np.frombuffer(map_file(path), np.uint8)
    try:
        lengths = read_index(idx_path).lengths
    except StoreError:
        return  # told by whoever reads the index
    if lengths.sum(dtype=np.int64) != len(mask):
        return
    counted = silent = first = 0
    for begin in range(0, len(lengths), BLOCK_DOCUMENTS):
        block = lengths[begin : begin + BLOCK_DOCUMENTS]
        last = first + int(block.sum(dtype=np.int64))
        counts = counted_by_document(mask[first:last], block)
        counted, silent = counted + int(counts.sum()), silent + int(np.count_nonzero(counts == 0))
        first = last
    if (counted, silent) != (entry.counted, entry.silent):
        yield (
            f"has {counted:,} tokens that count and {silent:,} silent documents, the manifest says"
            f" {entry.counted:,} and {entry.silent:,}"
        )


def _scan_rejects(path: Path, unit: UnitEntry, receipt: Receipt | None) -> Iterator[str]:
    assert unit.rejects is not None
    lines, end = 0, b""

    def see(block: memoryview) -> None:
        nonlocal lines, end
        lines += int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))
        end = (end + bytes(block[-LAST_LINE_BYTES:]))[-LAST_LINE_BYTES:]

    facts = FileFacts(bytes=unit.rejects.bytes, checksum=unit.rejects.checksum)
    yield from scan_file(path, expected=facts, on_block=see)
    try:
        more = unlisted_rejects(end.removesuffix(b"\n").rpartition(b"\n")[2])
    except ValueError as error:
        yield f"was changed: {error}"
        return
    unlisted = sum(more.values())
    listed = lines - bool(more)
    if listed + unlisted != unit.rejects.rows:
        counted = f" and counts {unlisted} more" if more else ""
        yield f"has {listed} lines{counted} instead of {unit.rejects.rows}"
    elif receipt is not None and unlisted != receipt.counts.unlisted:
        yield f"counts {unlisted} rows, its receipt says {receipt.counts.unlisted}"


class _LargestId:
    """The largest id of a `.bin` that passes in blocks; a negative one counts as very large."""

    def __init__(self, *, itemsize: int) -> None:
        self._dtype = np.dtype(f"<u{itemsize}")
        self.largest = 0

    def see(self, block: memoryview) -> None:
        whole = len(block) // self._dtype.itemsize
        if whole:
            self.largest = max(self.largest, int(np.frombuffer(block, self._dtype, whole).max()))


MAX_THREADS = 4
"""Enough to keep a disk busy; a few blocks of memory each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a file."""

    file: str
    """Relative to the store, with / between folders."""
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What a check found."""

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    """Files that are no part of the store: they do no harm."""
    files: int
    bytes: int

    @property
    def is_sound(self) -> bool:
        return not self.findings


def check_store(
    path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Check everything; `on_progress` gets bytes done and bytes in all, unit by unit.

    Of a store behind a URL, a few units at a time are brought to this machine. Raises StoreError
    only where there is no manifest, or one of another format version.
    """
    layout = visit_layout(path)
    try:
        return _check(layout, on_progress)
    finally:
        layout.upstream.close()


def _check(layout: StoreLayout, on_progress: Callable[[int, int], None] | None) -> CheckReport:
    layout.upstream.bring([layout.manifest, layout.runs])
    if layout.upstream.url is not None and not layout.manifest.exists():
        raise StoreError(
            f"there is no store at {layout.name!r}: it has no tokenmill.json",
            hint="check the address; a store has this file once its build has finished",
        )
    try:
        manifest = read_manifest(layout.root)
    except FormatVersionError:
        raise
    except StoreError as error:
        if not layout.manifest.exists():
            raise
        finding = Finding("tokenmill.json", error.message)
        return CheckReport(findings=(finding,), notes=(), files=1, bytes=0)
    return _Check(layout, manifest).run(on_progress)


class _Check:
    def __init__(self, layout: StoreLayout, manifest: Manifest) -> None:
        self._layout = layout
        self._manifest = manifest
        self._expected = expected_files(layout, manifest)
        self._plans = sorted(p for p in _listed(layout.layouts) if PLAN_FILE.fullmatch(p.name))
        self._findings: list[Finding] = []
        self._notes: list[Finding] = []

    def run(self, on_progress: Callable[[int, int], None] | None) -> CheckReport:
        total = sum(sum(sizes.values()) for sizes in self._expected.values())
        self._check_tokenizer()
        for done in self._check_units():
            if on_progress is not None:
                on_progress(done, total)
        self._check_runs()
        self._check_plans()
        others = [self._layout.manifest, *self._plans]
        return CheckReport(
            findings=tuple(dict.fromkeys(self._findings)),
            notes=(*self._notes, *self._strays()),
            files=len(others) + sum(map(len, self._expected.values())),
            bytes=total + sum(path.stat().st_size for path in others),
        )

    def _find(self, path: Path, problem: str) -> None:
        self._findings.append(self._finding(path, problem))

    def _finding(self, path: Path, problem: str) -> Finding:
        layout = self._layout
        shown = problem.replace(str(layout.root), layout.name)
        return Finding(path.relative_to(layout.root).as_posix(), shown)

    def _check_tokenizer(self) -> None:
        files = self._manifest.identity.tokenizer.files
        self._layout.upstream.bring([self._layout.tokenizer / name for name in files])
        for name, facts in files.items():
            path = self._layout.tokenizer / name
            for problem in scan_file(path, expected=facts):
                self._find(path, problem)

    def _check_units(self) -> Iterator[int]:
        """Yields the bytes done so far."""
        if self._layout.upstream.url is None:  # else nothing is here yet; the scan finds it too
            for path, problem in find_problems(self._layout, self._manifest):
                self._find(path, problem)
        assembler = ManifestAssembler(self._manifest.identity)
        tokenizer = self._manifest.identity.tokenizer
        complete, done = True, sum(facts.bytes for facts in tokenizer.files.values())
        for scan in self._scan_units():
            for path, problem in scan.problems:
                self._find(path, problem)
            complete = complete and self._assemble(assembler, scan)
            done += scan.bytes
            yield done
        if complete:
            try:
                self._compare(assembler.manifest())
            except StoreError as error:
                self._find(self._layout.manifest, error.message)

    def _scan_units(self) -> Iterator[UnitScan]:
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            yield from pool.map(self._scan_unit, self._manifest.units)

    def _scan_unit(self, unit: UnitEntry) -> UnitScan:
        layout, names = self._layout, [shard_name(unit.name, split=s.split) for s in unit.shards]
        kinds = ("bin", "idx", "mask") if self._manifest.identity.mask else ("bin", "idx")
        files = [layout.shard_file(name, kind) for name in names for kind in kinds]
        rejects = [] if unit.rejects is None else [layout.rejects_file(unit.name)]
        with layout.upstream.borrow([layout.receipt(unit.name), *files, *rejects]):
            return scan_unit(layout, unit, identity=self._manifest.identity)

    def _assemble(self, assembler: ManifestAssembler, scan: UnitScan) -> bool:
        if scan.receipt is None:
            return False
        try:
            assembler.add(scan.receipt, file=scan.file)
        except StoreError as error:
            self._find(self._layout.receipt(scan.unit), f"does not fit the manifest: {error}")
            return False
        return True

    def _compare(self, assembled: Manifest) -> None:
        for member in ("totals", "splits", "engines", "sources", "units"):
            if getattr(assembled, member) != getattr(self._manifest, member):
                self._find(self._layout.manifest, f"{member} are not what the receipts say")

    def _check_runs(self) -> None:
        path = self._layout.runs
        if not path.exists():
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    unseal(line, path=path)
                except StoreError:
                    self._find(path, f"line {number} was changed")

    def _check_plans(self) -> None:
        """Plans can be made again, but one that was changed would be trained on."""
        splits = (None, *self._manifest.splits)
        contents = {content_fingerprint(self._manifest, split=split) for split in splits}
        for path in self._plans:
            try:
                is_current = check_plan(path).content in contents
            except PlanVersionError:
                self._note(path, "is of another version of tokenmill; can be deleted")
            except StoreError as error:
                self._find(path, f"{error.message}; delete it: it is made again when needed")
            else:
                if not is_current:
                    self._note(path, "is for an earlier state of this store; can be deleted")

    def _note(self, path: Path, problem: str) -> None:
        self._notes.append(self._finding(path, problem))

    def _strays(self) -> Iterator[Finding]:
        layout = self._layout
        folders = {layout.tmp, layout.layouts, *self._expected}
        known = {layout.manifest, layout.runs, *layout.locks, *folders, *self._plans}
        for folder, names in self._expected.items():
            known |= {folder / name for name in names}
        for folder in (layout.root, *sorted(folders)):
            for path in sorted(_listed(folder)):
                if path not in known:
                    yield self._finding(path, "is no part of the store")


def _listed(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []
