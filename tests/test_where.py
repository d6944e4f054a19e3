"""Conditions on rows: what they say, and that every format and way to decide says the same."""

from __future__ import annotations

import csv
import datetime
import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builder.stores import documents, tree

import tokenmill
from tokenmill import where
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.sources.base import SourceOptions, open_source, plan_units
from tokenmill.sources.discovery import source_file
from tokenmill.store.facts import Counts


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("lang == 'en' and score > 0.5", "lang == 'en' and score > 0.5"),
        ("lang='en'AND   score>0.50", "lang == 'en' and score > 0.5"),
        ("a <> 1 or b <= -2e3 and not c", "a != 1 or (b <= -2000.0 and not c)"),
        ("not (a is null or b is not null)", "not (a is null or not b is null)"),
        ("lang in ('en', 'de') and x not in [1, 2]", "lang in ('en', 'de') and not x in (1, 2)"),
        ("0.5 < score", "score > 0.5"),
        ("title not like 'a''b%'", "not title like 'a''b%'"),
        ('"two words" == true', '"two words" == true'),
        ("meta.lang == 'en' and `a-b` = 1", "meta.lang == 'en' and \"a-b\" == 1"),
    ],
)
def test_a_condition_is_the_same_however_it_is_written(text: str, canonical: str) -> None:
    assert str(where.parse(text)) == canonical
    assert str(where.parse(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a value was expected, and not 'its end'"),
        ("lang == en", "are both columns"),
        ("lang ==", "a value was expected, and not 'its end'"),
        ("lang == 'en' and", "a value was expected, and not 'its end'"),
        ("(a == 1", "a parenthesis is not closed"),
        ("a == 1)", "')' is not expected there"),
        ("a == 1 == 2", "one comparison follows another"),
        ("0 < a < 1", "one comparison follows another"),
        ("a == null", "nothing equals null; write: is null"),
        ("a in 'x'", "in takes a list in parentheses"),
        ("a in ('x', 1)", "the list after in has text and a number"),
        ("a > 1 and a == 'x'", "'a' is compared with a number and with text"),
        ("a > true", "true and false have no order"),
        ("a like 1", "is to be like 1, which is no text"),
        ("a == 9007199254740993", "is larger than numbers of JSON are exact"),
        ("a == 1e999", "is too large"),
        ("1 == 1", "no column is compared with 1"),
        ("a; drop", "'; drop' is not understood"),
        ("__import__('os')", "'(' is not expected there"),
        ("(" * 99 + "a" + ")" * 99, "it is nested more than 50 deep"),
    ],
)
def test_what_is_no_condition_is_refused_with_an_example(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match="is no condition: ") as caught:
        tokenmill.build("a.jsonl", tokenizer="bytes", out="s", where=text)
    assert problem in str(caught.value)
    assert "lang == 'en' and score > 0.5" in str(caught.value.hint)


# -------------------------------------------------------------------------------------------------
# Every way to decide gives the rows that SQLite gives.

Row = dict[str, Any]
LANGS = ["en", "de", "e_", "100%", "\u00e9", "", None]
rows = st.lists(
    st.fixed_dictionaries(
        {
            "lang": st.sampled_from(LANGS),
            "score": st.none() | st.sampled_from([0, 1, -3, 0.5, 0.25, 2**53 + 1, 1e300]),
            "flag": st.sampled_from([True, False, None]),
        }
    ),
    min_size=1,
    max_size=12,
)
tests = st.one_of(
    st.sampled_from(
        [
            "lang is null",
            "score is not null",
            "flag == true",
            "flag != true",
            "lang like '%e%'",
            "lang like '_'",
            "lang not like 'e_'",
            "lang in ('en', 'de')",
            "lang not in ('en')",
            "score in (1, 0.5)",
            "score not in (0)",
        ]
    ),
    st.builds(
        "{} {} {}".format,
        st.just("score"),
        st.sampled_from(where._OPERATORS),
        st.sampled_from(["0", "0.5", "-3", "1e300"]),
    ),
    st.builds("lang {} '{}'".format, st.sampled_from(where._OPERATORS), st.sampled_from(LANGS[:5])),
)
conditions = st.recursive(
    tests,
    lambda below: st.one_of(
        below.map("not ({})".format),
        st.builds("({}) and ({})".format, below, below),
        st.builds("({}) or ({})".format, below, below),
    ),
    max_leaves=5,
)


