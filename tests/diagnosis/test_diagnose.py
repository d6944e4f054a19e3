from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from itertools import accumulate, cycle, islice
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

import tokenmill
from tokenmill.diagnosis.values import as_json
from tokenmill.errors import SourceError, TokenizerError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Case

WAYS = ["one-by-one", "batched", "joined", "pool", "dataloader", "build", "loader"]


def test_every_way_is_measured_in_its_own_process(case: Case) -> None:
    # This tokenizer does not say which class of transformers it is for.
    expected = [way for way in WAYS if way != "dataloader" or find_spec("torch")]
    assert [way.key for way in case.found.ways] == expected
    for way in case.found.ways:
        assert way.problem is None, way
        assert way.tokens > 0
        assert len(way.rates) == (1 if way.key == "build" else 5)
        low, high = way.interval
        assert low <= way.tokens_per_second <= high
        assert way.call
        assert way.source
        assert way.seconds > 0
        assert way.peak_memory_bytes > 0
        # Of several processes it is seen from outside, now and then.
        assert way.cpu_cores > 0 or way.key in ("pool", "dataloader", "build")


def test_tokens_are_those_of_the_reference_tokenizer(case: Case) -> None:
    tokenizer = Tokenizer.from_file(str(case.tokenizer / "tokenizer.json"))
    lengths = [len(tokenizer.encode(text).ids) for text in case.texts]
    for way in case.found.ways:
        if way.key in ("one-by-one", "batched", "joined", "pool", "dataloader"):
            assert way.engine == "tokenizers"
            # Before those that count come 64 documents, and twice 8, 16, ... up to the same size.
            first = 64 + 2 * (way.documents // 5 * 2 - 8)
            dealt = list(islice(cycle(lengths), first, first + way.documents))
            assert way.tokens == sum(dealt), way.key
            sizes = [len(text.encode()) for text in case.texts]
            assert way.text_bytes == sum(islice(cycle(sizes), first, first + way.documents))
        if way.key == "build":
            assert (way.documents, way.tokens) == (len(lengths), sum(lengths))
    found = case.found.lengths
    assert found is not None
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))


def test_one_sample_and_eight_are_timed_where_they_can_be_asked_for(case: Case) -> None:
    for way in case.found.ways:
        assert (way.sample_ms is not None) == (way.key not in ("dataloader", "build")), way.key
        assert (way.chunk_ms is not None) == (way.key != "build"), way.key


def test_steps_are_told_one_after_the_other(case: Case) -> None:
    total = len(case.steps)
    assert total > len(case.found.ways)
    assert [number for number, _, _ in case.steps] == list(accumulate([1] * total))
    assert {steps for _, steps, _ in case.steps} == {total}


def test_the_sample_is_accounted_for(case: Case) -> None:
    sample = case.found.sample
    assert sample is not None
    assert (sample.files, sample.documents, sample.rejected) == (1, len(case.texts), 0)
    assert sample.text_bytes == sum(len(text.encode()) for text in case.texts)
    assert sample.input_bytes == case.corpus.stat().st_size


def test_the_sweep_tries_workers_and_batches_and_recommends_from_them(case: Case) -> None:
    tried = {(point.key, point.workers, point.batch) for point in case.found.sweep}
    assert {("pool", 1, 64), ("pool", 2, 64)} <= tried
    assert {("batched", 2, batch) for batch in (1, 8, 64, 512)} <= tried
    assert {workers for key, workers, _ in tried if key == "build"} == {1, 2}
    assert all(point.tokens_per_second > 0 for point in case.found.sweep)
    advised = case.found.recommendation
    assert advised is not None
    assert advised.build_workers in (1, 2)
    assert advised.batch in (1, 8, 64, 512)


def test_the_command_that_is_proposed_works(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.cli.main import app

    command, line = case.found.commands
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[:3] == ["tokenmill", "build", str(case.corpus)]
    assert {"--text-field", "--workers", "--memory"} <= set(words)
    app([*words[1:], "--quiet"], standalone_mode=False)
    scope: dict[str, object] = {}
    exec(line, scope)
    assert isinstance(scope["loader"], tokenmill.Loader)


def test_json_has_stable_keys_and_no_value_that_json_lacks(case: Case) -> None:
    text = json.dumps(as_json(case.found), allow_nan=False)
    found = json.loads(text)
    assert set(found) == {
        "schema", "inputs", "tokenizer", "machine", "sample", "lengths", "demands", "ways",
        "verdicts", "sweep", "recommendation", "advice", "commands", "evidence",
    }  # fmt: skip
    assert {
        "key", "title", "engine", "tokens_per_second", "sample_ms", "chunk_ms", "cpu_cores",
        "other_cores", "peak_memory_bytes", "workers", "batch", "in_loop", "feeds", "source",
        "call", "rates", "interval", "documents_per_second", "changes_ids",
        "compared_documents", "differing_documents", "delimited_documents", "note", "problem",
    } <= set(found["ways"][0])  # fmt: skip
    assert {
        "way", "demand", "state", "feeds_tokens_per_second", "low_tokens_per_second",
        "high_tokens_per_second", "on_busy_machine", "needs_tokens_per_second",
        "wait_share", "wait_share_in_turn", "times_too_slow",
    } == set(found["verdicts"][0])  # fmt: skip
    assert found["demands"][0]["is_estimate"] is True


def test_what_cannot_be_diagnosed_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"text": ""}\n\n')
    steps: list[object] = []

    def refused(error: type[Exception], words: str, *args: object, **options: object) -> None:
        with pytest.raises(error, match=re.escape(words)):
            tokenmill.diagnose(*args, on_step=lambda *s: steps.append(s), **options)  # type: ignore[arg-type]

    refused(UsageError, "nothing to diagnose")
    refused(UsageError, "the tokenizer is missing", blank)
    refused(UsageError, "no model 'huge'", blank, tokenizer="bytes", model="huge")
    refused(UsageError, "seconds=0", blank, tokenizer="bytes", seconds=0)
    refused(UsageError, "sample_mb=-1", blank, tokenizer="bytes", sample_mb=-1)
    refused(UsageError, "workers=0", blank, tokenizer="bytes", workers=0)
    refused(UsageError, "no report", blank, tokenizer="bytes", report=tmp_path)
    refused(UsageError, "no programs", blank, tokenizer="bytes", scripts=blank)
    refused(UsageError, "text_field=", blank, tokenizer="bytes", format="chat", text_field="a")
    refused(TokenizerError, "not valid JSON", blank, tokenizer=_broken(tmp_path))
    assert steps == []
    refused(SourceError, "no row has text in it", blank, tokenizer="bytes")
    refused(SourceError, "absent.jsonl", tmp_path / "absent.jsonl", tokenizer="bytes")


def _broken(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text("{")
    return path
