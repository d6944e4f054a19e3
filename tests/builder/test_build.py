from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import (
    begin_older_store,
    byte_ids,
    documents,
    make_texts,
    tree,
    write_jsonl,
)
from tests.sources.reading import compress

import tokenmill
from tokenmill.builder.plan import whole_bytes
from tokenmill.builder.progress import Monitor
from tokenmill.builder.worker import EngineReport, ProgressReport
from tokenmill.cli import show
from tokenmill.engines.load import describe
from tokenmill.errors import (
    MemoryBudgetError,
    StoreError,
    TooManyRejectsError,
    UsageError,
)
from tokenmill.runners.local import TaskReport, WorkerReady
from tokenmill.sources import base
from tokenmill.words import parse_size

if TYPE_CHECKING:
    from tokenmill.builder.progress import BuildResult, Progress


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(inputs: object, out: str = "store", **options: object) -> BuildResult:
    settings: dict[str, object] = {"tokenizer": "bytes", "memory": "1GB"}
    # In this process unless a test asks for workers: starting one takes longer than most tests.
    settings["serial"] = "workers" not in options
    return tokenmill.build(inputs, out=out, **(settings | options))  # type: ignore[arg-type]


def test_documents_come_out_in_the_order_they_went_in() -> None:
    texts = make_texts(300)
    write_jsonl(Path("b.jsonl"), texts[200:])
    write_jsonl(Path("a.jsonl"), texts[:200])
    result = build(["b.jsonl", "a.jsonl"], unit_bytes=2000)
    assert documents(Path("store")) == byte_ids(texts)
    assert result.totals.documents == 300
    assert result.totals.tokens == sum(map(len, byte_ids(texts)))
    assert result.units_built > 10
    assert result.peak_memory_bytes > 0


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_the_bytes_are_the_same_for_any_number_of_workers_and_any_batch(name: str) -> None:
    texts = [*make_texts(400), "", "a\ud7ffb"]
    write_jsonl(Path("plain"), [*texts[:100], b"{broken", *texts[100:]])
    data = Path("plain").read_bytes()
    Path(name).write_bytes(gzip.compress(data, mtime=0) if name.endswith("gz") else data)
    options = {"unit_bytes": 5000, "val": 0.1, "max_rejects": 1.0}
    build(name, "serial", serial=True, **options)
    reference = tree(Path("serial"))
    assert len([file for file in reference if file.endswith(".bin")]) > 10
    assert any("-val.bin" in file for file in reference)
    for workers in (1, 4):
        build(name, f"w{workers}", workers=workers, memory="3GB", **options)
        assert tree(Path(f"w{workers}")) == reference


@pytest.mark.parametrize("kind", ["zst", "xz", "bz2", None])
def test_workers_that_share_streams_build_the_same_bytes(kind: str | None) -> None:
    # The last one has few units; without compression, the separator makes it a stream.
    names = [f"{number}.txt" + (f".{kind}" if kind else "") for number in range(3)]
    for number, name in enumerate(names):
        texts = make_texts(400 if number < 2 else 20, seed=number)
        texts[7] = "x" * 9000  # over a unit
        data = "\n\n".join(texts).encode()
        Path(name).write_bytes(compress(data, kind) if kind else data)
    options = {"unit_bytes": 3000, "separator": "\n\n", "val": 0.1, "limit": 700}
    whole = build(names, "serial", serial=True, **options)
    assert whole.units_built > 10
    build(names, "shared", workers=3, memory="3GB", **options)
    assert tree(Path("shared")) == tree(Path("serial"))
    # What is gone is built again, and nothing else.
    for shard in sorted(Path("shared/shards").glob("*.json"))[::4]:
        shard.unlink()
    Path("shared/tokenmill.json").unlink()
    again = build(names, "shared", workers=3, memory="3GB", **options)
    assert again.units_built == -(-whole.units_built // 4)
    assert tree(Path("shared")) == tree(Path("serial"))


def test_the_same_command_again_finds_nothing_to_do() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(50))
    first = build("a.jsonl", unit_bytes=1000)
    before = tree(Path("store"))
    again = build("a.jsonl", unit_bytes=1000)
    assert (first.nothing_to_do, again.nothing_to_do) == (False, True)
    assert again.units_built == 0
    assert again.totals == first.totals
    assert tree(Path("store")) == before


