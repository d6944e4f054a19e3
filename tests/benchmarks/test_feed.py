"""The measurement of feeding: small stores from end to end, and tables of made-up numbers."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from benchmarks.contenders import feeding
from benchmarks.contenders.feeding import Reader
from benchmarks.feeders import CONTENDERS, LIMIT, OWN, PEER, Contender
from tests.benchmarks.test_render import ORIGIN, table_row
from tests.loader.stores import EOS, write_store

from benchmarks import feed, feed_tables, hollow, measure, render, startup
from tokenmill.store.check import check_store
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.contenders.feeding import Pair

SIZE = feed.Size(rounds=1, num_bytes=0, seconds=0.02, warm_seconds=0.01, seq_len=32, batch_size=4)
HERE = [contender for contender in CONTENDERS if not contender.environment]
QUICK = {"tokenmill, best-fit", "memmap, as in nanoGPT"}
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def bench(tmp_path: Path) -> feed.Bench:
    """The same documents in one shard and in sixteen."""
    random = np.random.default_rng(0)
    documents = [[*random.integers(0, 50_000, 100).tolist(), EOS] for _ in range(160)]
    one = write_store(tmp_path / "store-1", [documents])
    write_store(tmp_path / "store-16", [documents[i : i + 10] for i in range(0, 160, 10)])
    tokens = feed.Tokens(
        folder=tmp_path,
        corpus="random",
        tokenizer="none",
        documents=len(one),
        tokens=one.num_tokens,
        vocab_size=one.vocab_size,
        eos_id=EOS,
    )
    return feed.Bench(size=SIZE, tokens=tokens)


def in_this_environment(names: set[str]) -> list[Contender]:
    chosen = [contender for contender in HERE if contender.name in names]
    return [c for c in chosen if HAS_TORCH or c.module in ("feeding_limit", "feeding_tokenmill")]


@pytest.mark.slow
def test_contenders_of_this_environment_are_measured_and_resume_exactly(bench: feed.Bench) -> None:
    contenders = in_this_environment(QUICK)
    rows = feed.measure_all(bench, contenders)

    assert len(rows) == len(QUICK) or not HAS_TORCH
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert all(row["tokens"][0] > 0 and row["seconds"][0] >= SIZE.seconds for row in rows)
    resumed = [row["resume"] for row in rows if row["resume"] is not None]
    assert len(resumed) == sum(contender.resumes for contender in contenders) > 0
    assert all(found["error"] is None and found["exact"] for found in resumed)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="most contenders need torch")
def test_every_contender_of_this_environment_works(bench: feed.Bench) -> None:
    rows = feed.measure_all(bench, HERE)

    assert {row["contender"]: row["error"] for row in rows if row["error"]} == {}
    assert all(row["resume"]["exact"] for row in rows if row["resume"] is not None)


def test_a_contender_that_hands_out_other_tokens_is_not_measured(bench: feed.Bench) -> None:
    tokens = np.fromfile(f"{bench.tokens.pair}.bin", np.uint16)
    elsewhere = bench.tokens.folder / "elsewhere"
    ((tokens + 1) % 50_000).astype(np.uint16).tofile(f"{elsewhere}.bin")
    [concat] = in_this_environment({"tokenmill, concat"})

    class OtherTokens(feed.Tokens):
        @property
        def pair(self) -> Path:
            return elsewhere

    values = {f.name: getattr(bench.tokens, f.name) for f in dataclasses.fields(bench.tokens)}
    other = feed.Bench(size=SIZE, tokens=OtherTokens(**values))
    with pytest.raises(measure.ContenderError, match="other work"):
        other.call(concat, "rate")


def test_a_contender_that_fails_keeps_its_row_and_the_others_are_measured(
    bench: feed.Bench,
) -> None:
    [concat] = in_this_environment({"tokenmill, concat"})
    broken = dataclasses.replace(concat, name="broken", mode="no such mode")
    rows = feed.measure_all(bench, [broken, dataclasses.replace(concat, resumes=False)])

    assert "no such mode" in rows[0]["error"]
    assert rows[1]["error"] is None


class SlowStart:
    """An epoch of four batches of 6 tokens, 5 s each, after 100 s of getting ready."""

    def __init__(self) -> None:
        self.epochs = 0
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def epoch(self) -> Iterator[Pair]:
        self.epochs += 1
        self.now += 100
        for _ in range(4):
            batch = np.zeros((2, 4), np.uint16)
            yield batch[:, :-1], batch[:, 1:]
            self.now += 5

    def state(self) -> Any:
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        raise NotImplementedError


def test_the_clock_stands_between_epochs_and_first_batches_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feeder = SlowStart()
    monkeypatch.setattr(feeding, "time", feeder)
    assert Reader(feeder).read(40) == ((3 + 3 + 2) * 6, 40)
    assert feeder.epochs == 3


def row(contender: str, role: str, *, rates: list[float], **more: Any) -> feed_tables.Row:
    """A row with these rates, in million tokens/s, over 2 s each."""
    return {
        "contender": contender,
        "role": role,
        "workers": 0,
        "error": None,
        "tokens": [int(2e6 * rate) for rate in rates],
        "seconds": [2.0] * len(rates),
        "dtype": "uint16",
        "padding_share": 0.0,
        "resume": None,
    } | more


def results(*rows: feed_tables.Row) -> dict[str, Any]:
    return ORIGIN | {
        "measurements": list(rows),
        "peer_versions": {"mosaicml": {"mosaicml-streaming": "0.10.0"}},
        "corpus": "english",
        "tokenizer": "gpt2",
        "documents": 3,
        "tokens": 67_000_000,
        "seq_len": 2048,
        "batch_size": 16,
        "rounds": 3,
        "seconds": 3.0,
    }


def test_rates_are_medians_beside_the_limit_and_the_fastest_peer() -> None:
    text = render.feed_section(
        results(
            row("gather", LIMIT, rates=[4000, 5000, 3000]),
            row("tokenmill, concat", OWN, rates=[2000, 1000, 1500]),
            row("slow", PEER, rates=[40.04, 50, 30]),
            row("fast", PEER, rates=[250, 900, 200]),
        )
    )

    assert table_row(text, "gather")[3:] == ["4,000 (3,000 to 5,000)", "1.00", "16.00"]
    assert table_row(text, "tokenmill, concat")[2:] == [
        "uint16",
        "1,500 (1,000 to 2,000)",
        "0.38",
        "6.00",
    ]
    assert table_row(text, "slow")[3:] == ["40.0 (30.0 to 50.0)", "0.01", "0.16"]
    assert text.index("| fast |") < text.index("| slow |")
    assert "mosaicml-streaming 0.10.0" in text


def test_rows_that_failed_say_why_and_are_no_fastest_peer() -> None:
    failed = {"error": "not installed: no | wheel", "padding_share": 0.0}
    text = render.feed_section(
        results(
            row("own", OWN, rates=[100], padding_share=0.53),
            row("gone", PEER, rates=[900], **failed),
            row("peer", PEER, rates=[50], resume={"error": "nothing is left"}),
        )
    )

    assert table_row(text, "gone")[3] == "not installed: no / wheel"
    assert table_row(text, "own")[5] == "2.00"
    assert "own: 53% of the places counted are padding." in text
    assert "| peer | nothing is left |  |  |" in text


def test_resumption_is_shown_in_milliseconds_with_what_opening_took() -> None:
    found = {
        "error": None,
        "open_seconds": [0.25, 0.125, 0.5],
        "first_batch_seconds": [0.004, 0.003, 0.0051],
        "exact": False,
    }
    text = render.feed_section(results(row("own", OWN, rates=[100], resume=found)))

    assert "| own | 4.0 (3.0 to 5.1) ms | 250 (125 to 500) ms | no |" in text


def test_a_hollow_store_is_a_whole_store(tmp_path: Path) -> None:
    size = hollow.Hollow(shards=3, shard_tokens=700_001, shard_documents=1_000)
    hollow.write_hollow(tmp_path / "store", size)
    store = Store(tmp_path / "store")
    lengths = hollow.document_lengths(size)

    assert store.num_tokens == size.tokens == 2_100_003
    assert lengths.min() >= 1
    assert 500 < np.median(lengths) * 690 / 400 < 900
    assert check_store(tmp_path / "store").findings == ()
    assert len({path.stat().st_ino for path in (tmp_path / "store/shards").glob("*.idx")}) == 3


def test_start_up_is_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "FOLDER", tmp_path / "startup")
    store = hollow.Hollow(shards=2, shard_tokens=300_000, shard_documents=400)
    size = startup.Size(rounds=2, batches=3, stores=(store,))
    own, _ = startup.make_cases(store)
    row = startup.measure_case(own, size)

    assert row["error"] is None
    assert len(row["open_seconds"]) == len(row["resume_seconds"]) == 2
    assert all(
        0 < r < w for r, w in zip(row["restore_seconds"], row["resume_seconds"], strict=True)
    )
    text = render.startup_section(ORIGIN | {"measurements": [row], "batches": 3})
    assert table_row(text, "tokenmill")[1:3] == ["600,000", "2"]
    assert "memory after 3 batches" in text
