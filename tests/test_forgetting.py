"""Documents that were forgotten are in no file of a store, whatever it was and whenever it died."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import xxhash
from tests.loader.stores import write_store
from tests.once import once
from tests.store.samples import tree
from tests.store.test_commit import needs_fork, run_and_die

import tokenmill
from tokenmill.errors import SourceError, StateError, StoreError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.packing import layout as lay_out
from tokenmill.store.check import check_store
from tokenmill.store.facts import (
    Manifest,
    facts_of,
    read_forgotten,
    read_manifest,
    read_receipt,
    write_forgotten,
)
from tokenmill.store.layout import StoreLayout, StoreLock, seal_of
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenmill.forgetting import ForgetResult

# Of row k: a word that stands in no other row, so that any of it left behind is found.
WORD = "u{:03d}w"
GONE = (0, 3, 7, 8, 11, 23)
ROWS = 24
PLAIN: dict[str, Any] = {"tokenizer": "bytes", "serial": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "splits": {"val": 0.4},
    "masks": {"format": "prompt-completion"},
    "pieces": {"max_length": 30, "too_long": "split"},
    "pairs": {"format": "preference"},
    "groups": {},
    "units": {"unit_bytes": "700B", "where": "n != 5"},
}


def text_of(row: int) -> str:
    return " ".join(f"{WORD.format(row)}{part}" for part in range(9))


def write_rows(path: Path, rows: range, **more: Any) -> Path:
    lines = []
    for row in rows:
        word = WORD.format(row)
        lines.append(
            {
                "id": f"{word}-id",
                "n": row,
                "text": text_of(row),
                "prompt": f"{word} prompt",
                "completion": text_of(row),
                "chosen": f"{word} chosen {text_of(row)}",
                "rejected": f"{word} rejected",
                **more,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options_of(kind: str, folder: Path) -> dict[str, Any]:
    """What the store of a kind is built with; its sources are beside it."""
    given = PLAIN | KINDS[kind] | {"inputs": folder / "sources", "out": folder / "store"}
    if kind == "groups":
        given["include"] = ["*.txt", "*.jsonl"]
    return given


def write_sources(kind: str, folder: Path, rows: int = ROWS) -> None:
    folder = folder / "sources"
    folder.mkdir(exist_ok=True)
    if kind != "groups":
        write_rows(folder / "rows.jsonl", range(rows))
        return
    for row in range(rows - 4):
        (folder / f"{row:03d}.txt").write_text(text_of(row))
    write_rows(folder / "rows.jsonl", range(rows - 4, rows))


def make_store(kind: str, folder: Path) -> Path:
    """A store with all that may know its documents: columns and plans too."""
    write_sources(kind, folder)
    options = options_of(kind, folder)
    tokenmill.build(**options)
    store = folder / "store"
    opened = Store(store, split=None)
    numbers = dict.fromkeys(opened.manifest.splits, 0)
    table: list[dict[str, Any]] = []
    for number in range(len(opened)):
        split = opened.shards[opened.locate(number)[0]].split
        row = row_of(opened, number)
        table.append({"split": split, "document": numbers[split], "row": row})
        numbers[split] += 1
    for split in numbers:
        own = [each for each in table if each["split"] == split]
        (folder / "columns.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "document": each["document"],
                        "name": f"{WORD.format(each['row'])}-name" if each["row"] % 2 else None,
                        "score": each["row"] + 1_000_000,
                    }
                )
                + "\n"
                for each in own
            )
        )
        if len(numbers) == 1:
            tokenmill.annotate(store, folder / "columns.jsonl", key="document", split=split)
        if kind != "pairs":
            lay_out(Store(store, split=split), seq_len=8, packings=["best-fit"])
    return store


def row_of(store: Store, number: int) -> int:
    """The row that a document is of, as the words of the rows tell it."""
    source = store.source(number)
    name = source.path.rpartition("/")[2]
    if name.endswith(".txt"):
        return int(name[:3])
    return source.row + (ROWS - 4 if len(store.manifest.sources) and _has_group(store) else 0)


def _has_group(store: Store) -> bool:
    return any(store.receipt(unit.name).unit.members for unit in store.manifest.units)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def make(root: Path) -> dict[str, Path]:
        found = {}
        for kind in KINDS:
            (root / kind).mkdir()
            found[kind] = make_store(kind, root / kind)
        return found

    return once(tmp_path_factory, "forgetting", make)


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Any:
    """A copy of the store of a kind, which is for one test."""

    def copy(kind: str, name: str = "copy") -> Path:
        shutil.copytree(made[kind], tmp_path / name)
        return tmp_path / name

    return copy


def ids_file(folder: Path, store: Path, rows: tuple[int, ...]) -> Path:
    """A list of the rows, as `source,row`."""
    opened = Store(store, split=None)
    found: dict[str, None] = {}
    for number in range(len(opened)):
        source = opened.source(number)
        if row_of(opened, number) in rows:
            found[f"{source.path}:{source.row}"] = None
    assert len(found) == len(rows)
    (folder / "gdpr.txt").write_text("\n".join(found) + "\n")
    return folder / "gdpr.txt"


def traces(folder: Path, row: int) -> Iterator[str]:
    """Files in which something of a row is: its words, their ids, or a hash of either."""
    word, texts = WORD.format(row), [text_of(row), f"{WORD.format(row)}-id"]
    signs = [word.encode(), word.encode("utf-16-le")]
    ids = np.frombuffer(word.encode(), np.uint8)
    signs += [ids.astype(kind).tobytes() for kind in (np.uint16, np.int32, np.int64)]
    for text in texts:
        for data in (text.encode(), np.array([*text.encode(), 256], np.uint16).tobytes()):
            digests = xxhash.xxh3_64(data), xxhash.xxh3_128(data)
            signs += [each.hexdigest().encode() for each in digests]
            signs += [each.digest() for each in digests]
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if any(sign in data for sign in signs) or word in path.name:
            yield path.relative_to(folder).as_posix()


def documents(store: Path) -> dict[tuple[str, int, int], tuple[list[int], list[int] | None]]:
    """Every document, by where it comes from: its ids and its mask."""
    found = {}
    opened = Store(store, split=None)
    for number in range(len(opened)):
        source, mask = opened.source(number), opened.mask(number)
        key = source.path, source.row, source.piece
        found[key] = opened[number].tolist(), None if mask is None else mask.tolist()
    return found


def plain(root: Path) -> dict[str, bytes]:
    """The files of a store, but for its locks, which name processes."""
    return {name: data for name, data in tree(root).items() if not name.startswith(".lock")}


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_of_a_forgotten_document_is_left_and_all_others_stay(
    copied: Any, tmp_path: Path, kind: str
) -> None:
    store = copied(kind)
    gone = tuple(row for row in GONE if kind != "units" or row != 5)
    (store / "tmp" / "unit-1-ab").mkdir(parents=True)
    (store / "tmp" / "unit-1-ab" / "x.bin").write_bytes(text_of(3).encode())
    (store / ".rows").mkdir()
    (store / ".rows" / "python.jsonl").write_text(text_of(3))
    for row in gone:
        assert any(name.endswith(".bin") for name in traces(store, row)), "nothing to be found"
    before, totals = documents(store), read_manifest(store).totals
    listed = ids_file(tmp_path, store, gone)
    opened = Store(store, split=None)
    wanted = {number for number in range(len(opened)) if row_of(opened, number) in gone}
    tokens = sum(len(opened[number]) for number in wanted)
    kept = {opened.source(number) for number in set(range(len(opened))) - wanted}
    keys = {(each.path, each.row, each.piece) for each in kept}

    asked: dict[str, Any] = {"ids": listed, "key": "source,row", "reason": "request 17"}
    dry = tokenmill.forget(store, **asked, dry_run=True)
    assert (dry.documents, dry.tokens, dry.dry_run) == (len(wanted), tokens, True)
    assert documents(store) == before
    result = tokenmill.forget(store, **asked)
    assert (result.documents, result.tokens) == (len(wanted), tokens)
    assert (result.of_documents, result.of_tokens) == (totals.documents, totals.tokens)

    for row in gone:
        assert list(traces(store, row)) == []
    for row in set(range(ROWS)) - set(gone) - ({5} if kind == "units" else set()):
        assert any(name.endswith(".bin") for name in traces(store, row))
    assert documents(store) == {key: value for key, value in before.items() if key in keys}
    now = read_manifest(store)
    used = now.totals.documents - now.totals.pieces + now.totals.split_rows
    assert now.totals.rows == used + now.totals.filtered + len(gone)
    assert (now.totals.forgotten, now.totals.forgotten_tokens) == (len(gone), tokens)
    assert now.version == 9
    report = tokenmill.verify(store)
    assert (report.findings, report.notes, report.mismatches) == ((), (), 0)
    assert report.documents_reencoded == now.totals.documents
    if len(now.splits) == 1:
        column = tokenmill.inspect(store, by="score").groups
        assert column is not None
        rows = {row_of(Store(store), number) for number in range(len(Store(store)))}
        assert sorted(int(each.name) for each in column) == sorted(r + 1_000_000 for r in rows)
        for name in tokenmill.inspect(store, by="name").groups or ():
            assert name.name == "null" or int(name.name[1:4]) in rows
    # The same again finds nothing, and says so.
    with pytest.raises(UsageError, match="of no document") as caught:
        tokenmill.forget(store, **asked)
    assert f"{len(wanted)} documents were forgotten before" in str(caught.value.hint)


def test_the_manifest_is_chained_to_those_before_and_says_how_many_and_why_not_which(
    copied: Any, tmp_path: Path
) -> None:
    store = copied("plain")
    seals = [seal_of((store / "tokenmill.json").read_bytes())]
    contents = [Store(store).content]
    tokenmill.forget(store, ids=[1, 2], reason="request 1")
    seals.append(seal_of((store / "tokenmill.json").read_bytes()))
    contents.append(Store(store).content)
    (tmp_path / "texts.txt").write_text(WORD.format(9) + "4\n")
    tokenmill.forget(store, match=tmp_path / "texts.txt")
    steps = read_manifest(store).forgotten
    assert [step.manifest for step in steps] == seals
    assert [step.contents for step in steps] == [{"train": content} for content in contents]
    assert [[(r.reason, r.documents) for r in step.reasons] for step in steps] == [
        [("request 1", 2)],
        [("a listed text was in it", 1)],
    ]
    known = read_forgotten(StoreLayout(store))
    assert known is not None
    assert [each.rows for each in known.units] == [(1, 2, 6, 1)]
    assert known.pending is None
    assert [each.documents for each in tokenmill.inspect(store).forgotten] == [2, 1]


def test_whole_units_and_splits_may_go(copied: Any, tmp_path: Path) -> None:
    store = copied("splits")
    val = Store(store, split="val")
    listed = "".join(f"{val.source(k).path}:{val.source(k).row}\n" for k in range(len(val)))
    (tmp_path / "all.txt").write_text(listed)
    tokenmill.forget(store, ids=tmp_path / "all.txt", key="source,row")
    assert list(read_manifest(store).splits) == ["train"]
    assert check_store(store).is_sound
    with pytest.raises(UsageError, match="would be left") as caught:
        tokenmill.forget(store, ids=range(len(Store(store))))
    assert "rm -r" in str(caught.value.hint)
    # A file by itself: the hash of it would be one of the text.
    groups = copied("units", "units")
    first = read_manifest(groups).units[0].name
    rows = [k for k in range(len(Store(groups))) if Store(groups).locate(k)[0] == 0]
    assert read_receipt(StoreLayout(groups), first).source.digest
    tokenmill.forget(groups, ids=rows)
    receipt = read_receipt(StoreLayout(groups), first)
    assert (receipt.source.digest, receipt.shards, receipt.counts.documents) == ("", (), 0)
    known = read_forgotten(StoreLayout(groups))
    assert known is not None
    assert known.units[0].source.digest == ""
    assert check_store(groups).is_sound


# -------------------------------------------------------------------------------------------------
# Killed at any step.


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that grew, with snapshots and a unit in retired/, columns and plans."""

    def make(root: Path) -> Path:
        sources, store = root / "sources", root / "store"
        sources.mkdir()
        for row in range(4):
            (sources / f"{row:03d}.txt").write_text(text_of(row))
        write_rows(sources / "rows.jsonl", range(20, 30), extra=False)
        options = {**PLAIN, "inputs": sources, "out": store, "val": 0.3}
        tokenmill.build(**options)
        (sources / "002b.txt").write_text(text_of(90))
        tokenmill.build(**options)
        tokenmill.annotate(store, columns="id")
        lay_out(Store(store), seq_len=8, packings=["best-fit"])
        assert list((store / "retired").iterdir())
        assert list((store / "snapshots").iterdir())
        assert list((store / "layouts").iterdir())
        return store

    return once(tmp_path_factory, "forgetting-grown", make)