def test_new_files_are_added_and_old_shards_keep_their_bytes() -> None:
    Path("data").mkdir()
    write_jsonl(Path("data/m.jsonl"), make_texts(60))
    build("data", unit_bytes=1500)
    before = tree(Path("store"))
    write_jsonl(Path("data/a.jsonl"), make_texts(30, seed=1))
    result = build("data", unit_bytes=1500)
    after = tree(Path("store"))
    old = {name: data for name, data in before.items() if name.startswith("shards/")}
    assert old.items() <= after.items()
    assert result.units_resumed == sum(name.endswith(".json") for name in old) > 5
    assert documents(Path("store")) == byte_ids([*make_texts(30, seed=1), *make_texts(60)])
    build("data", "fresh", unit_bytes=1500)
    assert tree(Path("fresh")) == after


def test_only_the_file_that_changed_is_built_again() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(40))
    write_jsonl(Path("b.jsonl"), make_texts(40, seed=1))
    inputs = ["a.jsonl", "b.jsonl"]
    first = build(inputs, unit_bytes=1000)
    write_jsonl(Path("b.jsonl"), make_texts(20, seed=2))
    second = build(inputs, unit_bytes=1000)
    assert 0 < second.units_built < first.units_built
    assert documents(Path("store")) == byte_ids([*make_texts(40), *make_texts(20, seed=2)])
    build(inputs, "fresh", unit_bytes=1000)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_a_file_that_was_only_touched_is_not_built_again() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(40))
    build("a.jsonl", unit_bytes=1000)
    os.utime("a.jsonl", ns=(1, 1))
    result = build("a.jsonl", unit_bytes=1000)
    assert (result.units_built, result.units_resumed) == (0, result.units_total)
    assert build("a.jsonl", unit_bytes=1000).nothing_to_do
    build("a.jsonl", "fresh", unit_bytes=1000)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_an_edit_that_keeps_size_and_time_of_other_units_is_found_by_their_bytes() -> None:
    path = write_jsonl(Path("a.jsonl"), make_texts(200))
    build("a.jsonl", unit_bytes=2000)
    data = bytearray(path.read_bytes())
    place = data.index(b"mill", 5000)
    data[place : place + 4] = b"MILL"
    path.write_bytes(data)
    result = build("a.jsonl", unit_bytes=2000)
    assert result.units_built == 1
    build("a.jsonl", "fresh", unit_bytes=2000)
    assert tree(Path("fresh")) == tree(Path("store"))


def change_behind_its_time(path: Path, old: bytes, new: bytes) -> None:
    """Other bytes, the same size and modification time."""
    facts = path.stat()
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_change_that_keeps_size_and_time_is_noticed(name: str) -> None:
    path = Path(name)
    write_jsonl(path, make_texts(200))
    build(name, unit_bytes=2000)
    change_behind_its_time(path, b"mill", b"MILL")
    result = build(name, unit_bytes=2000)
    assert result.units_built == 1
    assert build(name, unit_bytes=2000).nothing_to_do
    build(name, "fresh", unit_bytes=2000)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_what_leaves_the_bytes_alone_is_no_change() -> None:
    path = write_jsonl(Path("a.jsonl"), make_texts(40))
    build("a.jsonl", unit_bytes=1000)
    before = tree(Path("store"))
    path.chmod(0o600)
    assert build("a.jsonl", unit_bytes=1000).units_built == 0
    assert build("a.jsonl", unit_bytes=1000).nothing_to_do
    assert tree(Path("store")) == before


