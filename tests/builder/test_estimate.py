from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.builder.stores import make_texts, write_jsonl

import tokenmill
from tokenmill.builder.run import make_run
from tokenmill.options import BuildOptions


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_tells_what_the_build_will_do_and_writes_nothing() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(2000))
    options = {"tokenizer": "bytes", "out": "store", "unit_bytes": 20_000, "workers": 2}
    plan = tokenmill.plan("a.jsonl", memory="2GB", **options)  # type: ignore[arg-type]
    assert not Path("store").exists()
    result = tokenmill.build("a.jsonl", memory="2GB", **options)  # type: ignore[arg-type]
    assert plan.units_to_build == result.units_built
    assert plan.bytes_to_build == Path("a.jsonl").stat().st_size
    assert plan.workers == result.workers == 2
    # The sample holds the whole of so small an input, but for the rounding of unit sizes.
    assert plan.estimated_tokens == pytest.approx(result.totals.tokens, rel=0.1)
    assert plan.estimated_documents == pytest.approx(2000, rel=0.1)
    shards = sum(path.stat().st_size for path in Path("store/shards").glob("*.[bi]*"))
    assert plan.estimated_disk_bytes == pytest.approx(shards, rel=0.2)
    assert plan.estimated_seconds > 0


def test_a_plan_for_a_finished_store_has_nothing_to_build() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(50))
    tokenmill.build("a.jsonl", tokenizer="bytes", out="store", memory="1GB", serial=True)
    plan = tokenmill.plan("a.jsonl", tokenizer="bytes", out="store", memory="1GB")
    assert (plan.units_to_build, plan.units_complete) == (0, 1)
    assert plan.estimated_tokens == 0


def test_a_plan_rejects_what_the_build_would_reject(bpe_tokenizer_dir: Path) -> None:
    texts = [
        f"{text}<|endoftext|>" if i % 5 == 0 else text for i, text in enumerate(make_texts(50))
    ]
    write_jsonl(Path("a.jsonl"), texts)
    options = {"tokenizer": bpe_tokenizer_dir, "special_tokens": "reject", "max_rejects": 0.5}
    plan = tokenmill.plan("a.jsonl", out="store", **options)  # type: ignore[arg-type]
    result = tokenmill.build("a.jsonl", out="store", serial=True, **options)  # type: ignore[arg-type]
    assert plan.sample_rejected == result.totals.rejected == 10
    assert plan.sample_documents == result.totals.documents
    assert plan.estimated_tokens == result.totals.tokens


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("limit", [1, 70, 150, 10_000])
def test_a_plan_counts_the_rows_before_the_limit(name: str, limit: int) -> None:
    write_jsonl(Path("a.jsonl"), make_texts(200))
    if name.endswith(".gz"):
        Path(name).write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    options = {"tokenizer": "bytes", "out": "store", "limit": limit, "unit_bytes": 4_000}
    plan = tokenmill.plan(name, **options)  # type: ignore[arg-type]
    result = tokenmill.build(name, serial=True, **options)  # type: ignore[arg-type]
    assert plan.estimated_documents == pytest.approx(result.totals.documents, rel=0.1)
    assert plan.estimated_tokens == pytest.approx(result.totals.tokens, rel=0.2)
    # What is there already is taken off.
    again = tokenmill.plan(name, **options)  # type: ignore[arg-type]
    assert again.estimated_tokens == 0
    options["limit"] = limit + 20
    more = tokenmill.plan(name, **options)  # type: ignore[arg-type]
    added = tokenmill.build(name, serial=True, **options).built  # type: ignore[arg-type]
    assert more.estimated_documents == pytest.approx(added.documents, rel=0.1)