def forget_some(store: Path) -> ForgetResult:
    return tokenmill.forget(store, match=store.parent / "texts.txt", reason="request 3")


@needs_fork
@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(17, id="some")]
)
def test_killed_at_any_step_the_same_command_ends_it_with_the_same_bytes(
    grown: Path, tmp_path: Path, stride: int
) -> None:
    (tmp_path / "texts.txt").write_text(f"{WORD.format(1)}0\n{WORD.format(23)}1\n")
    shutil.copytree(grown, tmp_path / "whole")
    before, old = documents(grown), read_manifest(grown)
    assert all(any(traces(grown, row)) for row in (1, 23))
    result = forget_some(tmp_path / "whole")
    assert (result.documents, len(result.snapshots), result.annotations) == (2, 1, ("id",))
    whole, after = plain(tmp_path / "whole"), documents(tmp_path / "whole")
    assert not any(any(traces(tmp_path / "whole", row)) for row in (1, 23))
    assert not any(name.startswith(("snapshots", "retired", "tmp")) for name in whole)
    new = read_manifest(tmp_path / "whole")

    at_event, seen = 0, set()
    while True:
        store = tmp_path / "killed"
        shutil.copytree(grown, store)
        killed = run_and_die(partial(forget_some, store), root=store, at_event=at_event)
        layout, state = StoreLayout(store), "closed"
        for path in layout.shards.glob("*.json"):
            for name, facts in read_receipt(layout, path.stem).files.items():
                assert facts_of((layout.shards / name).read_bytes()) == facts_of_file(facts)
        if layout.manifest.exists():
            manifest = Manifest.from_bytes(layout.manifest.read_bytes(), path=layout.manifest)
            assert manifest in (old, new)
            state = "old" if manifest == old else "new"
            assert documents(store) == (before if state == "old" else after)
            found = [each.problem for each in check_store(store).findings]
            assert all("being forgotten" in problem for problem in found)
            known = read_forgotten(layout)
            if known is not None and known.pending is not None:
                with pytest.raises(StoreError, match="being forgotten") as caught:
                    tokenmill.build(**PLAIN, inputs=grown.parent / "sources", out=store, val=0.3)
                assert "tokenmill forget" in str(caught.value.hint)
                state += " and begun"
        else:
            with pytest.raises(StoreError, match="being taken out"):
                Store(store)
        seen.add(state)
        if state == "new":
            with pytest.raises(UsageError, match="in no document"):
                forget_some(store)
        elif run_and_die(partial(forget_some, store), root=store, at_event=5 + at_event % 23):
            known = read_forgotten(layout)
            if known is None or known.pending is not None:
                again = forget_some(store)  # after being killed twice
                assert again.documents == 2
                assert again.resumed == (known is not None)
        assert plain(store) == whole
        shutil.rmtree(store)
        if not killed:
            break
        at_event += stride
    assert at_event > 100
    assert seen >= {"old", "old and begun", "closed", "new"}
    assert stride > 1 or "new and begun" in seen


