"""Looks at every byte of a store: checksums, seals, indexes, ids, and that it all adds up.

    manifest -> per unit, in threads: receipt, .bin, .idx, .mask, rejects -> manifest made anew
    and compared -> plans

Files are read in blocks, so memory does not grow with the store. Problems are collected, not
raised: a person who has a damaged store wants the list.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.assemble import ManifestAssembler
from tokenmill.store.fields import FormatVersionError
from tokenmill.store.layout import StoreLayout
from tokenmill.store.manifest import Manifest, read_manifest
from tokenmill.store.plans import PLAN_FILE, PlanVersionError, check_plan
from tokenmill.store.presence import expected_files, find_problems
from tokenmill.store.reader import content_fingerprint
from tokenmill.store.scan import UnitScan, scan_file, scan_unit
from tokenmill.store.sealed import unseal

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

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

    Raises StoreError only where there is no manifest, or one of another format version.
    """
    layout = StoreLayout(Path(path).absolute())
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
        return Finding(path.relative_to(self._layout.root).as_posix(), problem)

    def _check_tokenizer(self) -> None:
        for name, facts in self._manifest.identity.tokenizer.files.items():
            path = self._layout.tokenizer / name
            for problem in scan_file(path, expected=facts):
                self._find(path, problem)

    def _check_units(self) -> Iterator[int]:
        """Yields the bytes done so far."""
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
            self._compare(assembler.manifest())

    def _scan_units(self) -> Iterator[UnitScan]:
        identity = self._manifest.identity
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            yield from pool.map(
                lambda unit: scan_unit(self._layout, unit, identity=identity), self._manifest.units
            )

    def _assemble(self, assembler: ManifestAssembler, scan: UnitScan) -> bool:
        if scan.receipt is None:
            return False
        try:
            assembler.add(scan.receipt, file=scan.file)
        except (StoreError, ValueError) as error:
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
