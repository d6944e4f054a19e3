"""The verb `import_store`: foreign token files in, a store out. The same call again resumes.

    detect -> open -> parts -> what is left to do -> threads, one unit each -> manifest

A part becomes a unit with a receipt, written as a build writes it, so that everything that works
with a store (verify, inspect, the loader) works with an imported one.

Where the end-of-text id is, is not asked but found: after all documents are read, it is known
whether each of them begins or ends with it. A prepended end-of-text (as llm.c has it) is a token
that begins every document, so it is `bos` in the manifest, with its own name.
"""

from __future__ import annotations

import dataclasses
import datetime
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill._version import __version__
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import describe, find_tokenizer, resolve_token
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.interop import base
from tokenmill.interop.export import Report, run_tasks, title_of
from tokenmill.loader.packing import LAYOUTS
from tokenmill.markup import Told
from tokenmill.options import with_settings
from tokenmill.store import facts
from tokenmill.store.format import MAX_DOCUMENT_TOKENS
from tokenmill.store.layout import (
    RECEIPT_FILE,
    SPLIT_NAME,
    Json,
    StoreLayout,
    StoreLock,
    refuse_other_folder,
)
from tokenmill.store.reader import Store, StoreFiles
from tokenmill.store.write import UnitWriter, keep_tokenizer, sweep

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray


# Kind of the tokenizer of ids that nobody named one for.
UNKNOWN = "unknown"
# Documents whose first and last tokens are looked at in one go.
TALLIED = 1 << 18


class NamedTokenizer(NamedTuple):
    """The tokenizer that made foreign ids, as far as an import needs it."""

    facts: facts.TokenizerFacts
    files: Mapping[str, Path]
    eos: tuple[str, int] | None


def name_tokenizer(source: str | os.PathLike[str], *, eos: str | None = None) -> NamedTokenizer:
    """The tokenizer of a name; its end-of-text as asked for, or as its metadata say, or none."""
    found = find_tokenizer(source)
    info, files = describe(found, policy=None), found.files
    known = facts.TokenizerFacts(
        kind=str(info.kind),
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        files={name: facts.facts_of(path.read_bytes()) for name, path in files.items()},
    )
    named = info.eos_token is not None or eos is not None
    return NamedTokenizer(known, files, resolve_token(info, "eos", eos) if named else None)


def unknown_tokenizer(vocab_size: int) -> NamedTokenizer:
    """For ids whose tokenizer nobody named."""
    known = facts.TokenizerFacts(kind=UNKNOWN, fingerprint=UNKNOWN, vocab_size=vocab_size, files={})
    return NamedTokenizer(known, {}, None)


class EosTally(NamedTuple):
    """How many documents have the end-of-text id where."""

    documents: int = 0  # those that have tokens
    first: int = 0
    last: int = 0

    @property
    def place(self) -> str:
        """Where it is: appended, prepended, mixed or none."""
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
    tokens: NDArray[Any], begins: NDArray[np.int64], lengths: NDArray[Any], eos_id: int | None
) -> EosTally:
    """Look at the first and last token of documents, by where they begin."""
    begins, lengths = begins[lengths > 0], lengths[lengths > 0]
    if eos_id is None:
        return EosTally(len(begins))
    ends = (np.count_nonzero(tokens[at] == eos_id) for at in (begins, begins + lengths - 1))
    return EosTally(len(begins), *map(int, ends))


def add_tallies(tallies: Iterable[EosTally]) -> EosTally:
    """All of them together."""
    return EosTally(*map(sum, zip(EosTally(), *tallies, strict=True)))