def facts_of_file(facts: Any) -> Any:
    """Of a mask too: its bytes and checksum."""
    from tokenmill.store.facts import FileFacts

    return FileFacts(bytes=facts.bytes, checksum=facts.checksum)


def test_an_interrupted_run_is_ended_without_a_list_too_or_before_another_one(
    copied: Any, tmp_path: Path
) -> None:
    for other in (None, [5]):
        store = copied("plain", f"copy-{other}")
        run_and_die(partial(tokenmill.forget, store, ids=[3, 4]), root=store, at_event=40)
        assert not (store / "forgotten.json").read_text().count('"pending":null')
        with pytest.raises(StoreError, match="in the middle of forgetting"):
            tokenmill.forget(store, dry_run=True)
        result = tokenmill.forget(store, ids=other)
        assert (result.documents, result.resumed) == ((2, True) if other is None else (1, False))
        assert len(Store(store)) == ROWS - (2 if other is None else 3)
        assert check_store(store).is_sound


# -------------------------------------------------------------------------------------------------
# Whoever has it open, and what was made before.


def test_readers_that_have_it_open_get_what_it_was_or_an_error(copied: Any) -> None:
    store = copied("units")
    held, touched, opened = Store(store), Store(store), Store(store)
    before = [document.tolist() for document in held]  # all of its shards are mapped now
    other = next(k for k in range(len(before)) if touched.locate(k)[0] != touched.locate(6)[0])
    assert touched[6].tolist() == before[6]
    options: dict[str, Any] = {"seq_len": 16, "batch_size": 2, "shuffle": False, "prefetch": 0}
    running = Loader(held, **options, epochs=1)
    rows = [batch.input_ids.tolist() for batch in running]
    late = Loader(opened, **options, epochs=1)
    tokenmill.forget(store, ids=[6, other])
    assert [document.tolist() for document in held] == before
    assert [running.batch(step).input_ids.tolist() for step in range(len(running))] == rows
    assert touched[6].tolist() == before[6]
    for read in (lambda: touched[other], lambda: opened[6], lambda: [*opened], lambda: [*late]):
        with pytest.raises(StoreError, match="were forgotten since it was opened") as caught:
            read()
        assert "Store(path)" in str(caught.value.hint)
    unchanged = [k for k in range(len(before)) if k not in (6, other)]
    places = {opened.locate(k)[0] for k in (6, other)}
    for number in unchanged:
        if opened.locate(number)[0] not in places:
            assert opened[number].tolist() == before[number]


