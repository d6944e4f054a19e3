"""Steps by formula are those of a run that goes row by row, from any position, with any batch."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store

from tokenmill.errors import UsageError
from tokenmill.loader.mixture import Extent, Mixture, Plan, Position, Stage, StageRun
from tokenmill.loader.order import make_round, weights_to_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.store.reader import Store

SEQ_LEN = 8
NAMES = ("web", "code", "wiki")
SIZES = (200, 50, 90)
Row = tuple[int, int, int]


def measure(seq_len: int) -> list[Extent]:
    """Rows of `concat`: the last is padded."""
    return [Extent(rows=-(-(size - 1) // seq_len)) for size in SIZES]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    root = tmp_path_factory.mktemp("stores")
    pairs = zip(NAMES, SIZES, strict=True)
    return [numbered_store(root / name, [[size]]) for name, size in pairs]


def mix(stores: Sequence[Store], weights: Sequence[float], **options: Any) -> Mixture:
    sources = {n: (s, w) for n, s, w in zip(NAMES, stores, weights, strict=True)}
    return Mixture(sources, **options)


def make_plan(mixture: Mixture, *, batch_rows: int = 4, **options: Any) -> Plan:
    return Plan(mixture, seq_len=SEQ_LEN, batch_rows=batch_rows, measure=measure, **options)


def stage_of(plan: Plan, step: int) -> StageRun:
    run = plan.find(step)
    assert run is not None
    return run


def draw(plan: Plan, step: int) -> list[Row]:
    run = stage_of(plan, step)
    source, index = run.schedule.locate(np.array(run.rows(step), np.int64))
    epoch, row = np.divmod(index, run.rows_per_epoch[source])
    return list(zip(source.tolist(), epoch.tolist(), row.tolist(), strict=True))


def steps_of(plan: Plan, most: int) -> list[list[Row]]:
    """The steps from the plan's origin on."""
    steps: list[list[Row]] = []
    while len(steps) < most and plan.find(plan.origin_step + len(steps)) is not None:
        steps.append(draw(plan, plan.origin_step + len(steps)))
    return steps


def walk_run(mixture: Mixture, *, batch_rows: int, most: int) -> list[list[Row]]:
    """The oracle: a run that goes from row to row and knows no formula but the rounds."""
    sources = range(len(mixture.names))
    epoch, row = [0 for _ in sources], [0 for _ in sources]
    seen = [Fraction(0) for _ in sources]
    steps: list[list[Row]] = []
    before = None
    for stage in mixture.stages:
        seq_len = stage.seq_len or SEQ_LEN
        rows = [extent.rows for extent in measure(seq_len)]
        if before not in (None, seq_len):
            epoch = [epoch[i] + (row[i] > 0) for i in sources]
            row = [0 for _ in sources]
        before = seq_len
        size = batch_rows * SEQ_LEN // seq_len
        is_last = stage is mixture.stages[-1]
        drawn, place, live = 0, 0, None
        while len(steps) < most and (stage.tokens is None or drawn * seq_len < stage.tokens):
            saved = [*epoch], [*row], [*seen]
            batch: list[Row] = []
            while len(batch) < size:
                parts = tuple(
                    0 if cap is not None and seen[i] + Fraction(1, rows[i]) > cap else weight
                    for i, weight, cap in zip(
                        sources, stage.weights, mixture.max_epochs, strict=True
                    )
                )
                if not any(parts):
                    break
                if parts != live:
                    place, live = 0, parts
                    cycle = make_round(weights_to_parts(parts))
                source = int(cycle.source[place % cycle.period])
                place += 1
                batch.append((source, epoch[source], row[source]))
                seen[source] += Fraction(1, rows[source])
                row[source] += 1
                if row[source] == rows[source]:
                    epoch[source], row[source] = epoch[source] + 1, 0
            if len(batch) < size and not is_last:
                epoch, row, seen = saved
                break
            if not batch:
                break
            steps.append(batch)
            drawn += len(batch)
            if len(batch) < size:
                break
    return steps