def test_sources_are_held_against_their_receipts_where_that_is_asked_for() -> None:
    path = write_jsonl(Path("a.jsonl"), make_texts(200))
    Path("b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    inputs = ["a.jsonl", "b.jsonl.gz"]
    build(inputs, unit_bytes=2000)
    change_behind_its_time(path, b"mill", b"MILL")
    # As if the store was copied after the change, without its times.
    later = path.stat().st_ctime_ns + 10**9
    for receipt in Path("store/shards").glob("*.json"):
        os.utime(receipt, ns=(later, later))
    assert build(inputs, unit_bytes=2000).nothing_to_do
    assert build(inputs, unit_bytes=2000, verify_sources=True).units_built == 1
    assert build(inputs, unit_bytes=2000, verify_sources=True).nothing_to_do
    build(inputs, "fresh", unit_bytes=2000)
    assert tree(Path("fresh")) == tree(Path("store"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"eos": False}, "eos"),
        ({"text_field": "body"}, "text_field"),
        ({"special_tokens": "reject"}, "special_tokens"),
        ({"val": 0.5}, "val"),
    ],
)
def test_another_configuration_is_refused_with_the_way_out(
    change: dict[str, Any], word: str
) -> None:
    lines = [json.dumps({"text": text, "body": text}).encode() for text in make_texts(30)]
    write_jsonl(Path("a.jsonl"), lines)
    build("a.jsonl", unit_bytes=1000)
    before = tree(Path("store"))
    with pytest.raises(StoreError, match="mix tokens of two kinds") as caught:
        build("a.jsonl", unit_bytes=1000, **change)
    assert word in caught.value.message
    assert "--rebuild" in str(caught.value.hint)
    assert tree(Path("store")) == before
    build("a.jsonl", unit_bytes=1000, rebuild=True, **change)
    build("a.jsonl", "fresh", unit_bytes=1000, **change)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_files_that_are_no_longer_inputs_are_refused_or_pruned() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(10))
    write_jsonl(Path("b.jsonl"), make_texts(10, seed=1))
    build(["a.jsonl", "b.jsonl"])
    before = tree(Path("store"))
    with pytest.raises(StoreError, match=r"'a\.jsonl'") as caught:
        build("b.jsonl")
    assert "--prune" in str(caught.value.hint)
    assert tree(Path("store")) == before
    build("b.jsonl", prune=True)
    build("b.jsonl", "fresh")
    assert tree(Path("fresh")) == tree(Path("store"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_limit_takes_the_first_rows_and_can_be_raised_and_lowered(name: str) -> None:
    texts = make_texts(120)
    data = write_jsonl(Path("raw"), texts).read_bytes()
    Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for limit in (7, 50, 50, 119, None, 30):
        options: dict[str, object] = {"unit_bytes": 1000, "limit": limit}
        if limit in (7, None):
            options |= {"workers": 2, "memory": "2GB"}
        result = build(name, "store", **options)
        assert documents(Path("store")) == byte_ids(texts[:limit])
        totals = result.totals
        assert totals.rows == totals.documents + totals.skipped
        assert result.nothing_to_do == (limit == 50 and result.units_built == 0)
    build(name, "fresh", unit_bytes=1000, limit=30)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_every_row_is_accounted_for_and_rejects_say_where() -> None:
    rows = ["one", "", b"{not json", b'{"id": 1}', b'{"text": null}', b'{"text": 5}', "two"]
    write_jsonl(Path("a.jsonl"), rows)
    result = build("a.jsonl", max_rejects=1.0)
    assert (result.totals.rows, result.totals.documents) == (7, 2)
    assert (result.totals.empty, result.totals.rejected) == (1, 4)
    with tokenmill.Store("store") as store:
        rejects = [(reject.file, reject.row, reject.reason) for reject in store.rejects()]
        assert [store.source(k).row for k in range(2)] == [0, 6]
        assert store.source(1).path == "a.jsonl"
        assert store.decode(1) == "two"
    assert rejects == [
        ("a.jsonl", 2, "invalid-json"),
        ("a.jsonl", 3, "missing-field"),
        ("a.jsonl", 4, "null-text"),
        ("a.jsonl", 5, "not-a-string"),
    ]


def test_too_many_bad_rows_stop_the_build_and_the_rest_is_resumed() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(30))
    write_jsonl(Path("b.jsonl"), [*make_texts(30, seed=1), b"oops"])
    with pytest.raises(TooManyRejectsError, match=r"1 of 31 rows in 'b\.jsonl'") as caught:
        build(["a.jsonl", "b.jsonl"])
    assert "invalid-json at line 31 of 'b.jsonl': " in caught.value.message
    assert str(caught.value.hint).endswith("--max-rejects 0.04")
    assert not Path("store/tokenmill.json").exists()
    assert not Path("store/tmp").exists()
    result = build(["a.jsonl", "b.jsonl"], max_rejects=0.04)
    assert (result.units_built, result.units_resumed) == (1, 1)
    assert result.totals.rejected == 1


def write_old_store(inputs: object, **options: object) -> dict[str, bytes]:
    """A store as it was written when units were cut by each file alone."""
    build(inputs, "new", **options)
    begin_older_store(Path("old"), like=Path("new"), unit_bytes=None)
    build(inputs, "old", **options)
    return tree(Path("old"))


def large_texts(count: int, *, seed: int = 0) -> list[str]:
    return [text * 40 for text in make_texts(count, seed=seed)]


def test_a_small_input_has_units_for_many_workers_and_the_same_for_any_number() -> None:
    texts = large_texts(300)
    assert write_jsonl(Path("a.jsonl"), texts).stat().st_size > 1_500_000
    result = build("a.jsonl", "serial")
    assert result.units_built > 5
    assert documents(Path("serial")) == byte_ids(texts)
    two = build("a.jsonl", "two", workers=2, memory="2GB")
    assert (two.workers, two.idle_workers) == (2, 0)
    assert tree(Path("two")) == tree(Path("serial"))


def test_a_small_input_that_grows_is_cut_anew_when_it_must_be() -> None:
    write_jsonl(Path("a.jsonl"), large_texts(300))
    write_jsonl(Path("b.jsonl"), ["x" * 500_000] * 16)
    few = build(["a.jsonl"]).units_total
    assert build(["a.jsonl", "b.jsonl"]).units_resumed == 0
    build(["a.jsonl", "b.jsonl"], "fresh")
    assert tree(Path("store")) == tree(Path("fresh"))
    assert build("a.jsonl", prune=True).units_total == few


@pytest.mark.parametrize("state", ["finished", "begun"])
def test_an_older_store_keeps_its_units(state: str) -> None:
    write_jsonl(Path("a.jsonl"), large_texts(300))
    Path("texts").mkdir()
    for number in range(12):
        Path(f"texts/{number}.txt").write_text(f"{number} " * 20_000)
    inputs = ["a.jsonl", "texts"]
    before = write_old_store(inputs)
    assert sum(name.endswith(".json") for name in before) == 4  # three units and the manifest
    if state == "begun":
        Path("old/tokenmill.json").unlink()
        next(Path("old/shards").glob("a-*.json")).unlink()
    result = build(inputs, "old")
    assert (result.units_built, result.units_resumed) == ((0, 3) if state == "finished" else (1, 2))
    assert tree(Path("old")) == before
    # With other options nothing of it is left to keep.
    with pytest.raises(StoreError, match=r"\(eos '.*' -> none, add_eos True -> False\)"):
        build(inputs, "old", eos=False)
    build(inputs, "old", eos=False, rebuild=True)
    build(inputs, "fresh", eos=False)
    assert tree(Path("old")) == tree(Path("fresh")) != before


def test_a_store_of_before_keeps_units_that_are_cut_finer_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "FINER_BYTES", 1 << 20)
    write_jsonl(Path("a.jsonl"), ["x" * 100_000] * 90)
    assert build("a.jsonl", "new").units_built == 32
    begin_older_store(Path("old"), like=Path("new"))
    assert build("a.jsonl", "old").units_built == 18
    assert build("a.jsonl", "old").nothing_to_do


