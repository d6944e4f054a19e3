"""A fast engine that lies: its unit is done again by the reference, and the store is right."""

from __future__ import annotations

import dataclasses
import gzip
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import byte_ids, make_texts, tree, write_jsonl

from tokenmill.builder.encode import RowEncoder
from tokenmill.builder.plan import BuildSettings, Task, divide_budget, request_identity
from tokenmill.builder.worker import EngineReport, ProgressReport, UnitReport, WorkerStart
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import describe
from tokenmill.engines.parity import CheckedEngine, Prescan, SpecialText
from tokenmill.engines.references import BytesEngine
from tokenmill.options import BuildOptions
from tokenmill.records import TokenBatch
from tokenmill.sources.base import SourceOptions
from tokenmill.sources.discovery import discover
from tokenmill.store.facts import read_receipt
from tokenmill.store.format import read_index
from tokenmill.store.layout import StoreLayout, StoreLock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.builder.worker import BuildWorker
    from tokenmill.records import TextBatch


TEXT = SpecialTokens.TEXT


class LyingEngine(BytesEngine):
    """Right on most text; turns every 'mill' of a document that holds 'LIE' into nonsense."""

    name = "liar"
    version = "1"

    def encode(self, texts: TextBatch) -> TokenBatch:
        tokens = super().encode(texts)
        ids = tokens.ids.copy()
        for i in range(len(texts)):
            if b"LIE" in texts.bytes_at(i):
                ids[tokens.offsets[i] : tokens.offsets[i + 1]] ^= 1
        return TokenBatch(ids, tokens.offsets)


def checked_engine() -> CheckedEngine:
    return CheckedEngine(
        BytesEngine(special_tokens=TEXT),
        info=describe("bytes"),
        special_text=SpecialText(()),
        fast=LyingEngine(special_tokens=TEXT),
    )


def settings_for(layout: StoreLayout, options: SourceOptions) -> BuildSettings:
    asked = BuildOptions((), tokenizer="bytes", out="store", max_rejects=0.0, serial=True)
    return BuildSettings(
        identity=request_identity(asked, layout).identity,
        options=asked,
        source=options,
        memory=divide_budget(2 << 30, tokenizer_bytes=0, most_workers=1),
    )


@contextmanager
def started(
    layout: StoreLayout, options: SourceOptions, engine: CheckedEngine, *, is_proved: bool = True
) -> Iterator[BuildWorker]:
    """A worker in this process."""
    with StoreLock(layout) as lock:
        settings = settings_for(layout, options)
        start = WorkerStart(
            settings=settings,
            store=str(layout.root),
            url=None,
            corner="",
            token=lock.token,
            tokenizer=describe("bytes"),
            encoder=RowEncoder(engine, settings.identity, whole_bytes=1 << 30),
            is_proved=lambda: is_proved,
        )
        with closing(start()) as worker:
            yield worker


def run_worker(
    tmp_path: Path, texts: list[str], engine: CheckedEngine, *, is_proved: bool = True
) -> tuple[list[Any], StoreLayout, str]:
    options = SourceOptions(unit_bytes=1 << 20)
    (file,) = discover([write_jsonl(tmp_path / "a.jsonl", texts)], options).files
    layout = StoreLayout(tmp_path / "store")
    reports: list[Any] = []
    with started(layout, options, engine, is_proved=is_proved) as worker:
        future = worker.work(Task(file=file, first=0), reports.append)
        assert future is not None
        future.result()
    (done,) = [report for report in reports if isinstance(report, UnitReport)]
    return reports, layout, done.unit


def stored(layout: StoreLayout, unit: str) -> list[list[int]]:
    ids = np.fromfile(layout.shard_file(unit, "bin"), "<u2")
    lengths = read_index(layout.shard_file(unit, "idx")).lengths
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def test_a_unit_whose_sample_disagrees_is_encoded_again_by_the_reference(tmp_path: Path) -> None:
    texts = [f"LIE {text}" for text in make_texts(50)]
    reports, layout, unit = run_worker(tmp_path, texts, checked_engine())
    assert stored(layout, unit) == byte_ids(texts)
    facts = read_receipt(layout, unit).engine
    assert (facts.name, facts.redone) == ("bytes", True)
    assert (facts.checked_documents, facts.mismatches) == (1, 1)
    # What was reported of the first attempt is taken back.
    progress = [report for report in reports if isinstance(report, ProgressReport)]
    assert (progress[0].input_bytes, progress[0].documents) == (0, 0)
    assert progress[-1].input_bytes == (tmp_path / "a.jsonl").stat().st_size
    assert progress[-1].documents <= len(texts)


