"""The verb `import_store`: foreign token files in, a store out. The same call again resumes.

    detect -> open -> parts -> what is left to do -> workers, one unit each -> manifest

A part becomes a unit with a receipt, written as a build writes it, so that everything that works
with a store (verify, inspect, the loader) works with an imported one.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill._version import __version__
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.describe import describe
from tokenmill.engines.locate import find_tokenizer, resolve_eos
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.interop.base import (
    READ_HINT,
    STORE_HINT,
    ImportRequest,
    complete_settings,
    damaged,
    detect_format,
    get_format,
    local_path,
    reading,
)
from tokenmill.interop.export import TaskProgress, run_tasks, title_of
from tokenmill.loader.packing import LAYOUTS
from tokenmill.options import with_settings
from tokenmill.store.facts import (
    FORMAT_VERSION,
    BoundaryToken,
    Bounds,
    Counts,
    EngineFacts,
    SourceFacts,
    StoreIdentity,
    TokenizerFacts,
    UnitFacts,
    append_runs,
    assemble_manifest,
    facts_of,
    find_receipt,
    read_manifest,
    write_manifest,
)
from tokenmill.store.format import (
    MAX_DOCUMENT_TOKENS,
    map_file,
    read_index,
    token_dtype,
    view_tokens,
)
from tokenmill.store.layout import RECEIPT_FILE, SPLIT_NAME, StoreLayout, StoreLock, replace_file
from tokenmill.store.reader import MappedShard, Store
from tokenmill.store.write import UnitWriter, sweep

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenmill.interop.base import (
        DocumentBlock,
        Foreign,
        ForeignPart,
        Format,
        ImportOptions,
    )
    from tokenmill.interop.export import OnProgress, Report
    from tokenmill.store.facts import Manifest, Receipt, SplitTotals
    from tokenmill.store.layout import Json


# -------------------------------------------------------------------------------------------------
# Who an imported store is: its tokenizer, what was imported, and where its end-of-text id stands.
#
# The last is not asked but found: after all documents are read, it is known whether each of them
# begins or ends with the id. A prepended end-of-text (as llm.c has it) is a token that begins
# every document, so it stands as `bos` in the manifest, with its own name.

UNKNOWN = "unknown"
"""Kind of the tokenizer of ids that nobody named one for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTokenizer:
    """The tokenizer that made foreign ids, as far as an import needs it."""

    facts: TokenizerFacts
    files: Mapping[str, Path]
    eos: tuple[str, int] | None


def name_tokenizer(source: str | os.PathLike[str], *, eos: str | None = None) -> NamedTokenizer:
    """The tokenizer of a name; its end-of-text as asked for, or as its metadata say, or none."""
    files = find_tokenizer(source)
    info = describe(files, policy=None)
    named = info.eos_token is not None or eos is not None
    return NamedTokenizer(
        facts=TokenizerFacts(
            kind=str(info.kind),
            fingerprint=info.fingerprint,
            vocab_size=info.vocab_size,
            files={name: facts_of(path.read_bytes()) for name, path in files.files.items()},
        ),
        files=files.files,
        eos=resolve_eos(info, eos) if named else None,
    )


def unknown_tokenizer(vocab_size: int, *, eos_id: int | None = None) -> NamedTokenizer:
    """For ids whose tokenizer nobody named."""
    facts = TokenizerFacts(kind=UNKNOWN, fingerprint=UNKNOWN, vocab_size=vocab_size, files={})
    eos = None if eos_id is None else (f"id {eos_id}", eos_id)
    return NamedTokenizer(facts=facts, files={}, eos=eos)