def test_bad_rows_of_a_small_input_count_against_all_of_it() -> None:
    texts: list[object] = [*large_texts(300)]
    texts[150:152] = [b"oops", b"oops"]
    write_jsonl(Path("a.jsonl"), texts)
    # Two of the few rows of their unit, and few of all.
    assert build("a.jsonl").totals.rejected == 2
    with tokenmill.Store("store") as store:
        most = max(unit.rows for unit in store.manifest.units)
    assert most < 100
    texts[::60] = [b"oops"] * 5
    write_jsonl(Path("a.jsonl"), texts)
    with pytest.raises(TooManyRejectsError, match="7 of the 300 rows of the input") as caught:
        build("a.jsonl")
    assert not Path("store/tokenmill.json").exists()
    assert "store/rejects" in str(caught.value.hint)
    share = str(caught.value.hint).split("--max-rejects ")[1]
    result = build("a.jsonl", max_rejects=float(share))
    assert (result.units_built, result.totals.rejected) == (0, 7)
    # All of them are too many for any unit.
    write_jsonl(Path("b.jsonl"), [b"oops"] * 100_000)
    with pytest.raises(
        TooManyRejectsError, match=r"4,096 rows in bytes 0 to 262,143 of 'b\.jsonl' were"
    ):
        build("b.jsonl", "other")