def with_eos(
    identity: facts.StoreIdentity, tally: EosTally, eos: tuple[str, int] | None
) -> facts.StoreIdentity:
    """The identity with the end-of-text where it was found."""
    found = {"appended": ("eos", "end"), "prepended": ("bos", "start")}.get(tally.place)
    if eos is None or found is None:
        return identity
    token = facts.BoundaryToken(token=eos[0], id=eos[1], position=found[1])
    return identity.but(**{found[0]: token})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportResult(Told):
    """What an import made."""

    store: str
    format: str
    nothing_to_do: bool
    documents: int
    tokens: int
    dtype: str
    splits: Mapping[str, facts.SplitTotals]
    has_boundaries: bool
    has_mask: bool
    eos: str
    """Where the end-of-text id was found: appended, prepended, mixed or none."""
    notes: tuple[str, ...]
    parts: int
    parts_resumed: int
    bytes: int
    workers: int
    seconds: float


@with_settings(base.ImportRequest)
def import_(asked: base.ImportRequest) -> ImportResult:
    """Make a store of another project's token files; the same call again resumes.

    Without `format` it is found from the bytes, as far as they say it. `tokenizer` is the one that
    made the ids: every id must be in its vocabulary. `dtype` is for files that do not say it,
    `split_at_eos` for those without boundaries between documents.
    """
    return run_import(asked)


import_store = import_


def run_import(options: base.ImportRequest, named: NamedTokenizer | None = None) -> ImportResult:
    """Import ids of the tokenizer that is named, or asked for."""
    path = base.local_path(options.path, hint=base.READ_HINT)
    named = named or name_tokenizer(options.tokenizer, eos=options.eos)
    layout = StoreLayout(base.local_path(options.out, hint=base.STORE_HINT).absolute())
    started = time.monotonic()
    found = base.detect_format(path, options.format)
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
        settings=base.complete_settings(found, options.settings),
    )
    with base.reading(path):
        foreign = found.open(path, options)
    _refuse_other_tokenizer(path, foreign, named.facts)
    refuse_other_folder(layout.root)
    was_there = layout.root.exists()
    run = ImportRun(foreign, found.about.name, options, named, layout, started)
    try:
        with StoreLock(layout):
            return run.run(path)
    except BaseException:
        # Nothing stays of an import that failed before its first unit was complete.
        if not was_there and not any(layout.shards.glob("*.json")):
            shutil.rmtree(layout.root, ignore_errors=True)
        raise


def _refuse_other_tokenizer(path: Path, foreign: base.Foreign, known: facts.TokenizerFacts) -> None:
    made_by = foreign.tokenizer
    if made_by in (None, UNKNOWN) or known.fingerprint in (UNKNOWN, made_by):
        return
    raise UsageError(
        f"the ids in {str(path)!r} were made by a tokenizer with the fingerprint {made_by!r}, and"
        f" the one that is named has {known.fingerprint!r}; under it they would be another text",
        hint="name the tokenizer that made them: -t TOKENIZER; a store has it in its tokenizer/. If"
        " it is that one, only written anew, take 'tokenizer' out of metadata.json",
    )


def _refuse_packed(path: Path, format_: base.Format) -> None:
    """Rows of our own exports that, joined, would not be the text that they came from."""
    title, about = title_of(path), format_.about
    options = title.get("options") if title.get("format") == about.name else None
    if not isinstance(options, dict) or options.get("seq_len") is None:
        return
    packing = options.get("packing")
    joins = packing in LAYOUTS and LAYOUTS[packing].back_to_back
    if joins and (not about.row_overlap or about.tells_overlap):
        return
    why = "that overlap by a token" if joins else f"packed by {packing}"
    raise UsageError(
        f"{str(path)!r} holds rows {why}: joined they would be another text",
        hint="leave --split-at-eos out: each row becomes a document; or export documents, without"
        " --seq-len",
    )