def test_views_states_and_columns_of_before_are_refused_with_what_to_do(
    copied: Any, tmp_path: Path
) -> None:
    store = copied("plain")
    tokenmill.ban(store, ids=[1], out=tmp_path / "kept.view")
    options: dict[str, Any] = {"seq_len": 16, "batch_size": 2}
    state = Loader(store, **options).state_dict()
    sent = pickle.dumps(Store(store))
    tokenmill.forget(store, ids=[3])
    tokenmill.forget(store, ids=[3])
    with pytest.raises(StoreError, match="2 documents were forgotten since") as caught:
        Store(tmp_path / "kept.view")
    assert "make the view again" in str(caught.value.hint)
    with pytest.raises(StateError, match="2 documents were forgotten since") as state_error:
        Loader(store, **options).load_state_dict(state)
    assert "weights alone" in str(state_error.value.hint)
    with pytest.raises(StoreError, match="2 documents were forgotten since"):
        pickle.loads(sent)
    assert len(Store(tokenmill.ban(store, ids=[1], out=tmp_path / "kept.view").out)) == ROWS - 3


def test_pair_loaders_refuse_a_state_of_before(copied: Any) -> None:
    store = copied("pairs")
    make = partial(tokenmill.PairLoader, seq_len=256, batch_size=2)
    state = make(Store(store)).state_dict()
    result = tokenmill.forget(store, ids=[3])
    assert result.documents == 2  # both sides
    with pytest.raises(UsageError, match="2 documents were forgotten since"):
        make(Store(store)).load_state_dict(state)