def test_a_plan_has_a_line_for_each_number_of_workers() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(2000))
    options = {"tokenizer": "bytes", "unit_bytes": 200_000, "workers": 6}
    plan = tokenmill.plan("a.jsonl", memory="4GB", **options)  # type: ignore[arg-type]
    assert [each.workers for each in plan.by_workers] == [1, 2, 4, 6]
    memory = [each.estimated_memory_bytes for each in plan.by_workers]
    assert memory == sorted(set(memory))
    assert memory[-1] < plan.memory_budget_bytes / 2
    # Workers that have no unit do not make it faster.
    assert plan.units_to_build is not None
    assert plan.units_to_build < 6
    first = plan.by_workers[0].estimated_seconds
    for each in plan.by_workers:
        least = min(each.workers, plan.units_to_build)
        assert each.estimated_seconds == pytest.approx(first / least)


def test_a_plan_of_prompts_is_that_of_their_build(bpe_tokenizer_dir: Path) -> None:
    rows = [{"prompt": text[:50] or "why", "completion": text} for text in make_texts(60) if text]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"tokenizer": bpe_tokenizer_dir, "format": "prompt-completion", "out": "store"}
    plan = tokenmill.plan("a.jsonl", **options)  # type: ignore[arg-type]
    result = tokenmill.build("a.jsonl", serial=True, **options)  # type: ignore[arg-type]
    assert plan.estimated_tokens == result.totals.tokens
    assert plan.estimated_documents == result.totals.documents == len(rows)


def copies_of(*names: str, **options: object) -> dict[str, int | None]:
    """Of each file that a build with four workers would read as a stream, how many copies wait."""
    known = {"tokenizer": "bytes", "out": "store", "memory": "4GB", "unit_bytes": 2000}
    known |= {"inputs": names, "workers": 4}
    run = make_run(BuildOptions(**(known | options)))  # type: ignore[arg-type]
    tasks = run.prepare(run.discover()).plan.tasks
    finding = [task.finds_tasks for task in tasks]
    assert finding == sorted(finding, reverse=True)
    return {task.file.path: task.ahead for task in tasks if task.step is not None}


def test_streams_are_shared_where_they_are_more_than_a_share_of_what_is_left_to_do() -> None:
    for name, count in ("a", 300), ("b", 300), ("c", 60):
        write_jsonl(Path("raw"), make_texts(count))
        Path(f"{name}.jsonl.gz").write_bytes(gzip.compress(Path("raw").read_bytes()))
    names = ["a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz"]
    assert copies_of(*names) == {names[0]: 5, names[1]: 5, names[2]: None}
    assert copies_of(names[2], unit_bytes=10**6) == {names[2]: None}  # one unit
    assert copies_of(*names, workers=None, serial=True) == dict.fromkeys(names)
    options = {"tokenizer": "bytes", "out": "store", "memory": "4GB", "unit_bytes": 2000}
    tokenmill.build(names[:2], serial=True, **options)  # type: ignore[arg-type]
    assert copies_of(*names) == {names[2]: 10}


@pytest.mark.parametrize("files", [1, 200])
def test_a_plan_and_the_progress_count_the_text_of_compressed_tables(files: int) -> None:
    dice = random.Random(0)
    words = [f"{number * 7919 % 1000:b}" for number in range(200)]
    texts = [" ".join(dice.choices(words, k=dice.randrange(300, 700))) for _ in range(1200)]
    for number in range(files):
        table = pa.table(
            {"text": texts[number::files], "other": [b"\0" * 5000] * len(texts[number::files])}
        )
        pq.write_table(table, f"{number}.parquet", compression="zstd", row_group_size=100)
    size = sum(map(len, texts))
    assert sum(path.stat().st_size for path in Path().glob("*.parquet")) < size / 2
    plan = tokenmill.plan("*.parquet", tokenizer="bytes", out="store", memory="2GB")
    # Of a group of small files one is looked into.
    rel = 0.1 if files == 1 else 0.4
    assert plan.bytes_to_build == pytest.approx(size, rel=rel)
    assert plan.estimated_documents == pytest.approx(1200, rel=rel)
    told: list[tokenmill.Progress] = []
    result = tokenmill.build(
        "*.parquet", tokenizer="bytes", out="store", serial=True, on_progress=told.append
    )
    assert result.units_built < 100  # small files are in groups
    (total,) = {each.bytes_total for each in told if each.phase == "building"}
    assert told[-1].bytes_done == pytest.approx(total, rel=rel)
