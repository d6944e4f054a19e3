"""Looks at every byte of a store: checksums, seals, indexes, ids, and that it all adds up.

    manifest -> per unit, in threads: receipt, .bin, .idx, .mask, rejects -> manifest made anew
    and compared -> plans

Files are read in blocks, so memory does not grow with the store. Problems are collected, not
raised: a person who has a damaged store wants the list.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import StoreError
from tokenmill.files import local_path
from tokenmill.store.annotations import find_annotations, read_annotation
from tokenmill.store.facts import (
    FileFacts,
    FormatVersionError,
    Manifest,
    ManifestAssembler,
    Receipt,
    UnknownFacts,
    content_fingerprint,
    contents_of,
    facts_of,
    read_forgotten,
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
from tokenmill.store.layout import no_store, shard_name, unseal, visit_layout
from tokenmill.store.plans import PLAN_FILE, PlanVersionError, check_plan
from tokenmill.store.reader import expected_sizes, find_problems
from tokenmill.store.snapshots import list_snapshots, open_snapshot
from tokenmill.store.views import base_of, open_view, read_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tokenmill.files import PathInput
    from tokenmill.store.facts import (
        ForgottenStep,
        RejectsEntry,
        ShardEntry,
        StoreIdentity,
        UnitEntry,
    )
    from tokenmill.store.layout import StoreLayout

    _See = Callable[[memoryview], None]

BLOCK_BYTES = 1 << 20
LAST_LINE_BYTES = 1 << 14
MAX_THREADS = 4  # enough to keep a disk busy; a few blocks of memory each


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a file."""

    file: str  # relative to the store, with / between folders
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What a check found."""

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]  # files that are no part of the store: they do no harm
    files: int
    bytes: int
    manifest: Manifest | None = None  # None where it cannot be read

    @property
    def is_sound(self) -> bool:
        return not self.findings


def check_store(
    path: PathInput, *, on_progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Check everything; `on_progress` gets bytes done and bytes in all, unit by unit.

    Of a store at a URL, a few units at a time are downloaded to this machine. Raises StoreError
    only where there is no manifest, or one of another format version.
    """
    root = local_path(path)
    if root is not None and root.is_file():
        return _check_view(root.absolute(), on_progress)
    layout = visit_layout(path)
    with contextlib.closing(layout.upstream):
        layout.upstream.download([layout.manifest, layout.runs])
        if layout.upstream.url is not None and not layout.manifest.exists():
            raise no_store(layout.name)
        try:
            manifest = read_manifest(layout.root)
        except FormatVersionError:
            raise
        except StoreError as error:
            if not layout.manifest.exists():
                raise
            finding = Finding("tokenmill.json", error.message)
            return CheckReport(findings=(finding,), notes=(), files=1, bytes=0)
        return _Check(layout, manifest).run(on_progress or (lambda *_: None))


def _check_view(path: Path, on_progress: Callable[[int, int], None] | None) -> CheckReport:
    """A view and its store; StoreError where the file is no view."""
    base, size = base_of(read_facts(path.read_bytes(), path=path), path=path), path.stat().st_size
    try:
        files = open_view(path, cache=None, cache_bytes=None)
        findings = [Finding(path.name, problem) for problem in files.problems()]
        manifest = files.read_manifest()
    except StoreError as error:
        finding = Finding(path.name, error.message)
        return CheckReport(findings=(finding,), notes=(), files=1, bytes=size)
    checked = check_store(base, on_progress=on_progress)
    return replace(
        checked,
        findings=(*findings, *checked.findings),
        files=checked.files + 1,
        bytes=checked.bytes + size,
        manifest=manifest,
    )