@pytest.mark.parametrize("kind", ["right", "wrong", "failing"])
def test_another_engine_takes_over_where_one_turns_out_to_disagree(
    kind: str, tmp_path: Path
) -> None:
    texts = [f"LIE {text}" if kind == "wrong" else text for text in make_texts(50)]
    engine = checked_engine()
    if kind == "failing":
        engine.fast = None
        engine.reference.encode = None  # type: ignore[assignment, method-assign]
    reports, layout, unit = run_worker(tmp_path, texts, engine, is_proved=False)
    assert stored(layout, unit) == byte_ids(texts)
    # As if it had been known from the beginning.
    facts = read_receipt(layout, unit).engine
    assert (facts.name, facts.redone, facts.mismatches) == ("bytes", False, 0)
    (told,) = [report for report in reports if isinstance(report, EngineReport)]
    assert told.name == "bytes"


def test_a_unit_whose_sample_agrees_is_left_to_the_fast_engine(tmp_path: Path) -> None:
    texts = make_texts(50)
    _, layout, unit = run_worker(tmp_path, texts, checked_engine())
    assert stored(layout, unit) == byte_ids(texts)
    facts = read_receipt(layout, unit).engine
    assert (facts.name, facts.redone, facts.mismatches) == ("liar", False, 0)
    assert facts.checked_documents > 0


def test_documents_with_contested_characters_are_counted_as_given_to_the_reference(
    tmp_path: Path,
) -> None:
    texts = make_texts(60)
    engine = CheckedEngine(
        BytesEngine(special_tokens=TEXT),
        info=describe("bytes"),
        special_text=SpecialText(()),
        fast=LyingEngine(special_tokens=TEXT),
        contested=Prescan([(0x1F600, 0x1F600)]).find,
    )
    # The fast engine would get exactly these wrong.
    texts = [text.replace("\U0001f600", "\U0001f600LIE") for text in texts]
    _, layout, unit = run_worker(tmp_path, texts, engine)
    facts = read_receipt(layout, unit).engine
    assert facts.routed_documents == sum("LIE" in text for text in texts) > 10
    assert (facts.redone, facts.mismatches) == (False, 0)
    assert stored(layout, unit) == byte_ids(texts)


def test_an_id_out_of_range_stops_the_build_and_leaves_no_trace(tmp_path: Path) -> None:
    class Overflowing(BytesEngine):
        def encode(self, texts: TextBatch) -> TokenBatch:
            tokens = super().encode(texts)
            # As uint16 this would be 0: a valid id.
            return TokenBatch(np.full_like(tokens.ids, 65536), tokens.offsets)

    engine = CheckedEngine(
        Overflowing(special_tokens=TEXT), info=describe("bytes"), special_text=SpecialText(())
    )
    with pytest.raises(AssertionError, match="id 65536 of a vocabulary of 257"):
        run_worker(tmp_path, ["x"], engine)
    assert not list((tmp_path / "store").rglob("*.bin"))


def test_a_stream_is_built_from_copies_of_its_units_and_where_they_are_gone_without(
    tmp_path: Path,
) -> None:
    texts = [f"LIE {text}" if i % 90 == 0 else text for i, text in enumerate(make_texts(400))]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(tmp_path / "raw", texts).read_bytes()))
    layout, options = StoreLayout(tmp_path / "store"), SourceOptions(unit_bytes=4000)
    (file,) = discover([path], options).files
    stream = Task(file=file, first=0, step=1)
    with started(layout, options, checked_engine()) as worker:
        layout.create()

        def work(task: Task) -> list[Any]:
            reports: list[Any] = []
            future = worker.work(task, reports.append)
            assert future is not None
            future.result()
            return reports

        work(stream)
        whole = tree(layout.shards)
        assert len(whole) > 30
        found = work(dataclasses.replace(stream, ahead=100))
        copies = [Path(each.task.copy.path) for each in found]
        assert sum(copy.stat().st_size for copy in copies) == (tmp_path / "raw").stat().st_size
        for _ in range(2):
            for name in whole:
                (layout.shards / name).unlink()
            for each in found:
                work(each.task)
            assert tree(layout.shards) == whole
            # None is needed any more, and whoever goes through the stream again sees that.
            assert not any(copy.stat().st_size for copy in copies)
            assert work(dataclasses.replace(stream, ahead=1)) == found