WEIGHTS = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)
CAPS = st.none() | st.sampled_from([0.3, 1, 1.5, 2, 7 / 3])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    stages = []
    for number in range(count):
        tokens = draw(st.integers(1, 1200))
        weights = draw(st.none() | WEIGHTS)
        stages.append(
            Stage(
                tokens=draw(st.sampled_from([tokens, None])) if number == count - 1 else tokens,
                weights=None if weights is None else dict(zip(NAMES, weights, strict=True)),
                seq_len=draw(st.sampled_from([None, None, 4, 8, 16])),
            )
        )
    caps = {name: cap for name in NAMES if (cap := draw(CAPS)) is not None}
    return {"weights": draw(WEIGHTS), "stages": stages, "max_epochs": caps}


BATCHES = st.sampled_from([2, 4, 6, 16])
FIXED = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)


@FIXED
@given(options=options(), batch_rows=BATCHES)
def test_steps_are_those_of_a_run_that_goes_row_by_row(
    stores: list[Store], options: dict[str, Any], batch_rows: int
) -> None:
    mixture = mix(stores, **options)
    plan = make_plan(mixture, batch_rows=batch_rows)
    expected = walk_run(mixture, batch_rows=batch_rows, most=80)
    assert steps_of(plan, 80) == expected
    if len(expected) < 80:
        assert plan.num_steps == len(expected)
        assert plan.find(len(expected)) is None
        with pytest.raises(IndexError):
            plan.position(len(expected) + 1)


@FIXED
@given(options=options(), batch_rows=BATCHES, data=st.data())
def test_a_run_goes_on_from_any_step_through_its_saved_state(
    stores: list[Store], options: dict[str, Any], batch_rows: int, data: st.DataObject
) -> None:
    mixture = mix(stores, **options)
    whole = steps_of(make_plan(mixture, batch_rows=batch_rows), 100)
    step = data.draw(st.integers(0, len(whole)))
    # A fresh plan: nothing was drawn before the step that is asked for.
    state = json.loads(
        json.dumps(make_plan(mixture, batch_rows=batch_rows).position(step).to_json())
    )
    origin = Position.from_json(state, num_sources=3)
    resumed = make_plan(mixture, batch_rows=batch_rows, origin=origin, origin_step=step)
    assert steps_of(resumed, len(whole) - step) == whole[step:]
    for later in range(step, len(whole) + 1):
        assert resumed.position(later) == make_plan(mixture, batch_rows=batch_rows).position(later)


@FIXED
@given(weights=WEIGHTS, first=BATCHES, second=BATCHES, step=st.integers(0, 30), cap=CAPS)
def test_another_batch_size_goes_on_at_exactly_the_next_row(
    stores: list[Store], weights: list[int], first: int, second: int, step: int, cap: float | None
) -> None:
    mixture = mix(stores, weights, max_epochs=cap)
    plan = make_plan(mixture, batch_rows=first)
    assume(plan.num_steps is None or step <= plan.num_steps)
    rows = [row for batch in steps_of(plan, 200) for row in batch]
    resumed = make_plan(mixture, batch_rows=second, origin=plan.position(step), origin_step=step)
    after = [row for batch in steps_of(resumed, 20) for row in batch]
    assert after == rows[step * first :][: len(after)]
    assert after or len(rows) <= step * first


def test_another_batch_size_ends_the_stage_with_the_batch_that_reaches_its_tokens(
    stores: list[Store],
) -> None:
    mixture = mix(stores, [1, 1, 0], stages=[Stage(tokens=30 * SEQ_LEN), Stage(seq_len=16)])
    origin = make_plan(mixture, batch_rows=4).position(3)
    plan = make_plan(mixture, batch_rows=10, origin=origin, origin_step=3)
    # 12 rows are drawn, 18 are left: two batches of 10, which overshoot by 2.
    assert [stage_of(plan, step).start.stage for step in (3, 4, 5)] == [0, 0, 1]
    assert stage_of(plan, 5).start.past[0].rows == (16, 16, 0)