def test_workers_without_a_unit_are_counted() -> None:
    write_jsonl(Path("a.jsonl"), ["one"])
    result = build("a.jsonl", workers=3, memory="3GB")
    assert (result.workers, result.idle_workers) == (3, 2)
    text = dict(show.build_rows(result))["time"]
    assert text.endswith("with 3 workers, 2 of them idle for lack of units")
    assert build("a.jsonl", workers=3, memory="3GB").idle_workers == 0


def test_a_document_too_large_for_the_budget_is_a_rejected_row(bpe_tokenizer_dir: Path) -> None:
    # Without a space it cannot be cut, so that an engine would have to encode it whole.
    largest = whole_bytes(parse_size("1GB"))
    write_jsonl(Path("a.jsonl"), ["small", "y" * (largest + 1), "also small", "x" * (largest // 2)])
    options: dict[str, Any] = {"tokenizer": bpe_tokenizer_dir, "max_rejects": 0.5}
    result = build("a.jsonl", **options)
    assert (result.totals.documents, result.totals.rejected) == (3, 1)
    with tokenmill.Store("store") as store:
        (reject,) = store.rejects()
    assert (reject.row, reject.reason) == (1, "too-large")
    assert "without a place where this tokenizer lets a document be cut" in reject.detail
    assert build("a.jsonl", memory="900MB", **options).nothing_to_do
    # A larger budget takes it, and only that unit is built again; the old budget still fits after.
    grown = build("a.jsonl", memory="4GB", **options)
    assert (grown.totals.documents, grown.totals.rejected) == (4, 0)
    assert build("a.jsonl", memory="5GB", **options).nothing_to_do
    assert build("a.jsonl", **options).totals.rejected == 1


@pytest.mark.parametrize("engine", ["auto", pytest.param("tokenizers", marks=pytest.mark.slow)])
def test_a_long_document_is_encoded_in_pieces(bpe_tokenizer_dir: Path, engine: str) -> None:
    largest = whole_bytes(parse_size("400MB"))
    texts = ["short", " ".join(make_texts(30)) * 300, "".join(make_texts(5))]
    assert len(texts[1].encode()) > 2 * largest
    write_jsonl(Path("a.jsonl"), texts)
    Path("text").mkdir()
    Path("text/a.txt").write_text(texts[1])
    loaded = tokenmill.load_tokenizer(bpe_tokenizer_dir, engine="tokenizers")
    expected = [ids.tolist() for ids in loaded.encode_batch(texts)]
    options: dict[str, Any] = {"tokenizer": bpe_tokenizer_dir, "memory": "400MB", "eos": False}
    options["engine"] = engine
    build("a.jsonl", **options)
    assert documents(Path("store")) == expected
    build("text", "other", **options)
    assert documents(Path("other")) == [expected[1]]
    assert build("text", "other", **{**options, "memory": "4GB"}).nothing_to_do
    assert tokenmill.verify("store", sample=3).ok


def test_what_would_do_for_a_document_that_is_too_large_is_named(bpe_tokenizer_dir: Path) -> None:
    Path("text").mkdir()
    Path("text/a.txt").write_text("y" * (whole_bytes(parse_size("1GB")) + 1))
    with pytest.raises(TooManyRejectsError) as caught:
        build("text", tokenizer=bpe_tokenizer_dir)
    hint = str(caught.value.hint)
    assert "--separator" in hint
    enough = hint.split("--memory ")[1].split(",")[0]
    assert build("text", tokenizer=bpe_tokenizer_dir, memory=enough).totals.documents == 1


def test_a_budget_that_is_too_small_names_the_smallest_that_works() -> None:
    write_jsonl(Path("a.jsonl"), ["text"])
    with pytest.raises(MemoryBudgetError, match="too small") as caught:
        build("a.jsonl", memory="100MB")
    smallest = str(caught.value.hint).split("--memory ")[1].split(",")[0]
    assert build("a.jsonl", memory=smallest).totals.documents == 1


def test_validation_documents_are_chosen_by_their_text_and_nothing_is_lost() -> None:
    texts = make_texts(400)
    write_jsonl(Path("a.jsonl"), texts)
    result = build("a.jsonl", val=0.2, unit_bytes=3000)
    train, val = documents(Path("store")), documents(Path("store"), split="val")
    assert sorted(train + val) == sorted(byte_ids(texts))
    assert 40 < len(val) < 120
    assert result.splits["val"].documents == len(val)
    with tokenmill.Store("store", split="val") as store:
        rows = [store.source(k).row for k in range(len(store))]
        assert [texts[row] for row in rows] == [store.decode(k) for k in range(len(store))]
    # The same text goes to the same side, whatever the file is called and how it is cut.
    write_jsonl(Path("other.jsonl"), reversed(texts))
    build("other.jsonl", "other", val=0.2)
    assert sorted(documents(Path("other"), split="val")) == sorted(val)


def test_text_files_are_one_document_each_and_remember_their_names() -> None:
    folder = Path("code")
    names = [f"pkg{i % 7}/module_{i}.py" for i in range(300)]
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {i}\nprint({i})\n")
    build("code")
    with tokenmill.Store("store") as store:
        assert len(store) == 300
        for k in (0, 17, 299):
            assert Path(store.source(k).path).read_text() == store.decode(k)


def test_bos_and_eos_frame_every_document() -> None:
    write_jsonl(Path("a.jsonl"), ["ab", "c"])
    build("a.jsonl", eos=False)
    assert documents(Path("store")) == [[97, 98], [99]]
    with tokenmill.Store("store") as store:
        assert store.eos_id is None
        assert store.dtype == np.uint16


def test_an_output_folder_with_other_things_in_it_is_left_alone() -> None:
    write_jsonl(Path("a.jsonl"), ["ab"])
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        build("a.jsonl", "mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]
    Path("file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        build("a.jsonl", "file")


def test_progress_reaches_the_end_and_never_runs_backwards() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(2000))
    seen: list[Progress] = []
    build("a.jsonl", unit_bytes=20_000, workers=2, memory="2GB", on_progress=seen.append)
    assert [seen[0].phase, seen[-1].phase] == ["planning", "done"]
    started = [p for p in seen if p.phase in ("planning", "starting")]
    assert all((p.bytes_per_second, p.eta_seconds) == (0.0, None) for p in started)
    assert seen[-1].bytes_done == seen[-1].bytes_total == Path("a.jsonl").stat().st_size
    assert seen[-1].documents == 2000
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert all(p.memory_budget_bytes == 2 * 10**9 for p in seen)


def test_the_rate_counts_from_the_first_worker_that_is_ready() -> None:
    seen: list[Progress] = []
    monitor = Monitor(bytes_total=2000, on_progress=seen.append, num_workers=1)
    monitor.tell()
    time.sleep(0.5)
    before = time.monotonic()
    monitor.tell()
    monitor.on_event(WorkerReady(0, os.getpid(), EngineReport("bytes", "bytes", None)))
    report = ProgressReport("a-0", input_bytes=1000, documents=1, tokens=1000, rejected=0)
    monitor.on_event(TaskReport(0, report))
    monitor.tell()
    assert seen[-1].bytes_per_second >= 1000 / (time.monotonic() - before)
    assert seen[-1].eta_seconds is not None
    assert seen[-1].eta_seconds <= time.monotonic() - before


def test_a_worker_that_waits_for_the_reference_is_still_starting() -> None:
    seen: list[Progress] = []
    monitor = Monitor(bytes_total=2000, on_progress=seen.append, num_workers=1)
    ready = EngineReport("gigatoken", "tokenizers", None, is_proved=False)
    monitor.on_event(WorkerReady(0, os.getpid(), ready))
    monitor.tell()
    assert seen[-1].phase == "starting"
    time.sleep(0.5)
    before = time.monotonic()
    monitor.tell()
    report = ProgressReport("a-0", input_bytes=1000, documents=1, tokens=1000, rejected=0)
    monitor.on_event(TaskReport(0, report))
    monitor.tell()
    assert seen[-1].phase == "building"
    assert seen[-1].bytes_per_second >= 1000 / (time.monotonic() - before)


def test_the_profile_says_where_the_time_went() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(500))
    result = build("a.jsonl", unit_bytes=10_000, profile="profile.json")
    profile = json.loads(Path("profile.json").read_text())
    assert {"read", "parse", "encode", "write", "wait"} <= set(profile["stage_seconds"])
    assert len(profile["units"]) == result.units_built
    assert profile["limiting_stage"] == result.limiting_stage


def test_the_bytes_do_not_depend_on_the_size_of_batches(bpe_tokenizer_dir: Path) -> None:
    special = next(iter(describe(bpe_tokenizer_dir).special_tokens))
    rows: list[object] = [f"{text} {'word ' * 400}" for text in make_texts(6000)]
    rows[::50] = [b"{bad"] * len(rows[::50])
    rows[7::70] = [f"{row!s} {special}" for row in rows[7::70]]
    write_jsonl(Path("a.jsonl"), rows)
    assert Path("a.jsonl").stat().st_size > 10 * 10**6
    options = {"tokenizer": bpe_tokenizer_dir, "special_tokens": "reject", "max_rejects": 0.1}
    build("a.jsonl", "small", memory="430MB", unit_bytes=8 << 20, **options)
    build("a.jsonl", "large", memory="8GB", unit_bytes=8 << 20, **options)
    assert tree(Path("small")) == tree(Path("large"))
    with tokenmill.Store("small") as store:
        found = [reject.row for reject in store.rejects() if reject.unit == store.shards[0].unit]
    assert found == sorted(found)
    assert len(found) > 100


def test_a_store_inside_an_input_folder_is_not_read_as_input() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(20))
    Path("notes.txt").write_text("read me")
    first = build(".", "store")
    again = build(".", "store")
    assert first.totals.documents == 21
    assert again.nothing_to_do
    # Not even one that an interrupted build left behind.
    Path("store/tokenmill.json").unlink()
    assert build(".", "store").totals == first.totals