def by_sqlite(given: list[Row], condition: str) -> tuple[list[int], list[int]]:
    """Rows for which the condition is true, and those for which it is neither true nor false."""
    base = sqlite3.connect(":memory:")
    base.execute("pragma case_sensitive_like = on")
    base.execute("create table t (number, lang, score, flag)")
    values = [(n, row["lang"], row["score"], row["flag"]) for n, row in enumerate(given)]
    base.executemany("insert into t values (?, ?, ?, ?)", values)
    kept, undecided = (
        [number for (number,) in base.execute(f"select number from t where {asked}")]
        for asked in (condition, f"({condition}) is null")
    )
    base.close()
    return kept, undecided


def by_file(path: Path, condition: str, *, batch_bytes: int = 1 << 20) -> tuple[list[int], ...]:
    options = SourceOptions(where=where.parse(condition), batch_bytes=batch_bytes)
    kept: list[int] = []
    undecided: list[int] = []
    file = source_file(str(path))
    source, row = open_source(file, options), 0
    for unit in plan_units(file, options):
        for batch in source.read(unit):
            assert batch.num_rows == len(batch.texts) + len(batch.rejects) + len(batch.left_out)
            every = [*batch.rows.tolist(), *batch.left_out.tolist()]
            assert sorted(every) == [*range(row, row + batch.num_rows)]
            assert [batch.texts.text_at(i) for i in range(len(batch.texts))] == [
                f"text {number}" for number in batch.rows
            ]
            kept += batch.rows.tolist()
            undecided += batch.undecided.tolist()
            row += batch.num_rows
    source.close()
    return kept, undecided


@given(given_rows=rows, condition=conditions)
@settings(max_examples=60, deadline=None)
def test_every_format_keeps_the_rows_that_sqlite_keeps(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[Row], condition: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    every = [{**row, "text": f"text {number}"} for number, row in enumerate(given_rows)]
    expected = by_sqlite(every, condition)
    lines = [json.dumps(row) for row in every]
    (folder / "a.jsonl").write_text("\n".join(lines))
    assert by_file(folder / "a.jsonl", condition) == expected
    # One by one, as Python decides what Arrow refuses.
    parsed = where.parse(condition)
    verdicts = [parsed.decide(line.encode()) for line in lines]
    kept = [number for number, verdict in enumerate(verdicts) if verdict == where.KEPT]
    assert kept == expected[0]
    assert [n for n, verdict in enumerate(verdicts) if verdict == where.UNDECIDED] == expected[1]
    # Whole numbers beyond those that floats have are for tables of floats.
    table = pa.table(
        {
            "text": [row["text"] for row in every],
            "lang": pa.array([row["lang"] for row in every]).cast(pa.string()),
            "score": pa.array(
                [None if row["score"] is None else float(row["score"]) for row in every],
                pa.float64(),
            ),
            "flag": pa.array([row["flag"] for row in every], pa.bool_()),
        }
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=5)
    assert by_file(folder / "a.parquet", condition) == expected
    coded = table.set_column(1, "lang", table["lang"].dictionary_encode())
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, coded.schema) as to,
    ):
        to.write_table(coded)
    assert by_file(folder / "a.arrow", condition) == expected
    # An empty value of a CSV file is null.
    for row in every:
        row["lang"] = row["lang"] or None
    expected = by_sqlite(every, condition)
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "lang", "score", "flag"])
        writer.writeheader()
        writer.writerows(every)
    assert by_file(folder / "a.csv", condition) == expected


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_line_gets_the_same_verdict_whatever_is_beside_it(tmp_path: Path) -> None:
    odd = [
        '{"text": "text 0", "score": "0.9"}',  # text where a number was expected
        '{"text": "text 1", "score": 0.9, "score": 0.1}',  # the last of two counts
        '{"text": "text 2", "score": true}',
        '{"text": "text 3", "score": 1e999}',
        '{"text": "text 4", "score": null}',
        '{"text": "text 5", "score": [0.9]}',
        '{"text": "text 6", "score": ' + "9" * 5000 + "}",
        '  {"text": "text 7", "score": 0.9}  ',
    ]
    expected = ([3, 6, 7], [0, 2, 4, 5])
    assert by_file(write_lines(tmp_path / "a.jsonl", odd), "score > 0.5") == expected
    many = [*odd, *(f'{{"text": "text {n}", "score": {n % 2}}}' for n in range(8, 3000))]
    kept, undecided = by_file(write_lines(tmp_path / "b.jsonl", many), "score > 0.5")
    assert kept == [3, 6, 7, *range(9, 3000, 2)]
    assert undecided == expected[1]
    alone = [
        by_file(write_lines(tmp_path / "c.jsonl", [line]), "score > 0.5")[0] for line in many[:2]
    ]
    assert alone == [[], []]
    deep = '{"x": ' + "[" * 3000 + "]" * 3000 + ', "text": "text 0", "score": '
    for line, found in ((f"{deep}1}}", [0]), (f"{deep}0}}", [])):
        beside = [line, *(f'{{"text": "text {n}", "score": 1}}' for n in range(1, 400))]
        for lines in ([line], beside, [*beside, '{"score": "x"}']):
            kept, _ = by_file(write_lines(tmp_path / "d.jsonl", lines), "score > 0.5")
            assert kept[:1] == found or kept[0] != 0
            assert (0 in kept) == bool(found)


