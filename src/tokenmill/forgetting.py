"""The verb `forget`: takes documents out of a store for good; the one that rewrites shards.

    which documents -> forgotten.json -> forgetting/: shards without them, receipts, the manifest
    -> each into the place of the old one -> columns, plans, snapshots -> manifest

What is to be done is on the disk before anything is written, and all that is new before the first
old file goes. From then on there is only to rename and to remove, and a run that was cut off at any
moment is gone on with by the next one. What depends on the documents is made anew or removed.

A reader who has old files mapped keeps them. Another one gets an error, and never both: fewer
documents have an index of another size, which every reader compares with its manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.files import cache_folder, local_path, shown
from tokenmill.options import ForgetOptions, with_options
from tokenmill.selection import finder_of, read_list
from tokenmill.store import snapshots
from tokenmill.store.annotations import (
    SUFFIX,
    Numbers,
    find_annotations,
    read_annotation,
    write_annotation,
)
from tokenmill.store.check import scan_file
from tokenmill.store.documents import rows_of
from tokenmill.store.facts import (
    Claim,
    Forgetting,
    Forgotten,
    ForgottenReason,
    ForgottenStep,
    ForgottenUnit,
    Manifest,
    ManifestAssembler,
    Receipt,
    content_fingerprint,
    contents_of,
    facts_of,
    read_forgotten,
    read_manifest,
    read_receipt,
    write_forgotten,
)
from tokenmill.store.format import (
    MASK_DTYPE,
    RowRuns,
    map_file,
    numbers_of_runs,
    read_index,
    view_values,
)
from tokenmill.store.layout import (
    RECEIPT_FILE,
    SHARD_FILE,
    StoreLayout,
    StoreLock,
    replace_file,
    seal_of,
    sync_folder,
    write_error,
)
from tokenmill.store.plans import PLAN_FILE
from tokenmill.store.reader import Store
from tokenmill.store.views import of_rows
from tokenmill.store.write import ShardWriter, remove_manifest, sweep
from tokenmill.words import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.store.annotations import Column
    from tokenmill.store.facts import ShardFacts, StoreIdentity
    from tokenmill.store.format import Ints

_DIGITS = 16  # of a content, in the name of a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetResult:
    """What was taken out of a store, or would be."""

    store: str
    documents: int
    tokens: int
    of_documents: int
    of_tokens: int
    reasons: tuple[ForgottenReason, ...]
    units: int
    """Whose shards are written anew."""
    annotations: tuple[str, ...]
    """Columns that are written anew."""
    stale: tuple[str, ...]
    """Columns that are removed: they are damaged, or of another state of the store."""
    snapshots: tuple[str, ...]
    """That are removed: the store can no longer be read as it was then."""
    linked: tuple[str, ...]
    """Files that had other names outside the store (export --link): there they are as they were."""
    unknown: int
    """Lines of the list that no document has: they were passed over."""
    resumed: bool
    """Whether an earlier run was interrupted, and this one has ended it."""
    dry_run: bool


@with_options(ForgetOptions)
def forget(asked: ForgetOptions) -> ForgetResult:
    """Take documents out of a store for good: no byte of them is left in any of its files.

    The same call again ends what was interrupted; so does a call that names no documents. Builds
    leave the rows out from then on. What is outside the store is not reached: the sources, exports,
    copies and backups.
    """
    layout = _layout_of(asked)
    known = read_forgotten(layout)
    try:
        if known is None or known.pending is None:
            read_manifest(layout.root)  # says what is there instead
        with contextlib.nullcontext() if asked.dry_run else StoreLock(layout):
            return _forget(layout, asked)
    except OSError as error:
        raise write_error(error, path=layout.root) from error


def _layout_of(asked: ForgetOptions) -> StoreLayout:
    """The folder of the store; UsageError for what cannot forget."""
    root = local_path(asked.store)
    if root is None:
        raise UsageError(
            f"{shown(str(asked.store))!r} is at a URL: an object store may keep versions of what is"
            " removed, and has no locks, so nobody could say that no byte is left",
            hint="forget in a local copy, upload it under another name, and remove the old one with"
            " all its versions",
        )
    if root.is_file():
        raise UsageError(
            f"{str(root)!r} is a file, such as a view, and documents are forgotten in a store",
            hint="name the folder of the store; `tokenmill inspect VIEW` says which it is",
        )
    return StoreLayout(root.absolute())


def _forget(layout: StoreLayout, asked: ForgetOptions) -> ForgetResult:
    request, known = _request_of(asked), read_forgotten(layout)
    if known is not None and known.pending is not None:
        if asked.dry_run:
            raise StoreError(
                f"{layout.name!r} is in the middle of forgetting: a run was interrupted",
                hint=f"end it first: tokenmill forget {shlex.quote(layout.name)}",
            )
        result = _carry_out(layout, known, resumed=True)
        if asked.names_nothing or known.pending.request == request:
            return result
        known = read_forgotten(layout)
    if asked.names_nothing:
        raise UsageError(
            "documents to forget are named by a list of ids or by one of texts, and none is given",
            hint="give --ids gdpr.txt or --match texts.txt, and see first what would go: --dry-run",
        )
    planned, unknown = _plan(layout, asked, known, request)
    if asked.dry_run or not planned.steps[-1].documents:
        result = _result(layout, planned, read_manifest(layout.root), dry_run=asked.dry_run)
    else:
        write_forgotten(layout, planned)
        result = _carry_out(layout, planned)
    return replace(result, unknown=unknown)


def _request_of(asked: ForgetOptions) -> str:
    """A digest of what is asked for: the same command again is known by it."""
    names = ("regex", "key", "split", "missing", "reason")
    lists = [None if each is None else read_list(each) for each in (asked.ids, asked.match)]
    content = json.dumps([*lists, *(getattr(asked, name) for name in names)])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _result(
    layout: StoreLayout,
    forgotten: Forgotten,
    manifest: Manifest,
    *,
    resumed: bool = False,
    dry_run: bool = False,
) -> ForgetResult:
    step, doing = forgotten.steps[-1], forgotten.pending
    assert doing is not None
    is_done = manifest.forgotten == forgotten.steps
    totals, gone = manifest.totals, (step.documents, step.tokens) if is_done else (0, 0)
    return ForgetResult(
        store=layout.name,
        documents=step.documents,
        tokens=step.tokens,
        of_documents=totals.documents + gone[0],
        of_tokens=totals.tokens + gone[1],
        reasons=step.reasons,
        units=len(doing.units),
        annotations=doing.annotations,
        stale=doing.stale,
        snapshots=doing.snapshots,
        linked=doing.linked,
        unknown=0,
        resumed=resumed,
        dry_run=dry_run,
    )


# -------------------------------------------------------------------------------------------------
# What is to be done. Of the documents it has their numbers and rows, until it is done; the reasons
# that the manifest keeps have no word of them, nor of the lists that named them.


def _plan(
    layout: StoreLayout, asked: ForgetOptions, known: Forgotten | None, request: str
) -> tuple[Forgotten, int]:
    """What is to be done; and how many lines of the list no document has."""
    with Store(layout.root, split=None) as store:
        _refuse_unfinished(layout, store.manifest)
        finder = finder_of(store, asked)
        numbers = RowRuns()
        rows: dict[str, list[Ints]] = {}
        documents = tokens = 0
        for place, why in finder.found():
            gone = np.flatnonzero(of_rows(why, store.row_starts(place)) >= 0)
            if not len(gone):
                continue
            shard, (_, facts) = store.shards[place], store.facts_of(place)
            numbers.add(gone + shard.first_document)
            rows.setdefault(shard.unit, []).append(rows_of(facts)[gone])
            documents += len(gone)
            tokens += int(store.map_shard(place).index.lengths[gone].sum(dtype=np.int64))
        try:
            unknown = finder.require_use()
        except UsageError as error:
            if known is not None and error.hint is not None:
                earlier = sum(each.documents for each in known.steps)
                error.hint += f"; {count(earlier, 'document')} were forgotten before: see inspect"
            raise
        if documents == store.num_documents:
            raise UsageError(
                f"no document of {layout.name!r} would be left",
                hint=f"then remove all of it: rm -r {shlex.quote(layout.name)}",
            )
        manifest, receipts = store.manifest, {name: store.receipt(name) for name in rows}
    usual = "a listed text was in it" if asked.ids is None else f"listed by {asked.key}"
    step = ForgottenStep(
        manifest=seal_of(layout.manifest.read_bytes()),
        contents=contents_of(manifest),
        reasons=(
            ForgottenReason(reason=asked.reason or usual, documents=documents, tokens=tokens),
        ),
    )
    units = [*(() if known is None else known.units)]
    for name, parts in rows.items():
        _add_rows(units, receipts[name], np.unique(np.concatenate(parts)))
    dropped = snapshots.those_with(layout, rows)
    before = [manifest, *(snapshots.open_snapshot(layout, name)[0] for name in dropped)]
    states = {content_fingerprint(m, split=s) for m in before for s in (None, *m.splits)}
    columns = {path: _is_current(path, manifest) for path in find_annotations(layout)}
    doing = Forgetting(
        request=request,
        documents=numbers.lengths(),
        units=tuple(rows),
        snapshots=tuple(dropped),
        annotations=tuple(_stem(path) for path, is_ours in columns.items() if is_ours),
        stale=tuple(_stem(path) for path, is_ours in columns.items() if not is_ours),
        plans=tuple(sorted(content[:_DIGITS] for content in states)),
        linked=tuple(_linked(layout, receipts.values())),
    )
    steps = () if known is None else known.steps
    return Forgotten(steps=(*steps, step), units=tuple(units), pending=doing), unknown


def _refuse_unfinished(layout: StoreLayout, manifest: Manifest) -> None:
    """StoreError for a store to which a build has begun to add: it may add the same documents."""
    names = layout.upstream.names(layout.shards)
    found = {match["unit"] for match in map(RECEIPT_FILE.fullmatch, names) if match}
    more = found - {unit.name for unit in manifest.units}
    if more or layout.building.exists() or layout.parts.is_dir():
        raise StoreError(
            f"a build into {layout.name!r} has begun and not ended: what it adds could be of the"
            " same documents",
            hint="end the build first, with the same command, then forget",
        )


def _add_rows(units: list[ForgottenUnit], receipt: Receipt, rows: Ints) -> None:
    """Add rows of a unit to those that were forgotten."""
    is_all = len(rows) == sum(sum(shard.rows[1::2]) for shard in receipt.shards)
    for place, each in enumerate(units):
        if (each.unit, each.source.digest) == (receipt.unit, receipt.source.digest):
            rows = np.union1d(rows, numbers_of_runs(each.rows))
            del units[place]
            break
    runs = RowRuns()
    runs.add(rows)
    source = receipt.source.but(digest="") if is_all else receipt.source
    units.append(ForgottenUnit(unit=receipt.unit, source=source, rows=runs.lengths()))


def _linked(layout: StoreLayout, receipts: Iterable[Receipt]) -> Iterator[str]:
    """Files of units that have names elsewhere too."""
    retired = Counter(
        (layout.retired / name).stat().st_ino for name in layout.upstream.names(layout.retired)
    )
    for receipt in receipts:
        for name in receipt.files:
            found = (layout.shards / name).stat()
            if found.st_nlink > 1 + retired[found.st_ino]:
                yield f"shards/{name}"


def _stem(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


def _is_current(path: Path, manifest: Manifest) -> bool:
    """Whether a column is whole, and of this state of the store."""
    try:
        found = read_annotation(path)
        assert found.column is not None
    except StoreError:
        return False
    return found.facts.contents == contents_of(manifest)


# -------------------------------------------------------------------------------------------------
# Doing it. Each step finds out by itself what is done already.
#
#   | no manifest in forgetting/    the store is as it was; shards are being made
#   | a manifest there              nothing is left to be made; files are being put in place
#   | it is the store's             done, but for saying so


def _carry_out(layout: StoreLayout, forgotten: Forgotten, *, resumed: bool = False) -> ForgetResult:
    staged = layout.forgetting / layout.manifest.name
    if not staged.exists():
        manifest = read_manifest(layout.root)
        if manifest.forgotten != forgotten.steps:
            if seal_of(layout.manifest.read_bytes()) != forgotten.steps[-1].manifest:
                raise StoreError(
                    f"{layout.name!r} was changed since documents of it began to be forgotten",
                    hint="put its tokenmill.json and its shards back as they were, and run this"
                    " again",
                )
            _make(layout, forgotten, manifest)
    if staged.exists():
        _put_in_place(layout, forgotten, staged)
    result = _result(layout, forgotten, read_manifest(layout.root), resumed=resumed)
    shutil.rmtree(layout.tmp, ignore_errors=True)  # a list that was cut off knows which they were
    write_forgotten(layout, forgotten.but(pending=None))
    shutil.rmtree(layout.forgetting, ignore_errors=True)
    sync_folder(layout.root)
    layout.remove_empty_tmp()
    return result


def _make(layout: StoreLayout, forgotten: Forgotten, manifest: Manifest) -> None:
    """Everything that is new, in forgetting/; its manifest says that all is there."""
    doing, folder = forgotten.pending, layout.forgetting
    assert doing is not None
    claims = {
        unit.name: Claim(
            tuple(shard.split for shard in unit.shards),
            mask=manifest.identity.mask,
            rejects=unit.rejects is not None,
            is_last=False,
        )
        for unit in manifest.units
    }
    sweep(layout, claims)
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(layout.root)
    assembler = ManifestAssembler(manifest.identity, forgotten=forgotten.steps)
    wanted = set(doing.units)
    for unit in manifest.units:
        path = layout.receipt(unit.name)
        if unit.name in wanted:
            path = folder / path.name
            if not path.exists():
                receipt = read_receipt(layout, unit.name)
                rows = [each.rows for each in forgotten.units if each.unit == receipt.unit]
                gone = np.unique(np.concatenate([*map(numbers_of_runs, rows)]))
                made = _without(layout, receipt, gone, manifest.identity)
                replace_file(layout, path, made.to_bytes())
        data = path.read_bytes()
        assembler.add(Receipt.from_bytes(data, path=path), file=facts_of(data))
    replace_file(layout, folder / layout.manifest.name, assembler.manifest().to_bytes())


def _without(layout: StoreLayout, receipt: Receipt, gone: Ints, identity: StoreIdentity) -> Receipt:
    """Write the shards of a unit that had one of the rows, without them; returns its receipt."""
    unknown = getattr(receipt.unknown, "id", None)
    shards, rows, tokens, unknown_ids = [], 0, 0, 0
    for shard in receipt.shards:
        of_rows = rows_of(shard)
        kept = ~np.isin(of_rows, gone)
        if kept.all():
            shards.append(shard)
            continue
        for kind in ("bin", "idx", "mask"):
            path = layout.shard_file(shard.name, kind)
            if (facts := receipt.files.get(path.name)) is not None:
                for problem in scan_file(path, expected=facts):
                    raise StoreError(
                        f"{str(path)!r} {problem}; what is left of it would be called sound",
                        hint="repair the store first: run its build again, with the same command",
                    )
        index = read_index(layout.shard_file(shard.name, "idx"))
        ids = view_values(map_file(layout.shard_file(shard.name, "bin")), dtype=identity.dtype)
        offsets = np.concatenate(([0], np.cumsum(index.lengths, dtype=np.int64)))
        rows += len(np.unique(of_rows[~kept]))
        for first, last in _runs(~kept):
            taken = ids[offsets[first] : offsets[last]]
            tokens += len(taken)
            if unknown is not None:
                unknown_ids += int(np.count_nonzero(taken == unknown))
        if kept.any():
            shards.append(_write(layout, receipt, shard, identity, kept, of_rows, ids, offsets))
    return receipt.without(tuple(shards), rows=rows, tokens=tokens, unknown_ids=unknown_ids)


def _write(
    layout: StoreLayout,
    receipt: Receipt,
    shard: ShardFacts,
    identity: StoreIdentity,
    kept: NDArray[np.bool_],
    of_rows: Ints,
    ids: Any,
    offsets: Ints,
) -> ShardFacts:
    folder, mask = layout.forgetting, None
    for kind in ("bin", "idx", "mask"):  # of a run that was cut off
        (folder / f"{shard.name}.{kind}").unlink(missing_ok=True)
    if shard.mask is not None:
        mask = view_values(map_file(layout.shard_file(shard.name, "mask")), dtype=MASK_DTYPE)
    vocab_size = identity.tokenizer.vocab_size
    writer = ShardWriter(folder, receipt.unit.name, shard.split, vocab_size)
    try:
        for first, last in _runs(kept):
            here = slice(offsets[first], offsets[last])
            writer.append(
                ids[here],
                lengths=np.diff(offsets[first : last + 1]),
                rows=of_rows[first:last],
                mask=None if mask is None else mask[here],
            )
        return writer.finish()
    finally:
        writer.abort()


def _runs(marks: NDArray[np.bool_]) -> list[list[int]]:
    """Where runs of what is marked begin, and end."""
    edges = np.flatnonzero(np.diff(marks.astype(np.int8), prepend=0, append=0))
    found: list[list[int]] = edges.reshape(-1, 2).tolist()
    return found


def _put_in_place(layout: StoreLayout, forgotten: Forgotten, staged: Path) -> None:
    """Rename and remove: the manifest first and last, of each unit the receipt."""
    doing, step = forgotten.pending, forgotten.steps[-1]
    assert doing is not None
    manifest = Manifest.from_bytes(staged.read_bytes(), path=staged)
    remove_manifest(layout)
    snapshots.drop(layout, doing.snapshots)
    old: dict[str, list[str]] = {name: [] for name in doing.units}
    for match in map(SHARD_FILE.fullmatch, layout.upstream.names(layout.shards)):
        if match is not None and match["unit"] in old:
            old[match["unit"]].append(match[0])
    for name, files in old.items():
        _replace_unit(layout, name, files)
    snapshots.tidy(layout, manifest)
    gone = numbers_of_runs(doing.documents)
    for path in find_annotations(layout):
        if _stem(path) in doing.stale:
            path.unlink()
        elif (found := read_annotation(path)).facts.contents == step.contents:
            column, facts = _column_without(found.column, gone), found.facts
            write_annotation(layout, manifest, column, name=facts.name, key=facts.key)
    if layout.annotations.is_dir():
        sync_folder(layout.annotations)
    _remove_plans(layout, manifest, doing.plans)
    for folder in (layout.tmp, layout.rows):
        shutil.rmtree(folder, ignore_errors=True)
    staged.replace(layout.manifest)
    sync_folder(layout.root)


def _replace_unit(layout: StoreLayout, name: str, old: Sequence[str]) -> None:
    folder, own = layout.forgetting, layout.receipt(name)
    staged = folder / own.name
    if not staged.exists():  # it is in its place
        return
    receipt = Receipt.from_bytes(staged.read_bytes(), path=staged)
    own.unlink(missing_ok=True)
    sync_folder(layout.shards)
    for file in receipt.files:
        if (folder / file).exists():
            (folder / file).replace(layout.shards / file)
    for file in old:
        if file not in receipt.files:
            (layout.shards / file).unlink(missing_ok=True)
    sync_folder(layout.shards)
    staged.replace(own)
    sync_folder(layout.shards)


def _column_without(column: Column, gone: Ints) -> Column:
    """A column without some documents, and without texts that none of the others has."""
    kept = np.ones(len(column.values if isinstance(column, Numbers) else column.places), np.bool_)
    kept[gone] = False
    if isinstance(column, Numbers):
        given = None if column.given is None or column.given[kept].all() else column.given[kept]
        return Numbers(column.values[kept], given)
    places = column.places[kept]
    used = np.unique(places[places >= 0])
    texts = tuple(column.texts[place] for place in used.tolist())
    return column._replace(
        texts=texts, places=np.where(places < 0, -1, np.searchsorted(used, places))
    )


def _remove_plans(layout: StoreLayout, manifest: Manifest, contents: Sequence[str]) -> None:
    """Plans have the lengths of documents: those of other contents than the store's go."""
    splits = (None, *manifest.splits)
    ours = {content_fingerprint(manifest, split=split)[:_DIGITS] for split in splits}
    for name in layout.upstream.names(layout.layouts):
        is_plan = PLAN_FILE.fullmatch(name) is not None
        if not is_plan or name.removesuffix(".plan")[-_DIGITS:] not in ours:
            (layout.layouts / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        layout.layouts.rmdir()
    with contextlib.suppress(RuntimeError):  # there is no home folder
        for content in set(contents) - ours:
            for path in StoreLayout(cache_folder()).layouts.glob(f"*-{content}.plan"):
                path.unlink(missing_ok=True)