class _Check:
    def __init__(self, layout: StoreLayout, manifest: Manifest) -> None:
        self._layout = layout
        self._manifest = manifest
        self._expected = {layout.root / k: v for k, v in expected_sizes(manifest).items()}
        self._plans = sorted(p for p in _listed(layout.layouts) if PLAN_FILE.fullmatch(p.name))
        self._findings: list[Finding] = []
        self._notes: list[Finding] = []
        self._snapshots: set[Path] = set()  # files that only earlier states of the store need

    def run(self, on_progress: Callable[[int, int], None]) -> CheckReport:
        total = sum(sum(sizes.values()) for sizes in self._expected.values())
        done = self._check_tokenizer()
        if self._layout.upstream.url is None:  # else nothing is here yet; the scan finds it too
            for path, problem in find_problems(self._layout, self._manifest):
                self._find(path, problem)
        forgotten = self._check_forgotten()
        assembler = ManifestAssembler(self._manifest.identity, forgotten=forgotten)
        complete = True
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            scans = pool.map(self._scan_unit, self._manifest.units)
            for unit, scan in zip(self._manifest.units, scans, strict=True):
                complete = self._add(assembler, unit, scan) and complete
                done += scan.bytes
                on_progress(done, total)
        if complete:
            self._compare(assembler)
        self._check_runs()
        self._check_plans()
        self._check_snapshots()
        self._check_annotations()
        others = [self._layout.manifest, *self._plans]
        self._note_strays()
        return CheckReport(
            findings=tuple(dict.fromkeys(self._findings)),
            notes=tuple(self._notes),
            files=len(others) + sum(map(len, self._expected.values())),
            bytes=total + sum(path.stat().st_size for path in others),
            manifest=self._manifest,
        )

    def _find(self, path: Path, problem: str, *, note: bool = False) -> None:
        layout = self._layout
        shown = problem.replace(str(layout.root), layout.name)
        finding = Finding(path.relative_to(layout.root).as_posix(), shown)
        (self._notes if note else self._findings).append(finding)

    def _check_tokenizer(self) -> int:
        """Returns the bytes that were read."""
        files = self._manifest.identity.tokenizer.files
        self._layout.upstream.download([self._layout.tokenizer / name for name in files])
        for name, facts in files.items():
            path = self._layout.tokenizer / name
            for problem in scan_file(path, expected=facts):
                self._find(path, problem)
        return sum(facts.bytes for facts in files.values())

    def _scan_unit(self, unit: UnitEntry) -> UnitScan:
        layout, names = self._layout, [shard_name(unit.name, split=s.split) for s in unit.shards]
        kinds = ("bin", "idx", "mask") if self._manifest.identity.mask else ("bin", "idx")
        files = [layout.shard_file(name, kind) for name in names for kind in kinds]
        rejects = [] if unit.rejects is None else [layout.rejects_file(unit.name)]
        with layout.upstream.borrow([layout.receipt(unit.name), *files, *rejects]):
            return UnitScan(layout, unit, self._manifest.identity)

    def _add(self, assembler: ManifestAssembler, unit: UnitEntry, scan: UnitScan) -> bool:
        """Whether the manifest can still be made anew."""
        for path, problem in scan.problems:
            self._find(path, problem)
        if scan.receipt is None:
            return False
        try:
            assembler.add(scan.receipt, file=scan.file)
        except StoreError as error:
            self._find(self._layout.receipt(unit.name), f"does not fit the manifest: {error}")
            return False
        return True

    def _compare(self, assembler: ManifestAssembler) -> None:
        try:
            assembled = assembler.manifest()
        except StoreError as error:
            self._find(self._layout.manifest, error.message)
            return
        members = ("totals", "unknown", "splits", "engines", "sources", "units", "forgotten")
        for member in members:
            if getattr(assembled, member) != getattr(self._manifest, member):
                are = "is" if member == "unknown" else "are"
                self._find(self._layout.manifest, f"{member} {are} not what the receipts say")

    def _check_forgotten(self) -> tuple[ForgottenStep, ...]:
        """What was taken out, by the list that keeps builds from bringing it back."""
        layout, path = self._layout, self._layout.forgotten
        layout.upstream.download([path])
        try:
            found = read_forgotten(layout)
        except StoreError as error:
            self._find(path, error.message)
            return self._manifest.forgotten
        if found is None:
            if self._manifest.forgotten:
                self._find(path, "is missing: a build would make again what was forgotten")
            return self._manifest.forgotten
        if found.pending is not None:
            self._find(
                path, "says that documents are being forgotten: end it with tokenmill forget"
            )
            return self._manifest.forgotten
        if sum(each.num_rows for each in found.units) < self._manifest.totals.forgotten:
            self._find(path, "has fewer rows than were forgotten")
        return found.steps

    def _check_runs(self) -> None:
        path = self._layout.runs
        if path.exists():
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
                if check_plan(path).content not in contents:
                    what = "is for an earlier state of this store, or a view; can be deleted"
                    self._find(path, what, note=True)
            except PlanVersionError:
                what = "is of another version of tokenmill; can be deleted"
                self._find(path, what, note=True)
            except StoreError as error:
                self._find(path, f"{error.message}; delete it: it is made again when needed")

    def _check_snapshots(self) -> None:
        """Whether what the store was can be read: of it, only what is in retired/ is scanned."""
        layout = self._layout
        if layout.upstream.url is not None:
            return
        for snapshot in list_snapshots(layout):
            self._snapshots.add(layout.snapshots / f"{snapshot.name}.json")
            try:
                manifest, moved = open_snapshot(layout, snapshot.name)
            except StoreError as error:
                self._find(layout.snapshots / f"{snapshot.name}.json", error.message)
                continue
            for path, problem in find_problems(layout, manifest, moved):
                self._find(path, f"{problem}; the snapshot {snapshot.name} needs it")
            for path, facts in _retired_files(layout, manifest, moved):
                if path not in self._snapshots:
                    self._snapshots.add(path)
                    for problem in scan_file(path, expected=facts):
                        self._find(path, problem)

    def _check_annotations(self) -> None:
        for path in find_annotations(self._layout):
            try:
                found = read_annotation(path)
                assert found.column is not None
                if found.facts.contents != contents_of(self._manifest):
                    self._find(path, "is for an earlier state of this store", note=True)
            except StoreError as error:
                self._find(path, error.message)

    def _note_strays(self) -> None:
        layout = self._layout
        folders = {layout.tmp, layout.layouts, layout.snapshots, layout.retired, *self._expected}
        folders.add(layout.annotations)
        known = self._snapshots | {
            layout.manifest,
            layout.forgotten,
            layout.forgetting,
            layout.runs,
            *layout.locks,
            *folders,
            *self._plans,
            *find_annotations(layout),
        }
        for folder, names in self._expected.items():
            known |= {folder / name for name in names}
        for folder in (layout.root, *sorted(folders)):
            for path in sorted(_listed(folder)):
                if path not in known:
                    self._find(path, "is no part of the store", note=True)