@FIXED
@given(options=options(), step=st.integers(0, 60))
def test_what_was_seen_is_what_the_steps_drew(
    stores: list[Store], options: dict[str, Any], step: int
) -> None:
    mixture = mix(stores, **options)
    plan = make_plan(mixture)
    step = min(step, len(steps_of(plan, step)))
    rows, tokens = [0, 0, 0], [0, 0, 0]
    epochs = [Fraction(0)] * 3
    for number in range(step):
        seq_len = stage_of(plan, number).seq_len
        for source, _, _ in draw(plan, number):
            rows[source] += 1
            tokens[source] += seq_len
            epochs[source] += Fraction(1, measure(seq_len)[source].rows)
    seen = make_plan(mixture).seen(step)
    assert list(seen) == list(NAMES)
    assert [item["rows"] for item in seen.values()] == rows
    assert [item["tokens"] for item in seen.values()] == tokens
    assert [item["epochs"] for item in seen.values()] == [float(epoch) for epoch in epochs]
    for cap, epoch in zip(mixture.max_epochs, epochs, strict=True):
        assert cap is None or epoch <= cap


@FIXED
@given(options=options())
def test_no_row_is_drawn_twice_in_an_epoch_and_no_epoch_number_in_two_passes(
    stores: list[Store], options: dict[str, Any]
) -> None:
    plan = make_plan(mix(stores, **options))
    drawn: dict[Row, int] = {}
    passes: dict[tuple[int, int], int] = {}
    for step, batch in enumerate(steps_of(plan, 100)):
        for source, epoch, row in batch:
            assert (source, epoch, row) not in drawn
            drawn[source, epoch, row] = step
            number = len(stage_of(plan, step).start.past)
            assert passes.setdefault((source, epoch), number) == number
    assert drawn or plan.num_steps == 0


def test_where_seq_len_stays_sources_go_on_and_where_it_changes_they_begin_an_epoch(
    stores: list[Store],
) -> None:
    stages = [
        Stage(tokens=12 * SEQ_LEN),
        Stage(tokens=12 * SEQ_LEN, weights={"web": 0, "code": 1, "wiki": 0}),
        Stage(seq_len=16),
    ]
    plan = make_plan(mix(stores, [1, 1, 0], stages=stages), batch_rows=4)
    assert [draw(plan, 0)[-1], draw(plan, 2)[-1]] == [(1, 0, 1), (1, 0, 5)]
    # code has 7 rows of 8: row 6 ends its epoch 0, and 12 more make 18 in all.
    assert draw(plan, 3) == [(1, 0, 6), (1, 1, 0), (1, 1, 1), (1, 1, 2)]
    assert stage_of(plan, 6).rows_per_epoch.tolist() == [13, 4, 6]
    # 18 of 7 rows are in epochs 0, 1 and 2, so the fresh pass of 4 longer rows begins with 3.
    assert draw(plan, 6) == [(1, 3, 0), (1, 3, 1)]
    seen = [(item["rows"], item["tokens"]) for item in plan.seen(7).values()]
    assert seen == [(6, 48), (20, 176), (0, 0)]


def test_rows_that_fill_no_batch_wait_for_the_next_stage_and_come_last(
    stores: list[Store],
) -> None:
    # One epoch of code is 7 rows: one batch of 4 in stage 0, and 3 rows that stage 1 still has.
    stages = [Stage(tokens=1000), Stage(tokens=1000)]
    plan = make_plan(mix(stores, [0, 1, 0], stages=stages, max_epochs=1), batch_rows=4)
    assert [stage_of(plan, step).start.stage for step in (0, 1)] == [0, 1]
    assert draw(plan, 1) == [(1, 0, 4), (1, 0, 5), (1, 0, 6)]
    assert plan.num_steps == 2


def test_half_an_epoch_is_half_the_rows_whatever_their_length(stores: list[Store]) -> None:
    stages = [Stage(tokens=4 * SEQ_LEN), Stage(seq_len=4)]
    plan = make_plan(mix(stores, [0, 0, 1], stages=stages, max_epochs=1.5), batch_rows=2)
    # wiki has 12 rows of 8 and 23 of 4: a third is seen in stage 0, 7/6 of 23 are left.
    assert plan.num_steps is not None
    drawn = [row for step in range(2, plan.num_steps) for row in draw(plan, step)]
    assert len(drawn) == 23 * 7 // 6
    assert drawn[0] == (2, 1, 0)
    assert plan.seen(plan.num_steps)["wiki"]["epochs"] <= 1.5


