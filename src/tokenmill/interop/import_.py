"""The verb `import_store`: foreign token files in, a store out. The same call again resumes.

    detect -> open -> parts -> what is left to do -> workers, one unit each -> manifest

A part becomes a unit with a receipt, written as a build writes it, so that everything that works
with a store (verify, inspect, the loader) works with an imported one.
"""

from __future__ import annotations

import dataclasses
import datetime
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill._version import __version__
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.interop.base import ImportOptions, reading
from tokenmill.interop.detect import detect_format
from tokenmill.interop.identity import (
    EosTally,
    NamedTokenizer,
    copy_tokenizer,
    import_identity,
    name_tokenizer,
    with_eos,
)
from tokenmill.interop.import_worker import (
    ImportWorker,
    source_version,
    tally_receipt,
    unit_of,
)
from tokenmill.interop.parts import title_of
from tokenmill.interop.place import READ_HINT, STORE_HINT, local_path
from tokenmill.interop.pool import Progress, run_tasks
from tokenmill.interop.registry import get_format
from tokenmill.interop.settings import complete_settings
from tokenmill.loader.layouts.packings import Packing
from tokenmill.store.assemble import assemble_manifest
from tokenmill.store.commit import sweep
from tokenmill.store.layout import RECEIPT_FILE, SPLIT_NAME, StoreLayout
from tokenmill.store.lock import StoreLock
from tokenmill.store.manifest import read_manifest, write_manifest
from tokenmill.store.reader import Store
from tokenmill.store.receipt import find_receipt
from tokenmill.store.runs import append_run

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import Foreign, ForeignPart, Format
    from tokenmill.interop.pool import OnProgress
    from tokenmill.store.entries import SplitTotals, StoreIdentity
    from tokenmill.store.facts import UnitFacts
    from tokenmill.store.manifest import Manifest
    from tokenmill.store.receipt import Receipt
    from tokenmill.store.sealed import Json

    PathInput = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportResult:
    """What an import made."""

    store: str
    format: str
    nothing_to_do: bool
    documents: int
    tokens: int
    dtype: str
    splits: Mapping[str, SplitTotals]
    has_borders: bool
    has_mask: bool
    eos: str
    """Where the end-of-text id was found: appended, prepended, mixed or none."""
    notes: tuple[str, ...]
    parts: int
    parts_resumed: int
    bytes: int
    workers: int
    seconds: float


def import_store(
    path: PathInput,
    *,
    tokenizer: PathInput,
    out: PathInput,
    format: str | None = None,  # noqa: A002 (its name everywhere)
    dtype: str | None = None,
    split_at_eos: bool = False,
    split: str | None = None,
    eos: str | None = None,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    **settings: str | int | bool,
) -> ImportResult:
    """Make a store of another project's token files; the same call again resumes.

    Without `format` it is found from the bytes, as far as they say it. `tokenizer` is the one that
    made the ids: every id must be in its vocabulary. `dtype` is for files that do not say it,
    `split_at_eos` for those without borders between documents.
    """
    return make_import(
        local_path(path, hint=READ_HINT),
        named=name_tokenizer(tokenizer, eos=eos),
        out=local_path(out, hint=STORE_HINT),
        format_name=format,
        options=ImportOptions(dtype=dtype, split_at_eos=split_at_eos, split=split),
        settings=settings,
        workers=workers,
        on_progress=on_progress,
    ).run()


def make_import(
    path: Path,
    *,
    named: NamedTokenizer,
    out: Path,
    format_name: str | None,
    options: ImportOptions,
    settings: Mapping[str, str | int | bool],
    workers: int | None,
    on_progress: OnProgress | None,
) -> ImportRun:
    """Check what was asked for and put it into a run."""
    found = detect_format(path) if format_name is None else get_format(format_name)
    if options.split_at_eos:
        _refuse_packed(path, found)
    if options.split is not None and not SPLIT_NAME.fullmatch(options.split):
        raise UsageError(
            f"split={options.split!r} is not lower-case letters, digits and _",
            hint="use a name like train or val",
        )
    options = dataclasses.replace(
        options,
        eos_id=None if named.eos is None else named.eos[1],
        settings=complete_settings(found, settings),
    )
    return ImportRun(
        path=path,
        format=found,
        options=options,
        tokenizer=named,
        layout=StoreLayout(out.absolute()),
        workers=workers,
        on_progress=on_progress,
    )


