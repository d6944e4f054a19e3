from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tokenmill.diagnosis import diagnose
from tokenmill.diagnosis.values import Demand, SampleFacts, WayResult

ONE = WayResult(
    key="one-by-one",
    title="one at a time",
    engine="tokenizers",
    in_loop=True,
    feeds=True,
    workers=1,
    batch=64,
    tokens=500_000,
    documents=500,
    text_bytes=2_000_000,
    seconds=5.0,
    # Of five rounds the middle ones are from 90,000 to 110,000.
    rates=(60_000, 90_000, 100_000, 110_000, 140_000),
    cpu_cores=1.0,
)


def faster(factor: float, **changes: Any) -> WayResult:
    rates = tuple(rate * factor for rate in ONE.rates)
    return dataclasses.replace(ONE, rates=rates, **changes)


POOL = faster(3, key="pool", title="process pool", in_loop=False, workers=4, cpu_cores=4.0)
BUILD = faster(20, key="build", title="tokenmill build", feeds=False)
LOADER = faster(900, key="loader", title="tokenmill Loader", in_loop=False)
WAYS = (ONE, POOL, BUILD, LOADER)


def need(rate: float, *, gpus: int = 1) -> Demand:
    return Demand(
        name="as given", tokens_per_second=rate, gpus=gpus, origin="as given", is_estimate=False
    )


def said(demand: Demand, *, cores: int = 4) -> str:
    return " ".join(
        diagnose.conclusion(demand, WAYS, diagnose.judge_all(WAYS, [demand], cores=cores))
    )


@pytest.mark.parametrize(
    ("rate", "state", "wait"),
    [
        (1_000_000, "starved", 0.9),
        (110_001, "starved", 0.0909),
        (110_000, "borderline", 0.0909),
        (80_000, "borderline", 0.0),
        (72_001, "borderline", 0.0),
        (72_000, "fed", 0.0),
        (1_000, "fed", 0.0),
    ],
)
def test_a_way_is_held_against_what_the_gpu_takes(rate: float, state: str, wait: float) -> None:
    verdict = diagnose.judge(ONE, need(rate), cores=4)
    assert verdict.state == state
    assert verdict.wait_share == pytest.approx(wait, abs=1e-4)
    assert verdict.times_too_slow == pytest.approx(rate / 100_000)
    # One after the other: the time for a token is that of both.
    in_turn = (1 / 100_000) / (1 / 100_000 + 1 / rate)
    assert verdict.wait_share_in_turn == pytest.approx(in_turn)


@pytest.mark.parametrize(
    ("way", "gpus", "cores", "feeds"),
    [
        (ONE, 8, 4, 400_000),  # eight processes, but four cores
        (ONE, 8, 64, 800_000),
        (ONE, 1, 64, 100_000),
        (POOL, 8, 4, 300_000),  # it takes all cores already
        (POOL, 8, 16, 1_200_000),
    ],
)
def test_several_gpus_have_a_process_each_as_far_as_the_cores_reach(
    way: WayResult, gpus: int, cores: int, feeds: float
) -> None:
    verdict = diagnose.judge(way, need(500_000, gpus=gpus), cores=cores)
    assert verdict.feeds_tokens_per_second == pytest.approx(feeds)
    assert verdict.needs_tokens_per_second == 500_000 * gpus


def test_a_disturbed_way_does_not_look_as_if_it_needed_less_than_a_core() -> None:
    slowed = dataclasses.replace(ONE, cpu_cores=0.2)
    assert diagnose.judge(slowed, need(1, gpus=8), cores=2).feeds_tokens_per_second == 200_000


def test_what_is_done_once_and_what_failed_has_no_verdict() -> None:
    failed = dataclasses.replace(POOL, problem="no semaphores here")
    verdicts = diagnose.judge_all([ONE, failed, BUILD], [need(1), need(2)], cores=4)
    assert [verdict.way for verdict in verdicts] == ["one-by-one", "one-by-one"]
    assert "no semaphores here" in diagnose.failures([ONE, failed])[0]


def test_a_starved_training_is_told_by_how_much_and_what_feeds_it() -> None:
    words = said(need(1_500_000))
    assert "Your GPU takes 1.5M tokens/s, and no usual way feeds that" in words
    assert "process pool, is 5.0 times too slow" in words
    assert "wait at least 80% of the time" in words
    assert "Loader feeds 90.0M tokens/s, 60 times what is needed" in words


def test_a_training_that_is_not_starved_is_not_sold_anything() -> None:
    words = said(need(20_000))
    assert "fast enough for that: one at a time feeds 5.0 times as much" in words
    assert "no reason to change anything" in words
    assert "Tokenize once, before you train" not in words


def test_where_some_ways_are_enough_those_that_are_not_are_named() -> None:
    words = said(need(200_000))
    assert "process pool feeds 1.5 times as much (too slow: one at a time)" in words
    words = said(need(100_000))
    assert "process pool feeds 3.0 times as much (close: one at a time)" in words