def _retired_files(
    layout: StoreLayout, manifest: Manifest, moved: Mapping[str, str]
) -> Iterator[tuple[Path, FileFacts]]:
    """The files of a snapshot that are in retired/."""
    dtype = manifest.identity.dtype
    for unit in manifest.units:
        if unit.name not in moved:
            continue
        own = layout.retired / f"{moved[unit.name]}{unit.name}.json"
        yield own, FileFacts(bytes=unit.receipt_bytes, checksum=unit.receipt)
        if unit.rejects is not None:
            _, size, checksum = unit.rejects
            yield own.with_suffix(".jsonl"), FileFacts(bytes=size, checksum=checksum)
        for shard in unit.shards:
            path = own.with_name(moved[unit.name] + shard_name(unit.name, split=shard.split))
            sizes = (shard.bin_bytes(dtype), shard.idx_bytes, shard.tokens)
            for kind, size in zip(("bin", "idx", "mask"), sizes, strict=True):
                if (checksum := getattr(shard, kind)) is not None:
                    facts = FileFacts(bytes=size, checksum=checksum)
                    yield path.with_name(f"{path.name}.{kind}"), facts


def _listed(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []


# -------------------------------------------------------------------------------------------------
# The files of one unit, read from end to end in several threads at once: reading, hashing and the
# largest id of a block all let the others run.


class UnitScan:
    """What reading the receipt, the shards and the rejects of a unit gave."""

    def __init__(self, layout: StoreLayout, unit: UnitEntry, identity: StoreIdentity) -> None:
        self._layout = layout
        self._unit = unit
        self._identity = identity
        self.problems: list[tuple[Path, str]] = []
        self.bytes = unit.receipt_bytes  # read, or due to be
        self.receipt: Receipt | None = None  # None where it is damaged
        # Of the receipt, as it is on the disk.
        self.file = FileFacts(bytes=unit.receipt_bytes, checksum=unit.receipt)
        self._unknown_ids = 0  # in the shards
        self._scan_receipt(expected=self.file)
        for entry in unit.shards:
            self.bytes += entry.bin_bytes(identity.dtype) + entry.idx_bytes
            self.bytes += 0 if entry.mask is None else entry.tokens
            self._scan_shard(entry, shard_name(unit.name, split=entry.split))
        self._check_unknown(layout.receipt(unit.name), self.receipt)
        if unit.rejects is not None:
            self.bytes += unit.rejects.bytes
            self._scan_rejects(unit.rejects)

    def _scan_receipt(self, *, expected: FileFacts) -> None:
        path = self._layout.receipt(self._unit.name)
        try:
            data = read_receipt_bytes(self._layout, self._unit.name)
            self.file = facts_of(data)
            self.receipt = Receipt.from_bytes(data, path=path)
        except StoreError as error:
            self.problems.append((path, error.message))
            return
        if self.file != expected:
            self.problems.append((path, "is not the receipt that the manifest was made from"))

    def _check_unknown(self, path: Path, receipt: Receipt | None) -> None:
        if receipt is not None and self._unknown_ids != receipt.counts.unknown_ids:
            says = f"counts {receipt.counts.unknown_ids:,} ids of the unknown token"
            what = f"{says}, the shards have {self._unknown_ids:,}"
            self.problems.append((path, what))

    def _scan(self, path: Path, size: int, checksum: str, see: _See | None = None) -> bool:
        """Whether a file is as the manifest says."""
        found = list(scan_file(path, expected=FileFacts(bytes=size, checksum=checksum), see=see))
        self.problems += [(path, problem) for problem in found]
        return not found

    def _scan_shard(self, entry: ShardEntry, name: str) -> None:
        layout, identity = self._layout, self._identity
        path, idx_path = layout.shard_file(name, "bin"), layout.shard_file(name, "idx")
        if entry.mask is not None:
            self._scan_mask(layout.shard_file(name, "mask"), entry, idx_path)
        unknown = None if self.receipt is None else self.receipt.unknown
        counted = unknown.id if isinstance(unknown, UnknownFacts) else None
        largest = _Largest(identity.dtype.itemsize, counted)
        self._scan(path, entry.bin_bytes(identity.dtype), entry.bin, largest.see)
        self._unknown_ids += largest.found
        if not path.is_file():
            return
        if largest.value >= identity.tokenizer.vocab_size:
            most = identity.tokenizer.vocab_size - 1
            self.problems.append((path, f"holds an id over {most}"))
        for shard in () if self.receipt is None else self.receipt.shards:
            if shard.split == entry.split and largest.value != shard.max_id:
                what = f"has {largest.value} as its largest id, its receipt says {shard.max_id}"
                self.problems.append((path, what))
        self._scan(idx_path, entry.idx_bytes, entry.idx)
        if not idx_path.is_file():
            return
        try:
            index = read_index(idx_path)
            check_index(index, path=idx_path)
        except StoreError as error:
            self.problems.append((idx_path, error.message))
            return
        if index.dtype != identity.dtype or index.bin_bytes != entry.bin_bytes(identity.dtype):
            what = f"is for {index.bin_bytes:,} bytes of {index.dtype.name}, not for its .bin"
            self.problems.append((idx_path, what))

    def _scan_mask(self, path: Path, entry: ShardEntry, idx_path: Path) -> None:
        assert entry.mask is not None
        largest = _Largest(1)
        is_sound = self._scan(path, entry.tokens, entry.mask, largest.see)
        if largest.value > 1:
            self.problems.append((path, f"holds {largest.value}: a mask holds 0 and 1"))
            return
        if not is_sound:
            return
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
            counted += int(counts.sum())
            silent += int(np.count_nonzero(counts == 0))
            first = last
        if (counted, silent) != (entry.counted, entry.silent):
            what = (
                f"has {counted:,} tokens in the loss mask and {silent:,} documents without, the"
                f" manifest says {entry.counted:,} and {entry.silent:,}"
            )
            self.problems.append((path, what))

    def _scan_rejects(self, rejects: RejectsEntry) -> None:
        path, lines, end = self._layout.rejects_file(self._unit.name), 0, b""

        def see(block: memoryview) -> None:
            nonlocal lines, end
            lines += int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))
            end = (end + bytes(block[-LAST_LINE_BYTES:]))[-LAST_LINE_BYTES:]

        self._scan(path, rejects.bytes, rejects.checksum, see)
        try:
            more = unlisted_rejects(end.removesuffix(b"\n").rpartition(b"\n")[2])
        except ValueError as error:
            self.problems.append((path, f"was changed: {error}"))
            return
        unlisted = sum(more.values())
        listed = lines - bool(more)
        if listed + unlisted != rejects.rows:
            counted = f" and counts {unlisted} more" if more else ""
            what = f"has {listed} lines{counted} instead of {rejects.rows}"
            self.problems.append((path, what))
        elif self.receipt is not None and unlisted != self.receipt.counts.unlisted:
            what = f"counts {unlisted} rows, its receipt says {self.receipt.counts.unlisted}"
            self.problems.append((path, what))