def test_nested_fields_and_names_with_dots_are_those_of_the_text_field(tmp_path: Path) -> None:
    lines = [
        '{"text": "text 0", "meta": {"lang": "en"}}',
        '{"text": "text 1", "meta": {"lang": "de"}, "meta.lang": "en"}',
        '{"text": "text 2", "meta": {"lang": "en"}, "meta.lang": "de"}',
        '{"text": "text 3", "meta": null}',
        '{"text": "text 4", "meta": "en"}',
        '{"text": "text 5"}',
    ]
    condition = "meta.lang == 'en'"
    found = by_file(write_lines(tmp_path / "a.jsonl", lines), condition)
    assert found == ([0, 1], [3, 4, 5])
    assert by_file(write_lines(tmp_path / "b.jsonl", lines[:4]), condition) == ([0, 1], [3])
    table = pa.Table.from_pylist([{"text": "text 0", "meta": {"lang": "en"}, "a b": 1}])
    pq.write_table(table, tmp_path / "a.parquet")
    assert by_file(tmp_path / "a.parquet", condition) == ([0], [])
    assert by_file(tmp_path / "a.parquet", '"a b" == 2 or meta.lang is null') == ([], [])


def test_times_are_compared_as_they_are_written(tmp_path: Path) -> None:
    days = [datetime.date(2024, 7, day) for day in (1, 2, 3)]
    times = [datetime.datetime(2024, 7, day, 12) for day in (1, 2, 3)]
    texts = [f"text {number}" for number in range(3)]
    table = pa.table({"text": texts, "day": days, "at": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert by_file(tmp_path / "a.parquet", "day >= '2024-07-02'") == ([1, 2], [])
    assert by_file(tmp_path / "a.parquet", "at < '2024-07-02 13:00:00'") == ([0, 1], [])
    with pytest.raises(SourceError, match="with 'July', which is none"):
        by_file(tmp_path / "a.parquet", "day == 'July'")


def test_whole_numbers_of_tables_are_exact(tmp_path: Path) -> None:
    numbers = pa.array([2**53, 2**53 + 1, 3], pa.int64())
    table = pa.table({"text": [f"text {n}" for n in range(3)], "id": numbers})
    pq.write_table(table, tmp_path / "a.parquet")
    assert by_file(tmp_path / "a.parquet", f"id > {2**53 - 1}") == ([0, 1], [])
    assert by_file(tmp_path / "a.parquet", "id > 2.5 and id < 4") == ([2], [])


# -------------------------------------------------------------------------------------------------
# What a build makes of it.


def build(source: object, out: object, **options: Any) -> tokenmill.BuildResult:
    given: dict[str, Any] = {"tokenizer": "bytes", "serial": True, **options}
    return tokenmill.build(source, out=out, **given)  # type: ignore[arg-type]


def corpus(folder: Path, count: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    every = [
        {"text": "" if n % 10 == 0 else f"text {n}", "lang": ["en", "de", None][n % 3], "score": n}
        for n in range(count)
    ]
    write_lines(folder / "a.jsonl", [*map(json.dumps, every), "no json"])
    pq.write_table(pa.Table.from_pylist(every), folder / "b.parquet")
    return folder


def test_every_row_of_a_build_is_accounted_for(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    result = build(source, tmp_path / "s", where="lang == 'en'", max_rejects=0.1)
    totals = result.totals
    assert totals == Counts.of(
        rows=81,
        documents=24,
        empty=4,
        rejected=1,
        filtered=52,
        undecided=26,
        input_bytes=totals.input_bytes,
        text_bytes=totals.text_bytes,
        tokens=totals.tokens,
    )
    with tokenmill.Store(tmp_path / "s") as store:
        assert store.manifest.version == 7
        assert store.manifest.identity.config["where"] == "lang == 'en'"
        sources = [store.source(number).row for number in range(len(store))]
        assert sources[:4] == [3, 6, 9, 12]
    assert tokenmill.verify(tmp_path / "s").ok
    assert build(source, tmp_path / "s", where="lang='en'", max_rejects=0.1).nothing_to_do
    with pytest.raises(StoreError, match="where \"lang == 'en'\" -> None"):
        build(source, tmp_path / "s", max_rejects=0.1)


def test_many_rejects_among_the_rows_that_are_asked_for_are_told(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "fine", "lang": "de"} for _ in range(995)]
    rows += [{"text": None, "lang": "en"} for _ in range(5)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = build(source, tmp_path / "store", where="lang == 'en'", allow_empty=True)
    assert (result.totals.rejected, result.totals.filtered) == (5, 995)
    warning, _ = result.warnings  # and that the store is empty
    assert "5 of the 5 rows that --where did not leave out were rejected" in warning
    assert build(source, tmp_path / "all", where="lang == 'de'").warnings == ()


def test_a_condition_that_leaves_nothing_out_leaves_no_trace_in_the_units(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    build(source, tmp_path / "s", where="score >= 0", max_rejects=0.1)
    build(source, tmp_path / "plain", max_rejects=0.1)
    with tokenmill.Store(tmp_path / "s") as store:
        assert store.manifest.version == 1
    assert documents(tmp_path / "s") == documents(tmp_path / "plain")


def test_a_condition_that_leaves_nothing_is_warned_of(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in")
    result = build(source, tmp_path / "s", where="lang == 'xx'", max_rejects=0.1, allow_empty=True)
    assert result.totals.documents == 0
    said = (
        f"the store is empty: --where left out all that could be used, {result.totals.filtered:,} "
    )
    assert [each for each in result.warnings if each.startswith(said)]


def test_rows_beyond_a_limit_are_not_asked(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in") / "a.jsonl"
    totals = build(source, tmp_path / "s", where="lang == 'de'", limit=10).totals
    assert (totals.rows, totals.skipped) == (41, 31)
    assert (totals.documents, totals.filtered, totals.undecided) == (3, 7, 3)
    again = build(source, tmp_path / "s", where="lang == 'de'", max_rejects=0.1).totals
    assert (again.skipped, again.rejected, again.documents + again.empty) == (0, 1, 13)
    build(source, tmp_path / "whole", where="lang == 'de'", max_rejects=0.1)
    assert tokenmill.prune(tmp_path / "s").snapshots  # the store with the limit is kept
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")


def test_workers_and_groups_of_files_make_the_same_store(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(70):
        lines = [json.dumps({"text": f"{number} {n}", "n": n}) for n in range(5)]
        write_lines(folder / f"{number:02}.jsonl", lines)
    one = build(folder, tmp_path / "one", where="n in (1, 3)")
    assert (one.totals.rows, one.totals.documents, one.totals.filtered) == (350, 140, 210)
    build(folder, tmp_path / "two", where="n in (1, 3)", serial=False, workers=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    with tokenmill.Store(tmp_path / "one") as store:
        place = store.source(2)
        assert (place.path, place.row) == (f"{folder}/01.jsonl", 1)


def test_a_table_whose_other_column_changed_is_built_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", "b", "c"], "score": [0.1, 0.9, 0.9]})
    pq.write_table(table, path)
    build(path, tmp_path / "s", where="score > 0.5")
    assert documents(tmp_path / "s") == [[98, 256], [99, 256]]
    other = table.set_column(1, "score", pa.array([0.9, 0.9, 0.1]))
    pq.write_table(other, path)
    result = build(path, tmp_path / "s", where="score > 0.5")
    assert result.units_built == 1
    assert documents(tmp_path / "s") == [[97, 256], [98, 256]]
    pq.write_table(other, path, compression="zstd")
    assert build(path, tmp_path / "s", where="score > 0.5").units_built in (0, 1)


def test_chats_and_templates_are_left_out_by_their_other_fields(tmp_path: Path) -> None:
    lines = [
        json.dumps({"q": f"q{n}", "a": "yes", "lang": "en" if n % 2 else "de"}) for n in range(6)
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    shape: dict[str, Any] = {"format": "prompt-completion", "prompt_field": "q"}
    result = build(path, tmp_path / "s", where="lang == 'en'", completion_field="a", **shape)
    assert (result.totals.documents, result.totals.filtered) == (3, 3)
    with tokenmill.Store(tmp_path / "s") as store:
        assert store.decode(0).startswith("q1yes")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_column_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"text": ["a", "b"], "lang": ["en", "de"]})
    if suffix == "jsonl":
        write_lines(path, [json.dumps(row) for row in table.to_pylist()])
    elif suffix == "csv":
        path.write_text("text,lang\na,en\nb,de\n")
    else:
        pq.write_table(table, path)
    with pytest.raises(SourceError, match=r"no column 'lnag'.*there are: text, lang") as caught:
        build(path, tmp_path / "s", where="lnag == 'en'")
    assert "did you mean 'lang'?" in str(caught.value.hint)


def test_what_has_no_columns_or_other_types_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SourceError, match="is a text file, which has no columns"):
        build(tmp_path / "a.txt", tmp_path / "s", where="lang == 'en'")
    pq.write_table(pa.table({"text": ["a"], "score": [1.5]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="is of type double, and where= compares it with text"):
        build(tmp_path / "a.parquet", tmp_path / "s", where="score == 'high'")
    with pytest.raises(SourceError, match="compares it with true or false"):
        build(tmp_path / "a.parquet", tmp_path / "s", where="score")


def test_parts_keep_the_condition_and_a_plan_knows_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    source = corpus(Path("in")) / "b.parquet"
    build(source, "whole", where="score<10")
    for part in ("1/2", "2/2"):
        build(source, "parts", where="score < 10", part=part)
    tokenmill.finish("parts")
    assert tree(Path("parts")) == tree(Path("whole"))
    lines = Path("in/a.jsonl")
    planned = tokenmill.plan(lines, tokenizer="bytes", where="score < 10", max_rejects=0.1)
    assert planned.estimated_documents == 9