def test_hard_links_and_columns_of_another_state_are_told(copied: Any, tmp_path: Path) -> None:
    store = copied("plain")
    (found,) = (store / "shards").glob("*.bin")
    os.link(found, tmp_path / "export.bin")
    name = store / "annotations" / "name.column"
    name.write_bytes(name.read_bytes()[:-1] + b"x")
    result = tokenmill.forget(store, ids=[3])
    assert result.linked == (f"shards/{found.name}",)
    assert (result.annotations, result.stale) == (("score",), ("name",))
    assert not name.exists()
    assert list(traces(tmp_path, 3)) == ["export.bin"]


def test_plans_in_the_users_cache_go_too(
    copied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = copied("plain"), tmp_path / "cache"
    monkeypatch.setenv("TOKENMILL_CACHE", str(cache))
    shutil.move(store / "layouts", cache / "layouts")
    (cache / "layouts" / "best-fit-8-0123456789abcdef.plan").write_bytes(b"of another store")
    assert len([*(cache / "layouts").iterdir()]) == 2
    tokenmill.forget(store, ids=[3])
    assert [path.name for path in (cache / "layouts").iterdir()] == [
        "best-fit-8-0123456789abcdef.plan"
    ]


# -------------------------------------------------------------------------------------------------
# Built again.


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_that_is_built_again_is_byte_for_byte_what_forget_made(
    made: dict[str, Path], copied: Any, tmp_path: Path, kind: str
) -> None:
    store = copied(kind)
    gone = tuple(row for row in GONE if kind != "units" or row != 5)
    tokenmill.forget(store, ids=ids_file(tmp_path, store, gone), key="source,row")
    whole = {name: data for name, data in plain(store).items() if name != "runs.jsonl"}
    options = options_of(kind, made[kind].parent) | {"out": store}
    assert tokenmill.build(**options).nothing_to_do
    for path in (store / "shards").iterdir():
        path.unlink()
    (store / "tokenmill.json").unlink()
    result = tokenmill.build(**options)
    assert result.units_built
    assert {name: data for name, data in plain(store).items() if name != "runs.jsonl"} == whole
    for row in gone:
        assert list(traces(store, row)) == []


@pytest.mark.parametrize("more", [{"serial": True}, {"workers": 2}], ids=["alone", "shared"])
def test_units_of_a_compressed_file_leave_forgotten_rows_out(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Also where one worker decompresses for all."""
    plain_file, store = write_rows(tmp_path / "rows.jsonl", range(ROWS)), tmp_path / "store"
    source = tmp_path / "rows.jsonl.gz"
    source.write_bytes(gzip.compress(plain_file.read_bytes()))
    options: dict[str, Any] = {"inputs": source, "out": store, "unit_bytes": "2kB"}
    tokenmill.build(**PLAIN, **options)
    tokenmill.forget(store, ids=[0, 7, 8, 23])
    assert len(read_manifest(store).units) > 3
    shards = tree(store / "shards")
    for path in (store / "shards").iterdir():
        path.unlink()
    (store / "tokenmill.json").unlink()
    tokenmill.build(tokenizer="bytes", **options, **more)
    assert tree(store / "shards") == shards
    assert not any(any(traces(store, row)) for row in (0, 7, 8, 23))


@pytest.mark.parametrize("kind", ["plain", "splits", "masks"])
def test_an_imported_store_forgets_and_stays_without_them_when_it_is_imported_again(
    copied: Any, tmp_path: Path, kind: str
) -> None:
    tokenmill.export_store(copied(kind), to="datatrove", out=tmp_path / "ids")
    asked: dict[str, Any] = {"tokenizer": "bytes", "out": tmp_path / "back"}
    tokenmill.import_store(tmp_path / "ids", **asked)
    store = tmp_path / "back"
    opened = Store(store, split="train")
    words = {number: opened.decode(number)[:5] for number in (0, 4, len(opened) - 1)}
    gone = {int(re.findall(r"u(\d{3})w", word)[0]) for word in words.values()}
    before = documents(store)
    for row in gone:
        assert any(name.endswith(".bin") for name in traces(store, row)), "nothing to be found"
    lost = {opened.source(number) for number in words}
    result = tokenmill.forget(store, ids=[*words], split="train")
    assert result.documents == 3
    for _ in range(2):
        for row in gone:
            assert list(traces(store, row)) == []
        keys = {(each.path, each.row, each.piece) for each in lost}
        expected = {key: value for key, value in before.items() if key not in keys}
        assert documents(store) == expected
        assert tokenmill.verify(store).findings == ()
        assert tokenmill.import_store(tmp_path / "ids", **asked).nothing_to_do


def test_documents_of_wide_ids_are_forgotten(tmp_path: Path) -> None:
    """Of 4 bytes each."""
    texts = [[70_000 + 100 * row + place for place in range(9)] for row in range(ROWS)]
    shards = [texts[:10], texts[10:]]
    store = write_store(tmp_path / "store", shards, vocab_size=100_000)
    assert store.dtype == np.int32
    tokenmill.forget(tmp_path / "store", ids=[*GONE])
    left = Store(tmp_path / "store")
    assert [each.tolist() for each in left] == [
        text for row, text in enumerate(texts) if row not in GONE
    ]
    assert left.dtype == np.int32
    assert left.num_tokens == 9 * (ROWS - len(GONE))
    for path in (tmp_path / "store").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for row in GONE:
            assert np.array(texts[row][:3], np.int32).tobytes() not in data, path


def test_a_store_that_grows_leaves_forgotten_rows_out(tmp_path: Path) -> None:
    """Also where the group of a file is cut anew."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for row in (1, 2, 5, 6):
        (sources / f"{row:03d}.txt").write_text(text_of(row))
    write_rows(sources / "rows.jsonl", range(10, 16))
    options = PLAIN | {"inputs": sources, "out": tmp_path / "store"}
    tokenmill.build(**options)
    tokenmill.forget(tmp_path / "store", ids=ids_of(tmp_path / "store", (2, 12)), key="source,row")
    (sources / "004.txt").write_text(text_of(4))
    write_rows(sources / "more.jsonl", range(30, 33))
    result = tokenmill.build(**options)
    assert result.units_built
    expected = (1, 4, 5, 6, 10, 11, 13, 14, 15, 30, 31, 32)
    for row in range(40):
        assert bool([*traces(tmp_path / "store", row)]) == (row in expected)
    manifest = read_manifest(tmp_path / "store")
    assert (manifest.totals.documents, manifest.totals.forgotten) == (len(expected), 2)
    assert len(manifest.forgotten) == 1
    assert check_store(tmp_path / "store").is_sound
    # And once more, after another request.
    tokenmill.forget(tmp_path / "store", ids=ids_of(tmp_path / "store", (4, 31)), key="source,row")
    (sources / "003.txt").write_text(text_of(3))
    tokenmill.build(**options)
    for row in range(40):
        wanted = row in (3, *expected) and row not in (4, 31)
        assert bool([*traces(tmp_path / "store", row)]) == wanted
    assert check_store(tmp_path / "store").is_sound


def test_a_store_that_is_uploaded_and_grows_in_a_bucket_leaves_forgotten_rows_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "sources").mkdir()
    write_rows(tmp_path / "sources" / "one.jsonl", range(8))
    options = PLAIN | {"inputs": tmp_path / "sources"}
    tokenmill.build(**options, out=tmp_path / "store")
    tokenmill.forget(tmp_path / "store", ids=[3, 4])
    bucket, url = fsspec.filesystem("memory"), "memory://forgetting/store"
    for name, data in plain(tmp_path / "store").items():
        bucket.pipe(f"/forgetting/store/{name}", data)
    write_rows(tmp_path / "sources" / "two.jsonl", range(10, 12))
    assert tokenmill.build(**options, out=url).units_built
    store = Store(url)
    assert [store.source(number).row for number in range(6)] == [0, 1, 2, 5, 6, 7]
    assert (len(store), store.manifest.totals.forgotten, store.manifest.version) == (8, 2, 9)
    assert tokenmill.verify(url).findings == ()


def ids_of(store: Path, rows: tuple[int, ...]) -> list[str]:
    opened = Store(store)
    texts = [opened.decode(number) for number in range(len(opened))]
    found = [
        opened.source(n) for n, t in enumerate(texts) if any(WORD.format(r) in t for r in rows)
    ]
    assert len(found) == len(rows)
    return [f"{each.path}:{each.row}" for each in found]


@pytest.mark.parametrize("change", ["another text", "touched", "cut in another way"])
def test_a_file_that_changed_is_refused_until_one_says_that_the_rows_are_gone(
    tmp_path: Path, change: str
) -> None:
    source, store = tmp_path / "rows.jsonl", tmp_path / "store"
    write_rows(source, range(12))
    options = PLAIN | {"inputs": source, "out": store}
    tokenmill.build(**options)
    tokenmill.forget(store, ids=[4])
    os.utime(source, ns=(1, 1))
    if change == "another text":
        write_rows(source, range(11))
    elif change == "cut in another way":
        options |= {"unit_bytes": "700B", "rebuild": True}
    else:
        for path in (store / "shards").iterdir():
            path.unlink()
        (store / "tokenmill.json").unlink()
        tokenmill.build(**options)  # its bytes are those that were
        assert not [*traces(store, 4)]
        return
    before = plain(store)
    with pytest.raises(StoreError, match=r"1 rows of .* were forgotten") as caught:
        tokenmill.build(**options)
    assert "--forgotten removed" in str(caught.value.hint)
    assert plain(store) == before
    if change == "another text":
        write_rows(source, range(5, 12))
        tokenmill.build(**options, forgotten="removed")
        assert not [*traces(store, 4)]
        assert len(Store(store)) == 7
        known = read_forgotten(StoreLayout(store))
        assert known is not None
        assert (known.units, len(known.steps)) == ((), 1)
        assert len(read_manifest(store).forgotten) == 1
        assert check_store(store).is_sound
        assert tokenmill.build(**options).nothing_to_do


def test_a_file_that_changes_while_it_is_built_again_is_refused(tmp_path: Path) -> None:
    source, store = tmp_path / "rows.jsonl", tmp_path / "store"
    write_rows(source, range(12))
    found = source.stat()
    options = PLAIN | {"inputs": source, "out": store}
    tokenmill.build(**options)
    tokenmill.forget(store, ids=[4])
    # Of the same size and time: only reading it tells.
    source.write_text(source.read_text().replace(WORD.format(2), WORD.format(99)))
    os.utime(source, ns=(found.st_atime_ns, found.st_mtime_ns))
    for path in (store / "shards").iterdir():
        path.unlink()
    (store / "tokenmill.json").unlink()
    with pytest.raises(SourceError, match="changed since rows of it were forgotten"):
        tokenmill.build(**options)


def test_without_its_list_a_store_is_not_sound(copied: Any) -> None:
    store = copied("plain")
    tokenmill.forget(store, ids=[4])
    known = read_forgotten(StoreLayout(store))
    assert known is not None
    write_forgotten(StoreLayout(store), known.but(units=()))
    assert [each.file for each in check_store(store).findings] == ["forgotten.json"]
    (store / "forgotten.json").unlink()
    (finding,) = check_store(store).findings
    assert "a build would make again" in finding.problem


# -------------------------------------------------------------------------------------------------
# Bad input.


def test_what_cannot_be_forgotten_is_refused_and_nothing_changes(
    copied: Any, tmp_path: Path
) -> None:
    store = copied("plain")
    before = plain(store)
    (tmp_path / "none.txt").write_text("999\n")
    (tmp_path / "texts.txt").write_text("no document holds this\n")
    tokenmill.ban(store, ids=[1], out=tmp_path / "kept.view")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "none is given"),
        ({"ids": [1], "match": tmp_path / "texts.txt"}, "both are given"),
        ({"ids": tmp_path / "none.txt"}, "of no document"),
        ({"match": tmp_path / "texts.txt"}, "in no document"),
        ({"ids": [1], "key": "unknown"}, "no column"),
        ({"ids": []}, "is empty"),
        ({"store": tmp_path / "kept.view", "ids": [1]}, "is a file, such as a view"),
        ({"store": "s3://bucket/store", "ids": [1]}, "no byte is left"),
        ({"ids": range(ROWS)}, "would be left"),
    ]
    for asked, why in wrong:
        with pytest.raises(UsageError, match=why) as caught:
            tokenmill.forget(**{"store": store, **asked})
        assert caught.value.hint
    with pytest.raises(StoreError, match="no store"):
        tokenmill.forget(tmp_path / "nowhere", ids=[1])
    assert tokenmill.forget(store, ids=[999], missing="count").documents == 0
    with StoreLock(StoreLayout(store)), pytest.raises(StoreError, match="two builds at once"):
        tokenmill.forget(store, ids=[1])
    assert plain(store) == before


def test_a_damaged_shard_is_not_made_sound_by_forgetting(copied: Any) -> None:
    store = copied("plain")
    (path,) = (store / "shards").glob("*.bin")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"was changed.*called sound"):
        tokenmill.forget(store, ids=[1])


def test_a_build_that_has_begun_is_ended_first(copied: Any) -> None:
    store = copied("plain")
    (store / "parts").mkdir()
    with pytest.raises(StoreError, match="has begun and not ended"):
        tokenmill.forget(store, ids=[1])