@dataclass
class ImportRun:
    """One import, when its files are open."""

    foreign: base.Foreign
    format: str
    options: base.ImportRequest
    tokenizer: NamedTokenizer
    layout: StoreLayout
    started: float

    def run(self, path: Path) -> ImportResult:
        """Carry out the import; the store is locked."""
        parts, layout, eos = self.foreign.parts, self.layout, self.tokenizer.eos
        self.identity = identity = self._identity()
        units = {_unit_of(part).name: part for part in parts}
        if len(units) != len(parts):
            raise SourceError(
                f"two files of {str(path)!r} have the same name", hint="import one of them"
            )
        done = self._find_done(units)
        known = facts.known_manifest(layout) if len(done) == len(units) else None
        asked = identity.fingerprint, len(units)
        if known is not None and (known.identity.fingerprint, len(known.units)) == asked:
            return self._result(known, len(done))
        layout.create()
        keep_tokenizer(layout, self.tokenizer.files, identity.tokenizer.files)
        sweep(layout, {name: receipt.claim for name, receipt in done.items()})
        try:
            tallies, workers = run_tasks(
                self._work,
                [part for name, part in units.items() if name not in done],
                size=lambda part: part.bytes,
                total=sum(part.bytes for part in parts),
                workers=self.options.workers,
                on_progress=self.options.on_progress,
            )
        finally:
            shutil.rmtree(layout.tmp, ignore_errors=True)
        tally = add_tallies([*tallies, *map(self._tally, done.values())])
        manifest = facts.assemble_manifest(layout, with_eos(identity, tally, eos), units=[*units])
        facts.write_manifest(layout, manifest)
        note = "" if eos is None else tally.sentence(repr(eos[0]))
        if self.options.split_at_eos and (padding := _padding(layout, self.options.eos_id)):
            note = f"{note}; {padding}"
        result = self._result(manifest, len(done), workers, note, tally.place)
        record: dict[str, Json] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tokenmill": __version__,
            "import": result.format,
            "workers": result.workers,
            "seconds": round(result.seconds, 3),
            "parts": result.parts - result.parts_resumed,
            "tokens": result.tokens,
        }
        facts.append_runs(layout, [record])
        return result

    def _identity(self) -> facts.StoreIdentity:
        """Who the store is, before its end-of-text is found."""
        options, named = self.options, self.tokenizer.facts
        config: dict[str, Json] = {
            "import": self.format,
            "dtype": options.dtype,
            "split_at_eos": options.split_at_eos,
            "eos_id": options.eos_id if options.split_at_eos else None,
            "split": options.split,
            "settings": dict(options.settings),
        }
        mask = {"mask": True} if self.foreign.has_mask else {}
        return facts.StoreIdentity(
            created_by=f"tokenmill {__version__}",
            tokenizer=named,
            eos=None,
            bos=None,
            special_tokens=str(SpecialTokens.TEXT),
            config=config,
            fingerprint=facts.config_fingerprint(
                tokenizer=named.fingerprint, vocab_size=named.vocab_size, config=config, **mask
            ),
            mask=self.foreign.has_mask,
        )

    def _find_done(self, units: Mapping[str, base.ForeignPart]) -> dict[str, facts.Receipt]:
        """Units that are complete, of the files as they are now; StoreError for others."""
        done = {}
        shards = self.layout.shards
        for path in sorted(shards.iterdir()) if shards.is_dir() else ():
            match = RECEIPT_FILE.fullmatch(path.name)
            receipt = None if match is None else facts.find_receipt(self.layout, match["unit"])
            if receipt is None:
                continue
            part = units.get(receipt.unit.name)
            if part is None or receipt.config != self.identity.fingerprint:
                raise StoreError(
                    f"{str(self.layout.root)!r} holds another store: {receipt.unit.path!r} is not"
                    " among what is imported, or was imported with other options or another"
                    " tokenizer",
                    hint="choose another --out, or delete that store first",
                )
            source = receipt.source
            if receipt.unit == _unit_of(part) and (source.size, source.version) == _version(part):
                done[receipt.unit.name] = receipt
        return done

    def _work(self, part: base.ForeignPart, report: Report) -> EosTally:
        """Read a part and commit it as a unit, on any thread."""
        vocab_size = self.tokenizer.facts.vocab_size
        with UnitWriter(self.layout, _unit_of(part), vocab_size=vocab_size) as writer:
            rows = tokens = largest = read = 0
            for block in self._blocks(part):
                ids, mask = block.ids, block.mask
                if ids.dtype == np.dtype("<u4"):
                    ids = ids.view("<i4")  # the bytes of a store; too large becomes negative
                if mask is None and self.foreign.has_mask:
                    mask = np.ones(len(ids), np.uint8)  # a store has masks for all or for none
                numbers = np.arange(rows, rows + len(block.lengths), dtype=np.int64)
                try:
                    writer.append(part.split, ids, lengths=block.lengths, rows=numbers, mask=mask)
                except ValueError:
                    first = part.start + rows
                    check_ids(block, vocab_size=vocab_size, path=part.path, first=first)
                    raise
                rows += len(block.lengths)
                tokens += len(block.ids)
                largest = max(largest, int(block.lengths.max(initial=0)))
                read += block.ids.nbytes
                report(min(read, part.bytes))
            size, version = _version(part)
            receipt = writer.commit(
                # Nobody reads the digest: files that changed are imported again.
                source=facts.SourceFacts(
                    size=size, version=version, digest="", is_last=False, num_lines=0
                ),
                config=self.identity.fingerprint,
                counts=facts.Counts.of(
                    rows=rows, documents=rows, input_bytes=part.bytes, tokens=tokens
                ),
                bounds=facts.Bounds(largest_row_bytes=largest, smallest_too_large_bytes=None),
                engine=facts.EngineFacts(
                    name=f"import from {self.format}",
                    version=__version__,
                    reference="none",
                    reference_version="",
                    checked_documents=0,
                    mismatches=0,
                    redone=False,
                    routed_documents=0,
                ),
            )
        return self._tally(receipt)

    def _blocks(self, part: base.ForeignPart) -> base.Blocks:
        with base.reading(part.file):
            yield from self.foreign.blocks(part)

    def _tally(self, receipt: facts.Receipt) -> EosTally:
        """Where the end-of-text id is in a unit that is complete."""
        found, files = [], StoreFiles(self.layout.root)
        for shard in receipt.shards:
            index = files.index(shard.name)
            tokens = files.tokens(shard.name, dtype=index.dtype)
            for first in range(0, len(index.lengths), TALLIED):
                here = slice(first, first + TALLIED)
                begins = index.offsets[here] // index.dtype.itemsize
                found.append(tally_eos(tokens, begins, index.lengths[here], self.options.eos_id))
        return add_tallies(found)

    def _result(
        self, manifest: facts.Manifest, kept: int, workers: int = 0, note: str = "", place: str = ""
    ) -> ImportResult:
        """What was made; without a `place`, nothing was."""
        identity, foreign = manifest.identity, self.foreign
        known = "appended" if identity.eos else "prepended" if identity.bos else "none"
        return ImportResult(
            store=str(self.layout.root),
            format=self.format,
            nothing_to_do=not place,
            documents=manifest.totals.documents,
            tokens=manifest.totals.tokens,
            dtype=identity.dtype.name,
            splits=manifest.splits,
            has_boundaries=foreign.has_boundaries,
            has_mask=foreign.has_mask,
            eos=place or known,
            notes=tuple(text for text in (foreign.note, note) if text),
            parts=len(foreign.parts),
            parts_resumed=kept,
            bytes=sum(part.bytes for part in foreign.parts),
            workers=workers,
            seconds=time.monotonic() - self.started,
        )


def _unit_of(part: base.ForeignPart) -> facts.UnitFacts:
    return facts.UnitFacts.of(part.path, index=part.index, start=part.start, end=part.end)


def _version(part: base.ForeignPart) -> tuple[int, str]:
    """Size and version of a foreign file; the version changes when one beside it does."""
    found = [file.stat() for file in (part.file, *part.beside)]
    return found[0].st_size, "-".join(str(each.st_mtime_ns) for each in found)


def check_ids(block: base.DocumentBlock, *, vocab_size: int, path: str, first: int) -> None:
    """Raise SourceError, which names the document, where an id is not in the vocabulary."""
    ids, longest = block.ids, int(block.lengths.max(initial=0))
    if longest > MAX_DOCUMENT_TOKENS:
        raise base.damaged(
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
