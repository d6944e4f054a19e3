"""A fast engine that lies: its unit is done again by the reference, and the store is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import byte_ids, make_texts, write_jsonl

from tokenmill.builder.encode import RowEncoder
from tokenmill.builder.plan import BuildSettings, Task, divide_budget, request_identity
from tokenmill.builder.worker import ProgressReport, UnitReport, WorkerStart
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
    from pathlib import Path

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


def run_worker(
    tmp_path: Path, texts: list[str], engine: CheckedEngine
) -> tuple[list[Any], StoreLayout, str]:
    options = SourceOptions(unit_bytes=1 << 20)
    (file,) = discover([write_jsonl(tmp_path / "a.jsonl", texts)], options).files
    layout = StoreLayout(tmp_path / "store")
    reports: list[Any] = []
    with StoreLock(layout) as lock:
        settings = settings_for(layout, options)
        start = WorkerStart(
            settings=settings,
            store=str(layout.root),
            url=None,
            corner="",
            token=lock.token,
            tokenizer=describe("bytes"),
            encoder=RowEncoder(engine, settings.identity),
        )
        worker = start()
        try:
            future = worker.work(Task(file=file, first=0), reports.append)
            assert future is not None
            future.result()
        finally:
            worker.close()
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