def test_a_close_call_is_called_close() -> None:
    words = said(need(290_000))
    assert "(process pool) is close to that: 300k tokens/s (270k to 330k)." in words
    assert "busy machine" not in words


def test_on_a_busy_machine_too_slow_is_said_only_where_a_quiet_one_would_be_too() -> None:
    # It had two thirds of a core, and others all the rest.
    slowed = dataclasses.replace(ONE, cpu_cores=0.66, other_cores=1.34)
    verdict = diagnose.judge(slowed, need(150_000), cores=2)
    assert (verdict.state, verdict.on_busy_machine) == ("borderline", True)
    # With a whole core, and none who shares it.
    assert verdict.high_tokens_per_second == pytest.approx(2 * 110_000 / 0.66)
    assert diagnose.sentence(verdict, slowed, need(150_000)) == (
        "feeds 100k tokens/s (90.0k to 333k); your GPU takes 150k: close, measured on a busy"
        " machine"
    )
    assert diagnose.judge(slowed, need(340_000), cores=2).state == "starved"
    [words] = diagnose.conclusion(need(150_000), [slowed], [verdict])
    assert "feeds 100k tokens/s (90.0k to 333k on a quiet one)" in words
    assert "cannot be said here" in words
    # With cores to spare nobody was in the way.
    assert diagnose.judge(slowed, need(150_000), cores=8).state == "starved"
    assert diagnose.judge(ONE, need(150_000), cores=1).state == "starved"


def test_a_way_that_changes_ids_is_neither_judged_nor_advised() -> None:
    joined = faster(50, key="joined", title="joined", compared_documents=9, differing_documents=1)
    ways = (*WAYS, joined)
    verdicts = diagnose.judge_all(ways, [need(1_500_000)], cores=4)
    assert "joined" not in {verdict.way for verdict in verdicts}
    words = " ".join(diagnose.conclusion(need(1_500_000), ways, verdicts))
    assert "joined" not in words
    assert "no usual way feeds that" in words
    held = dataclasses.replace(joined, differing_documents=0, delimited_documents=1)
    assert held.changes_ids


def test_where_even_the_loader_is_too_slow_it_is_said() -> None:
    words = said(need(100_000_000, gpus=8))
    assert "8 GPUs take 800M tokens/s" in words
    assert "that too is 2.2 times too slow" in words


def test_one_sentence_for_a_way() -> None:
    starved = need(1_000_000, gpus=8)
    verdict = diagnose.judge(ONE, starved, cores=8)
    assert diagnose.sentence(verdict, ONE, starved) == (
        "feeds 800k tokens/s; 8 GPUs take 8.0M: 10 times too slow, they would wait at least 90% of"
        " the time, 91% if the loop tokenizes between steps and not ahead of them"
    )
    fed = need(10_000)
    assert diagnose.sentence(diagnose.judge(ONE, fed, cores=8), ONE, fed) == (
        "feeds 100k tokens/s, 10 times the 10.0k that your GPU takes: fast enough"
    )


def test_several_models_have_a_line_each() -> None:
    small = dataclasses.replace(need(150_000), name="small", is_estimate=True)
    verdicts = diagnose.judge_all(WAYS, [small], cores=4)
    assert diagnose.line_for(small, WAYS, verdicts) == (
        "Model small: the GPU takes about 150k tokens/s; enough: process pool and tokenmill Loader;"
        " too slow: one at a time (33% waiting)."
    )


def test_the_cost_of_building_is_brought_to_the_whole_input() -> None:
    sample = SampleFacts(
        files=1,
        input_bytes=10**10,
        estimated_text_bytes=4 * 10**10,
        documents=10,
        text_bytes=10**7,
        rejected=0,
        largest_document_bytes=100,
    )
    build = dataclasses.replace(BUILD, text_bytes=40_000_000, seconds=1.0, workers=2)
    [words] = diagnose.cost_of_building(build, sample)
    assert "about 17 minutes here: tokenmill build did 40.0 MB of text a second" in words
    little = dataclasses.replace(sample, text_bytes=999)
    assert diagnose.cost_of_building(build, little) == []
    assert "10 documents, 999 B" in diagnose.little_text(little)[0]
    assert diagnose.little_text(sample) == []


def test_a_busy_machine_is_told_of() -> None:
    busy = dataclasses.replace(ONE, cpu_cores=0.5, other_cores=1.5)
    [words] = diagnose.disturbance([busy, ONE], cores=2)
    assert "up to 1.5 of the 2 cores" in words
    assert "perhaps 4.0 times" in words
    assert diagnose.disturbance([busy], cores=16) == []
    assert diagnose.disturbance([ONE], cores=1) == []


def test_the_cost_of_tokenizing_in_the_loop_is_what_keeping_up_takes() -> None:
    assert "0.20 cores to keep up" in said(need(20_000))
