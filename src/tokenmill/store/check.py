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

from tokenmill.errors import StoreError
from tokenmill.store.assemble import ManifestAssembler
from tokenmill.store.fields import FormatVersionError
from tokenmill.store.layout import shard_name
from tokenmill.store.manifest import Manifest, read_manifest
from tokenmill.store.place import visit_layout
from tokenmill.store.plans import PLAN_FILE, PlanVersionError, check_plan
from tokenmill.store.presence import expected_files, find_problems
from tokenmill.store.reader import content_fingerprint
from tokenmill.store.scan import UnitScan, scan_file, scan_unit
from tokenmill.store.sealed import unseal

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tokenmill.store.entries import UnitEntry
    from tokenmill.store.layout import StoreLayout

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