def test_token_weights_draw_more_rows_where_rows_are_emptier(stores: list[Store]) -> None:
    def half_full(seq_len: int) -> list[Extent]:
        return [Extent(rows=25, tokens=200), Extent(rows=12, tokens=48), Extent(rows=9, tokens=72)]

    mixture = mix(stores, [0.5, 0.5, 0])
    plan = Plan(mixture, seq_len=SEQ_LEN, batch_rows=3, measure=half_full)
    assert stage_of(plan, 0).schedule.parts == (1, 2, 0)


def test_an_endless_run_has_no_last_step_and_measures_only_the_stages_it_reaches(
    stores: list[Store],
) -> None:
    asked: list[int] = []

    def count(seq_len: int) -> list[Extent]:
        asked.append(seq_len)
        return measure(seq_len)

    mixture = mix(stores, [1, 1, 1], stages=[Stage(tokens=10**12), Stage(seq_len=16)])
    plan = Plan(mixture, seq_len=SEQ_LEN, batch_rows=4, measure=count)
    assert plan.num_steps is None
    assert asked == []
    stage_of(plan, 10**9)
    assert asked == [8]
    assert stage_of(plan, 10**12).start.stage == 1
    assert asked == [8, 16]


def test_steps_before_the_point_of_resumption_are_refused(stores: list[Store]) -> None:
    mixture = mix(stores, [1, 1, 1])
    plan = make_plan(mixture, origin=make_plan(mixture).position(5), origin_step=5)
    with pytest.raises(IndexError, match="before step 5"):
        stage_of(plan, 4)


def test_a_source_without_rows_is_named(stores: list[Store]) -> None:
    def nothing(seq_len: int) -> list[Extent]:
        return [Extent(rows=3), Extent(rows=0), Extent(rows=3)]

    plan = Plan(mix(stores, [1, 1, 1]), seq_len=8, batch_rows=2, measure=nothing)
    with pytest.raises(UsageError, match="'code'"):
        stage_of(plan, 0)


def test_a_batch_that_a_later_stage_cannot_keep_whole_is_refused_at_once(
    stores: list[Store],
) -> None:
    stages = [Stage(tokens=10**9), Stage(seq_len=32)]
    with pytest.raises(UsageError, match="batch_size"):
        make_plan(mix(stores, [1, 1, 1], stages=stages), batch_rows=6)


GOOD: dict[str, Any] = {
    "stage": 1,
    "row": 8,
    "drawn": [1, 2, 3],
    "past": [{"seq_len": 8, "rows": [4, 5, 6], "rows_per_epoch": [25, 7, 12]}],
}


@pytest.mark.parametrize(
    "damage",
    [
        {"stage": -1},
        {"stage": True},
        {"row": 1.0},
        {"row": None},
        {"row": 2**60},
        {"drawn": [1, 2]},
        {"drawn": 3},
        {"drawn": [1, 2, "3"]},
        {"past": None},
        {"past": [3]},
        {"past": [{**GOOD["past"][0], "rows_per_epoch": [0, 7, 12]}]},
        {"past": [{"seq_len": 8}]},
        {"more": 1},
    ],
)
def test_a_state_that_is_not_of_this_mixture_is_refused(damage: dict[str, Any]) -> None:
    assert Position.from_json(GOOD, num_sources=3).to_json() == GOOD
    with pytest.raises(UsageError, match=r"state_dict\(\)"):
        Position.from_json({**GOOD, **damage}, num_sources=3)


def test_a_state_of_a_stage_that_the_mixture_has_not_is_refused(stores: list[Store]) -> None:
    with pytest.raises(UsageError, match="stage 1, and the mixture has 1"):
        make_plan(mix(stores, [1, 1, 1]), origin=Position.from_json(GOOD, num_sources=3))


def test_a_state_that_has_drawn_more_than_the_caps_allow_is_refused(stores: list[Store]) -> None:
    origin = make_plan(mix(stores, [1, 1, 1], max_epochs=4)).position(30)
    fewer = make_plan(mix(stores, [1, 1, 1], max_epochs=1), origin=origin, origin_step=30)
    with pytest.raises(UsageError, match="max_epochs leaves 44"):
        fewer.find(30)
