from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tokenmill import Store
from tokenmill.monitor import read_timeline

from .conftest import in_terminal, numbered_lines

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Cli


def test_the_summary_tells_what_was_made_and_what_to_do_next(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "my store", "--val", "0.1")
    outcome = cli.apart(*args, "--profile", "profile.json")
    for fact in (
        r"store +my store",
        r"documents +200\n",
        r"tokens +[\d,]+ as uint16, 0\.9\d bytes of text per token",
        r"train: 1\d\d documents, [\d,]+ tokens, 1 shard",
        r"val: \d+ documents, [\d,]+ tokens, 1 shard",
        r"engine +bytes",
        r"time +[\d.]+ s, [\d.]+ s of it start-up, with \d+ worker",
        r"memory +[\d.]+ of [\d.]+ [MG]B at the peak",
        r"next +tokenmill inspect 'my store'\n",
    ):
        assert re.search(fact, outcome.out), fact
    assert "\x1b" not in outcome.out + outcome.err
    assert outcome.err.startswith("building ")
    profile = json.loads((cli.folder / "profile.json").read_text())
    assert "encode" in profile["stage_seconds"]


def test_the_time_line_is_kept_and_grows_with_the_next_run(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store", "--monitor", "timeline.jsonl")
    cli(*args)
    cli(*args)
    runs = read_timeline(cli.folder / "timeline.jsonl").segments
    assert [run.summary and run.summary["outcome"] for run in runs] == ["done", "done"]
    refused = cli(*args[:-1], "store/timeline.jsonl", code=2)
    assert refused.err.startswith("error: the time line 'store/timeline.jsonl' would be in the")
    assert "hint: put it beside the store: --monitor store-timeline.jsonl" in refused.err


def test_json_is_one_object_that_balances_and_nothing_else(cli: Cli, corpus: Path) -> None:
    lines = corpus.read_text()
    corpus.write_text(lines + '{"text": ""}\n{"text": 7}\n')
    outcome = cli("build", corpus.name, "-t", "bytes", "-o", "store", "--json", "--val", "0.2")
    totals = outcome.json["totals"]
    assert totals["rows"] == 202
    assert totals["documents"] == 200
    assert (totals["empty"], totals["rejected"], totals["skipped"]) == (1, 1, 0)
    assert outcome.json["built"] == totals
    splits = outcome.json["splits"]
    assert set(splits) == {"train", "val"}
    assert sum(split["tokens"] for split in splits.values()) == totals["tokens"]
    assert outcome.json["bytes_per_token"] == totals["text_bytes"] / totals["tokens"]
    assert outcome.json["nothing_to_do"] is False
    assert outcome.err, "progress stays on stderr"


def test_the_same_command_again_says_that_nothing_is_left_to_do(cli: Cli, corpus: Path) -> None:
    outcome = cli("build", corpus.name, "-t", "bytes", "-o", "store", "--json", "--quiet")
    assert outcome.err == ""
    first = outcome.json
    again = cli("build", corpus.name, "-t", "bytes", "-o", "store")
    assert again.out.startswith("nothing to do: store is complete")
    assert again.err == ""
    once_more = cli("build", corpus.name, "-t", "bytes", "-o", "store", "--json").json
    assert once_more["nothing_to_do"] is True
    assert once_more["totals"] == first["totals"]
    assert once_more["units_built"] == 0


def test_rejected_rows_are_told_with_the_place_to_read_them(cli: Cli, corpus: Path) -> None:
    corpus.write_text(corpus.read_text() + '{"txt": "no such key"}\n')
    outcome = cli("build", corpus.name, "-t", "bytes", "-o", "store")
    assert "200 of 201 rows (1 rejected)" in outcome.out
    assert "1 row; file, row and reason of each: store/rejects" in outcome.out
    (line,) = "".join(p.read_text() for p in (cli.folder / "store/rejects").iterdir()).splitlines()
    assert json.loads(line)["row"] == 200


def test_rejected_rows_that_are_not_listed_are_told_in_numbers(cli: Cli, corpus: Path) -> None:
    corpus.write_text(corpus.read_text() + "[]\n" * 10_002 + "{}\n")
    args = ("build", corpus.name, "-t", "bytes", "-o", "store", "--max-rejects", "1")
    told = "10,003 rows; file, row and reason of all but 3, which are counted: store/rejects"
    assert told in cli(*args).out
    shown = cli("inspect", "store").out
    assert "10,002 not-an-object, 1 missing-field; all but 3 rows: store/rejects" in shown
    assert cli("inspect", "store", "--json").json["totals"]["unlisted"] == 3
    (file,) = (cli.folder / "store/rejects").iterdir()
    last = file.read_text().splitlines()[-1]
    assert json.loads(last) == {"more": {"missing-field": 1, "not-an-object": 2}}


def test_too_many_rejects_fail_the_build_unless_they_are_allowed(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store", "--text-field", "body")
    outcome = cli(*args, code=1)
    assert "error: " in outcome.err
    assert "body" in outcome.err
    lenient = (*args, "--max-rejects", "1")
    assert "of 200 rows: 200 rejected" in cli(*lenient, code=2).err
    assert cli(*lenient, "--allow-empty", "--json").json["totals"]["rejected"] == 200


def test_the_text_may_stand_in_another_field(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "nested.jsonl").write_text('{"data": {"body": "hi"}}\n')
    cli("build", "nested.jsonl", "-t", "bytes", "-o", "store", "--text-field", "data.body")
    assert Store(tmp_path / "store")[0].tolist() == [104, 105, 256]


def test_a_separator_cuts_text_into_documents(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one\n\ntwo\n\nthree")
    args = ("build", "notes.txt", "-t", "bytes", "-o", "store")
    cli(*args, "--separator", "\\n\\n")
    store = Store(tmp_path / "store")
    assert [store.decode(k).partition("<")[0] for k in range(len(store))] == ["one", "two", "three"]


def test_a_limit_takes_the_first_rows_and_a_later_run_adds_the_rest(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store", "--json")
    assert cli(*args, "--limit", "7").json["totals"]["documents"] == 7
    assert cli(*args).json["totals"]["documents"] == 200


@pytest.mark.parametrize(
    ("option", "ends"), [(("--no-eos",), []), (("--eos", "<|endoftext|>"), [256])]
)
def test_the_token_behind_a_document_is_chosen(
    cli: Cli, tmp_path: Path, option: tuple[str, ...], ends: list[int]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    cli("build", "a.jsonl", "-t", "bytes", "-o", "store", *option)
    assert Store(tmp_path / "store")[0].tolist() == [97, *ends]


def test_a_begin_token_that_the_tokenizer_lacks_is_refused_with_a_hint(
    cli: Cli, corpus: Path
) -> None:
    outcome = cli("build", corpus.name, "-t", "bytes", "-o", "store", "--bos", code=1)
    assert "error: " in outcome.err
    assert "hint: " in outcome.err


@pytest.mark.parametrize(
    ("policy", "has_special", "documents"),
    [("text", False, 201), ("parse", True, 201), ("reject", False, 200)],
)
def test_a_special_token_inside_a_document_follows_the_policy(
    cli: Cli, corpus: Path, bpe: Path, policy: str, has_special: bool, documents: int
) -> None:
    corpus.write_text('{"text": "a<|endoftext|>b"}\n' + corpus.read_text())
    cli("build", corpus.name, "-t", bpe, "-o", "store", "--special-tokens", policy)
    store = Store(cli.folder / "store")
    assert len(store) == documents
    assert (store.eos_id in store[0][:-1].tolist()) is has_special


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_engines_and_workers_leave_no_trace_in_the_shards(
    cli: Cli, corpus: Path, bpe: Path, engine: str
) -> None:
    args = ("build", corpus.name, "-t", bpe)
    cli(*args, "-o", "auto", "--workers", "2")
    made = cli.apart(
        *args, "-o", "other", "--engine", engine, "--workers", "1", "--memory", "600MB", "--pin"
    )
    assert f"engine      {engine}" in made.out
    assert "with 1 worker" in made.out
    shards = sorted(p.name for p in (cli.folder / "auto/shards").glob("*.[bi]*"))
    assert len(shards) == 2
    for name in shards:
        auto, other = (cli.folder / f / "shards" / name for f in ("auto", "other"))
        assert auto.read_bytes() == other.read_bytes()


def test_an_engine_for_another_kind_of_tokenizer_is_refused(cli: Cli, corpus: Path) -> None:
    outcome = cli("build", corpus, "-t", "bytes", "-o", "store", "--engine", "tiktoken", code=2)
    assert "tiktoken" in outcome.err


def test_a_budget_that_is_too_small_is_refused_with_one_that_works(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store", "--memory")
    outcome = cli.apart(*args, "50MB", code=1)
    smallest = re.search(r"--memory (\d+MB)", outcome.err)
    assert smallest is not None, outcome.err
    cli.apart(*args, smallest[1])


def test_files_that_are_gone_are_dropped_only_if_asked(cli: Cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(numbered_lines(5)))
    cli("build", "a.jsonl", "b.jsonl", "-t", "bytes", "-o", "store")
    refused = cli("build", "a.jsonl", "-t", "bytes", "-o", "store", code=1)
    assert "'b.jsonl'" in refused.err
    assert "--prune" in refused.err
    pruned = cli("build", "a.jsonl", "-t", "bytes", "-o", "store", "--prune", "--json").json
    assert pruned["totals"]["documents"] == 5
    assert pruned["units_built"] == 0


def test_another_configuration_is_refused_unless_it_replaces_the_old_one(
    cli: Cli, corpus: Path
) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store")
    before = cli(*args, "--json").json["totals"]["tokens"]
    refused = cli(*args, "--no-eos", code=1)
    assert "--rebuild" in refused.err
    after = cli(*args, "--no-eos", "--rebuild", "--json").json["totals"]["tokens"]
    assert after == before - 200


def test_a_dry_run_shows_the_plan_and_writes_nothing(cli: Cli, corpus: Path) -> None:
    outcome = cli("build", corpus.name, "-t", "bytes", "-o", "store", "--dry-run")
    assert re.search(r"to build +1 unit, ", outcome.out)
    assert not (cli.folder / "store").exists()


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(cli: Cli, corpus: Path, bpe: Path) -> None:
    text = "".join(numbered_lines(60_000))
    corpus.write_text(text)
    shown = in_terminal(
        cli,
        "build",
        corpus.name,
        "-t",
        str(bpe),
        "-o",
        "store",
        "--engine",
        "tokenizers",
        columns=80,
    )
    assert "tokens/s" in shown
    assert re.search(r"memory [\d.]+ of [\d.]+ [MG]B", shown)
    assert "cpu " in shown
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.rpartition("\x1b[2K")[2])
    assert "documents" in last
    assert "60,000" in last