def import_identity(
    tokenizer: NamedTokenizer, config: Mapping[str, Json], *, mask: bool
) -> StoreIdentity:
    """The identity of an imported store, before its end-of-text is found."""
    content: dict[str, Json] = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.facts.fingerprint,
        "vocab_size": tokenizer.facts.vocab_size,
        "config": dict(config),
    }
    if mask:
        content["mask"] = True
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True).encode()
    return StoreIdentity(
        created_by=f"tokenmill {__version__}",
        tokenizer=tokenizer.facts,
        eos=None,
        bos=None,
        special_tokens=str(SpecialTokens.TEXT),
        config=dict(config),
        fingerprint=hashlib.sha256(canonical).hexdigest(),
        mask=mask,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EosTally:
    """How many documents have the end-of-text id where."""

    documents: int = 0
    """Those that have tokens."""
    first: int = 0
    last: int = 0

    def __add__(self, other: EosTally) -> EosTally:
        return EosTally(
            documents=self.documents + other.documents,
            first=self.first + other.first,
            last=self.last + other.last,
        )

    @property
    def place(self) -> str:
        """Where it stands: appended, prepended, mixed or none."""
        if self.documents and self.last == self.documents:
            return "appended"
        if self.documents and self.first == self.documents:
            return "prepended"
        return "mixed" if self.first or self.last else "none"

    def sentence(self, token: str) -> str:
        """What was found, in words."""
        if self.place in {"appended", "prepended"}:
            where = "ends" if self.place == "appended" else "begins"
            return f"every document {where} with {token}"
        if self.place == "none":
            return f"no document begins or ends with {token}"
        return (
            f"{self.last:,} of {self.documents:,} documents end with {token} and {self.first:,}"
            " begin with it: the store says that none is there"
        )


def tally_eos(
    shard: MappedShard, eos_id: int | None, *, block_documents: int = 1 << 18
) -> EosTally:
    """Look at the first and last token of every document of a shard."""
    index, tokens = shard.index, shard.tokens
    tally = EosTally()
    for first in range(0, len(index.lengths), block_documents):
        here = slice(first, first + block_documents)
        lengths = index.lengths[here].astype(np.int64)
        begins = index.offsets[here][lengths > 0] // index.dtype.itemsize
        lasts = begins + lengths[lengths > 0] - 1
        known = eos_id is not None
        tally += EosTally(
            documents=len(begins),
            first=int(np.count_nonzero(tokens[begins] == eos_id)) if known else 0,
            last=int(np.count_nonzero(tokens[lasts] == eos_id)) if known else 0,
        )
    return tally


def with_eos(
    identity: StoreIdentity, tally: EosTally, eos: tuple[str, int] | None
) -> StoreIdentity:
    """The identity with the end-of-text where it was found."""
    if eos is None or tally.place not in {"appended", "prepended"}:
        return identity
    token, number = eos
    if tally.place == "appended":
        return identity.but(eos=BoundaryToken(token=token, id=number, position="end"))
    return identity.but(bos=BoundaryToken(token=token, id=number, position="start"))


def copy_tokenizer(layout: StoreLayout, tokenizer: NamedTokenizer) -> None:
    """Copy the tokenizer's files into the store, so that it needs nothing else to be read."""
    layout.tokenizer.mkdir(parents=True, exist_ok=True)
    for name, source in tokenizer.files.items():
        wanted, target = tokenizer.facts.files[name], layout.tokenizer / name
        if target.exists() and facts_of(target.read_bytes()) == wanted:
            continue
        data = source.read_bytes()
        if facts_of(data) != wanted:
            raise StoreError(
                f"the tokenizer file {str(source)!r} changed while it was read",
                hint="run the same command again",
            )
        replace_file(layout, target, data)


# -------------------------------------------------------------------------------------------------
# The worker of an import: reads parts of foreign files and commits each as a unit of a store.


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportWorker:
    """What all parts of an import have in common; each becomes a unit, on any thread."""

    foreign: Foreign
    format: str
    options: ImportOptions
    layout: StoreLayout
    config: str
    vocab_size: int

    def work(self, task: ForeignPart, report: Report) -> EosTally:
        unit, vocab_size = unit_of(task), self.vocab_size
        with UnitWriter(
            self.layout, unit, dtype=token_dtype(vocab_size), vocab_size=vocab_size
        ) as writer:
            rows = tokens = largest = read = 0
            for block in self._blocks(task):
                self._append(writer, task, block, first_row=rows)
                rows += len(block.lengths)
                tokens += len(block.ids)
                largest = max(largest, int(block.lengths.max(initial=0)))
                read += block.ids.nbytes
                report(min(read, task.bytes))
            size, version = source_version(self.foreign, task.path)
            receipt = writer.commit(
                source=SourceFacts(
                    size=size,
                    version=version,
                    digest="",  # nobody reads it: files that changed are imported again
                    is_last=False,
                    num_lines=0,
                ),
                config=self.config,
                counts=Counts.of(rows=rows, documents=rows, input_bytes=task.bytes, tokens=tokens),
                bounds=Bounds(largest_row_bytes=largest, smallest_too_large_bytes=None),
                engine=_engine(self.format),
            )
        return tally_receipt(self.layout, receipt, self.options.eos_id)

    def _blocks(self, task: ForeignPart) -> Iterator[DocumentBlock]:
        with reading(self.foreign.files[task.path]):
            yield from self.foreign.blocks(task)

    def _append(
        self, writer: UnitWriter, task: ForeignPart, block: DocumentBlock, *, first_row: int
    ) -> None:
        rows = np.arange(first_row, first_row + len(block.lengths), dtype=np.int64)
        mask = block.mask
        if mask is None and self.foreign.has_mask:
            mask = np.ones(len(block.ids), np.uint8)  # a store has masks for all or for none
        ids = block.ids
        if ids.dtype == np.dtype("<u4"):
            ids = ids.view("<i4")  # the bytes of a store; what is too large becomes negative
        try:
            writer.append(task.split, ids, lengths=block.lengths, rows=rows, mask=mask)
        except ValueError:
            vocab_size = self.vocab_size
            check_ids(block, vocab_size=vocab_size, path=task.path, first=task.start + first_row)
            raise


def check_ids(block: DocumentBlock, *, vocab_size: int, path: str, first: int) -> None:
    """Raise SourceError, which names the document, where an id is not in the vocabulary."""
    ids, longest = block.ids, int(block.lengths.max(initial=0))
    if longest > MAX_DOCUMENT_TOKENS:
        raise damaged(
            path,
            f"has a document of {longest:,} tokens, and a store's have {MAX_DOCUMENT_TOKENS:,} at"
            " most",
            hint="cut it, or name the end-of-text id and use --split-at-eos",
        )
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    place = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    document = first + int(np.searchsorted(np.cumsum(block.lengths), place, side="right"))
    raise SourceError(
        f"document {document:,} of {path!r} has the id {int(ids[place]):,}, and the tokenizer has"
        f" {vocab_size:,} ids: they are of another tokenizer, or of another type than {ids.dtype}",
        hint="name the tokenizer that made them with --tokenizer, or their type with --dtype",
    )


def tally_receipt(layout: StoreLayout, receipt: Receipt, eos_id: int | None) -> EosTally:
    """Where the end-of-text id stands in a unit that is complete."""
    tally = EosTally()
    for shard in receipt.shards:
        index = read_index(layout.shard_file(shard.name, "idx"))
        data = map_file(layout.shard_file(shard.name, "bin"))
        tokens = view_tokens(data, dtype=index.dtype)
        tally += tally_eos(MappedShard(tokens=tokens, index=index), eos_id)
    return tally


def source_version(foreign: Foreign, path: str) -> tuple[int, str]:
    """Size and version of a foreign file; the version changes when one of its sidecars does."""
    files = (foreign.files[path], *foreign.sidecars.get(path, ()))
    facts = [file.stat() for file in files]
    return facts[0].st_size, "-".join(str(each.st_mtime_ns) for each in facts)


def unit_of(part: ForeignPart) -> UnitFacts:
    return UnitFacts.of(part.path, index=part.index, start=part.start, end=part.end)


def _engine(format_name: str) -> EngineFacts:
    return EngineFacts(
        name=f"import from {format_name}",
        version=__version__,
        reference="none",
        reference_version="",
        checked_documents=0,
        mismatches=0,
        redone=False,
        routed_documents=0,
    )


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


@with_settings(ImportRequest)
def import_(asked: ImportRequest) -> ImportResult:
    """Make a store of another project's token files; the same call again resumes.

    Without `format` it is found from the bytes, as far as they say it. `tokenizer` is the one that
    made the ids: every id must be in its vocabulary. `dtype` is for files that do not say it,
    `split_at_eos` for those without boundaries between documents.
    """
    return make_import(
        local_path(asked.path, hint=READ_HINT),
        named=name_tokenizer(asked.tokenizer, eos=asked.eos),
        out=local_path(asked.out, hint=STORE_HINT),
        format_name=asked.format,
        options=asked,
        settings=asked.settings,
        workers=asked.workers,
        on_progress=asked.on_progress,
    ).run()


import_store = import_


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
    joins = packing in LAYOUTS and LAYOUTS[packing].back_to_back
    if joins and (not about.row_overlap or about.tells_overlap):
        return
    why = "that overlap by a token" if joins else f"packed by {packing}"
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
        append_runs(self.layout, [_run_record(result)])
        return result

    def _run_parts(
        self,
        foreign: Foreign,
        left: Sequence[ForeignPart],
        identity: StoreIdentity,
        tallies: dict[str, EosTally],
    ) -> int:
        total = sum(part.bytes for part in foreign.parts)
        progress = TaskProgress(
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