def scan_file(path: Path, *, expected: FileFacts, see: _See | None = None) -> Iterator[str]:
    """Problems of a file that should have these facts; `see` gets its bytes as they pass."""
    digest, size = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(min(BLOCK_BYTES, expected.bytes + 1)))
    try:
        with path.open("rb") as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                size += count
                if see is not None:
                    see(block[:count])
    except FileNotFoundError:
        yield "is missing"
    except OSError as error:
        yield f"cannot be read: {error.strerror or error}"
    else:
        if size != expected.bytes:
            yield f"has {size:,} bytes instead of {expected.bytes:,}"
        elif digest.hexdigest() != expected.checksum:
            yield f"was changed: its checksum is {digest.hexdigest()}, not {expected.checksum}"


class _Largest:
    """The largest value of a file that passes in blocks; a negative one counts as very large.

    And how often one value is in it.
    """

    def __init__(self, itemsize: int, counted: int | None = None) -> None:
        self._dtype = np.dtype(f"<u{itemsize}")
        self._counted = counted
        self.value = self.found = 0

    def see(self, block: memoryview) -> None:
        whole = len(block) // self._dtype.itemsize
        if whole:
            values = np.frombuffer(block, self._dtype, whole)
            self.value = max(self.value, int(values.max()))
            if self._counted is not None:
                self.found += int(np.count_nonzero(values == self._counted))