def _refuse_packed(path: Path, format_: Format) -> None:
    """Rows of our own exports that, joined, would not be the text that they came from."""
    title = title_of(path)
    options = title.get("options")
    if title.get("format") != format_.about.name or not isinstance(options, dict):
        return
    if options.get("seq_len") is None:
        return
    packing, about = options.get("packing"), format_.about
    if packing == Packing.CONCAT and (not about.row_overlap or about.tells_overlap):
        return
    why = f"packed by {packing}" if packing != Packing.CONCAT else "that overlap by a token"
    raise UsageError(
        f"{str(path)!r} holds rows {why}: joined they would be another text",
        hint="leave --split-at-eos out: each row becomes a document; or export documents, without"
        " --seq-len",
    )


@dataclass(kw_only=True)
class ImportRun:
    """One call of `import_store`."""

    path: Path
    format: Format
    options: ImportOptions
    tokenizer: NamedTokenizer
    layout: StoreLayout
    workers: int | None
    on_progress: OnProgress | None

    def run(self) -> ImportResult:
        """Carry out the import."""
        self._started = time.monotonic()
        with reading(self.path):
            foreign = self.format.open(self.path, self.options)
        try:
            self._check_folder()
            was_there = self.layout.root.exists()
            try:
                with StoreLock(self.layout):
                    return self._run_locked(foreign)
            except BaseException:
                self._leave_nothing(was_there)
                raise
        finally:
            foreign.close()

    def _run_locked(self, foreign: Foreign) -> ImportResult:
        identity = import_identity(self.tokenizer, self._config(), mask=foreign.has_mask)
        with reading(self.path):
            units = [unit_of(part) for part in foreign.parts]
        if len({unit.name for unit in units}) != len(units):
            raise SourceError(
                f"two files of {str(self.path)!r} have the same name", hint="import one of them"
            )
        done = self._find_done(foreign, units, identity)
        self._refuse_mixtures(units, identity)
        finished = self._finished(units, done, identity)
        if finished is not None:
            return self._result(foreign, finished, resumed=len(done))
        self.layout.create()
        copy_tokenizer(self.layout, self.tokenizer)
        sweep(self.layout, {name: receipt.claim for name, receipt in done.items()})
        left = [
            part for part, unit in zip(foreign.parts, units, strict=True) if unit.name not in done
        ]
        tallies: dict[str, EosTally] = {}
        workers = self._run_parts(foreign, left, identity, tallies)
        for name, receipt in done.items():
            tallies[name] = tally_receipt(self.layout, receipt, self.options.eos_id)
        tally = sum(tallies.values(), EosTally())
        final = with_eos(identity, tally, self.tokenizer.eos)
        names = [unit.name for unit in units]
        manifest = assemble_manifest(self.layout, final, units=names)
        write_manifest(self.layout, manifest)
        note = None if self.tokenizer.eos is None else tally.sentence(repr(self.tokenizer.eos[0]))
        if self.options.split_at_eos and (padding := _padding(self.layout, self.options.eos_id)):
            note = f"{note}; {padding}"
        result = self._result(
            foreign, manifest, resumed=len(done), workers=workers, note=note, place=tally.place
        )
        append_run(self.layout, _run_record(result))
        return result

    def _run_parts(
        self,
        foreign: Foreign,
        left: Sequence[ForeignPart],
        identity: StoreIdentity,
        tallies: dict[str, EosTally],
    ) -> int:
        total = sum(part.bytes for part in foreign.parts)
        progress = Progress(
            total=total,
            done=total - sum(part.bytes for part in left),
            on_progress=self.on_progress,
        )

        def on_done(part: ForeignPart, tally: EosTally) -> None:
            name = unit_of(part).name
            tallies[name] = tally
            progress.finish(name, part.bytes)

        worker = ImportWorker(
            foreign=foreign,
            format=self.format.about.name,
            options=self.options,
            layout=self.layout,
            config=identity.fingerprint,
            vocab_size=identity.tokenizer.vocab_size,
        )
        try:
            return run_tasks(
                worker.work,
                left,
                workers=self.workers,
                on_report=lambda part, count: progress.report(unit_of(part).name, count),
                on_done=on_done,
            )
        finally:
            shutil.rmtree(self.layout.tmp, ignore_errors=True)

    def _config(self) -> dict[str, Json]:
        options = self.options
        return {
            "import": self.format.about.name,
            "dtype": options.dtype,
            "split_at_eos": options.split_at_eos,
            "eos_id": options.eos_id if options.split_at_eos else None,
            "split": options.split,
            "settings": dict(options.settings),
        }

    def _find_done(
        self, foreign: Foreign, units: Sequence[UnitFacts], identity: StoreIdentity
    ) -> dict[str, Receipt]:
        """Units that are complete, of the files as they are now."""
        done = {}
        for unit in units:
            receipt = find_receipt(self.layout, unit.name)
            if (
                receipt is not None
                and receipt.unit == unit
                and receipt.config == identity.fingerprint
                and (receipt.source.size, receipt.source.version)
                == source_version(foreign, unit.path)
            ):
                done[unit.name] = receipt
        return done

    def _refuse_mixtures(self, units: Sequence[UnitFacts], identity: StoreIdentity) -> None:
        """Units of something else must not stand in the same store."""
        if not self.layout.shards.is_dir():
            return
        ours = {unit.name for unit in units}
        for path in sorted(self.layout.shards.iterdir()):
            match = RECEIPT_FILE.fullmatch(path.name)
            if match is None:
                continue
            receipt = find_receipt(self.layout, match["unit"])
            if receipt is None or (
                receipt.config == identity.fingerprint and receipt.unit.name in ours
            ):
                continue
            raise StoreError(
                f"{str(self.layout.root)!r} holds another store: {receipt.unit.path!r} is not among"
                " what is imported, or was imported with other options or another tokenizer",
                hint="choose another --out, or delete that store first",
            )

    def _finished(
        self, units: Sequence[UnitFacts], done: Mapping[str, Receipt], identity: StoreIdentity
    ) -> Manifest | None:
        """The manifest of a store that already is what was asked for."""
        if len(done) != len(units):
            return None
        try:
            manifest = read_manifest(self.layout.root)
        except StoreError:
            return None
        same = manifest.identity.fingerprint == identity.fingerprint
        return manifest if same and len(manifest.units) == len(units) else None

    def _check_folder(self) -> None:
        root = self.layout.root
        if not root.exists():
            return
        if not root.is_dir():
            raise UsageError(
                f"{str(root)!r} is a file; a store is a folder", hint="choose another --out"
            )
        names = {entry.name for entry in root.iterdir()}
        if names and not names & {"shards", "tokenmill.json", "tokenizer", ".lock"}:
            raise StoreError(
                f"the folder {str(root)!r} holds other things ({min(names)!r}, ...) and no store;"
                " an import would mix with them",
                hint="choose a new or empty folder with --out",
            )

    def _leave_nothing(self, was_there: bool) -> None:
        """Remove the folder of an import that failed before its first unit was complete."""
        if was_there or not self.layout.root.is_dir():
            return
        shards = self.layout.shards
        if not shards.is_dir() or not any(shards.glob("*.json")):
            shutil.rmtree(self.layout.root, ignore_errors=True)

    def _result(
        self,
        foreign: Foreign,
        manifest: Manifest,
        *,
        resumed: int,
        workers: int = 0,
        note: str | None = None,
        place: str | None = None,
    ) -> ImportResult:
        """What was made; without a `place`, nothing was."""
        identity = manifest.identity
        known = "appended" if identity.eos else "prepended" if identity.bos else "none"
        return ImportResult(
            store=str(self.layout.root),
            format=self.format.about.name,
            nothing_to_do=place is None,
            documents=manifest.totals.documents,
            tokens=manifest.totals.tokens,
            dtype=identity.dtype.name,
            splits=manifest.splits,
            has_borders=foreign.has_borders,
            has_mask=foreign.has_mask,
            eos=place or known,
            notes=tuple(text for text in (foreign.note, note) if text),
            parts=len(foreign.parts),
            parts_resumed=resumed,
            bytes=sum(part.bytes for part in foreign.parts),
            workers=workers,
            seconds=time.monotonic() - self._started,
        )


def _padding(layout: StoreLayout, eos_id: int | None) -> str:
    """What looks like the padding of a last row, and may be documents as well."""
    store = Store(layout.root, split=None)
    alone = 0
    for shard in range(len(store.shards)):
        mapped = store.map_shard(shard)
        ends = mapped.index.lengths[::-1] == 1
        count = len(ends) if ends.all() else int(np.argmin(ends))
        alone += count if count > 1 and (mapped.tokens[-count:] == eos_id).all() else 0
    if not alone:
        return ""
    return f"{alone:,} documents at the ends of shards are that id alone, as padding would be"


def _run_record(result: ImportResult) -> dict[str, Json]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tokenmill": __version__,
        "import": result.format,
        "workers": result.workers,
        "seconds": round(result.seconds, 3),
        "parts": result.parts - result.parts_resumed,
        "tokens": result.tokens,
    }
