"""What a user may say about a mixture, what is refused, and what it makes of token weights."""

from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.loader.stores import numbered_store, write_store
from tests.store.samples import SampleStore, SampleUnit

import tokenmill
from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.mixture import Extent, Mixture, Stage, row_parts, rows_of_batch
from tokenmill.store.facts import BoundaryToken, write_manifest
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def web(tmp_path: Path) -> Store:
    return numbered_store(tmp_path / "web", [[30, 70], [100]])


@pytest.fixture
def code(tmp_path: Path) -> Store:
    return numbered_store(tmp_path / "code", [[50]])


def foreign(root: Path, *, fingerprint: str | None = None, eos: int | None = None) -> Store:
    """A store with another tokenizer, or another end of text."""
    store = numbered_store(root, [[20]])
    identity = store.manifest.identity
    if fingerprint is not None:
        identity = identity.but(tokenizer=identity.tokenizer.but(fingerprint=fingerprint))
    if eos is not None:
        identity = identity.but(eos=BoundaryToken(token="<e>", id=eos, position="end"))
    write_manifest(store.layout, replace(store.manifest, identity=identity))
    return Store(root)


def test_sources_keep_their_order_and_stages_take_over_what_they_leave_out(
    web: Store, code: Store
) -> None:
    mixture = Mixture(
        {"web": (web, 0.7), "code": (code.path, 0.3)},
        stages=[
            Stage(tokens=1000),
            Stage(tokens=500, weights={"code": 0.6, "web": 0.4}, seq_len=64),
            Stage(tokens=500),
            Stage(weights={"web": 1, "code": 0}),
        ],
    )
    assert mixture.names == ("web", "code")
    assert [store.num_tokens for store in mixture.stores] == [200, 50]
    assert [stage.weights for stage in mixture.stages] == [
        (0.7, 0.3),
        (0.4, 0.6),
        (0.4, 0.6),
        (1, 0),
    ]
    assert [stage.seq_len for stage in mixture.stages] == [None, 64, 64, 64]
    assert [stage.tokens for stage in mixture.stages] == [1000, 500, 500, None]


def test_without_stages_a_mixture_is_one_endless_stage(web: Store, code: Store) -> None:
    mixture = Mixture({"web": (web, 3), "code": (code, 1)})
    (stage,) = mixture.stages
    assert (stage.tokens, stage.seq_len, stage.weights) == (None, None, (3, 1))


def test_a_single_store_is_a_mixture_of_one_source_without_a_name(web: Store) -> None:
    mixture = Mixture.of(web.path, max_epochs=1.5)
    assert mixture.names == ("",)
    assert mixture.max_epochs == (Fraction(3, 2),)
    assert Mixture.of(web).stores == (web,)


def test_a_mixture_survives_pickling(web: Store, code: Store) -> None:
    mixture = Mixture({"web": (web, 0.7), "code": (code, 0.3)}, max_epochs={"code": 4})
    again = pickle.loads(pickle.dumps(mixture))
    assert again.names == mixture.names
    assert again.stages == mixture.stages
    assert again.max_epochs == (None, 4)
    assert again.stores[1].num_tokens == 50


def test_paths_are_opened_with_the_split_asked_for(web: Store) -> None:
    assert Mixture({"web": (web.path, 1)}).stores[0].split == "train"
    every = Store(web.path, split=None)
    assert Mixture({"all": (every, 1)}).stores[0].split is None
    with pytest.raises(StoreError, match="no split 'val'"):
        Mixture({"web": (str(web.path), 1)}, split="val")


def test_stores_of_different_tokenizers_are_refused_by_name(web: Store, tmp_path: Path) -> None:
    other = foreign(tmp_path / "other", fingerprint="f" * 16)
    with pytest.raises(UsageError) as caught:
        Mixture({"web": (web, 1), "other": (other, 1)})
    for words in ("'web'", "'other'", str(other.path), "other text", "one tokenizer"):
        assert words in str(caught.value)


def test_stores_of_different_width_are_refused(web: Store, tmp_path: Path) -> None:
    wide = numbered_store(tmp_path / "wide", [[5]], vocab_size=100_000)
    with pytest.raises(UsageError, match="different tokenizers"):
        Mixture({"web": (web, 1), "wide": (wide, 1)})


def test_stores_whose_documents_end_differently_are_refused(web: Store, tmp_path: Path) -> None:
    other = foreign(tmp_path / "other", eos=7)
    with pytest.raises(UsageError, match=rf"ids {web.eos_id} and 7"):
        Mixture({"web": (web, 1), "other": (other, 1)})


def test_a_store_without_tokens_is_refused(web: Store, tmp_path: Path) -> None:
    empty = write_store(tmp_path / "empty", [[]])
    with pytest.raises(UsageError, match=r"no tokens .* leave it out"):
        Mixture({"web": (web, 1), "empty": (empty, 1)})


@pytest.mark.parametrize(
    "sources", [{}, [], None, {"": ("x", 1)}, {3: ("x", 1)}, {"a\n": ("x", 1)}]
)
def test_a_mixture_needs_sources_with_plain_names(sources: Any) -> None:
    with pytest.raises(UsageError, match="source"):
        Mixture(sources)


@pytest.mark.parametrize("value", ["store", ("store",), ("store", 1, 2), 0.5])
def test_a_source_that_is_no_store_and_weight_is_refused_before_any_is_opened(value: Any) -> None:
    with pytest.raises(UsageError, match=r"'web' is .* write \{"):
        Mixture({"web": value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": [Stage(), Stage(tokens=5)]}, "stage 0 has no tokens"),
        ({"stages": [Stage(weights={"web": 1})]}, "leave out 'code'.*\"code\": 0"),
        ({"stages": [Stage(weights={"web": 1, "code": 1, "wiki": 1})]}, "name 'wiki'"),
        ({"stages": [Stage(weights={"web": 0, "code": 0})]}, "nothing to draw"),
        ({"stages": [Stage(weights={"web": -1, "code": 1})]}, "weight -1"),
        ({"stages": [Stage(weights=cast("Any", [0.5, 0.5]))]}, "not numbers by name"),
        ({"stages": [1000]}, "not a stage"),
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"max_epochs": float("nan")}, "max_epochs=nan"),
        ({"max_epochs": {"code": -1}}, "max_epochs=-1"),
        ({"max_epochs": {"wiki": 4}}, "name 'wiki'"),
        ({"max_epochs": "4"}, "max_epochs='4'"),
    ],
)
def test_stages_and_caps_that_make_no_sense_are_refused(
    web: Store, code: Store, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Mixture({"web": (web, 0.7), "code": (code, 0.3)}, **arguments)


@pytest.mark.parametrize("weight", [-1, float("nan"), "1", None])
def test_weights_that_are_no_shares_are_refused(web: Store, weight: Any) -> None:
    with pytest.raises(UsageError, match="weight"):
        Mixture({"web": (web, weight)})


@pytest.mark.parametrize(
    "arguments", [{"tokens": 0}, {"tokens": 1e9}, {"seq_len": -1}, {"seq_len": "8"}]
)
def test_a_stage_counts_in_whole_numbers(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="whole number above 0"):
        Stage(**arguments)


def test_full_rows_keep_the_weights_exactly() -> None:
    assert row_parts([0.7, 0.3], [Extent(rows=5), Extent(rows=9)]) == (7, 3)


def test_a_source_with_rows_half_full_is_drawn_twice_as_often() -> None:
    fills = [Extent(tokens=1000, rows=10), Extent(tokens=1000, rows=20)]
    assert row_parts([0.5, 0.5], fills) == (1, 2)
    # Shares of tokens come out as asked: 7 rows of 100 to 6 rows of 50.
    assert row_parts([0.7, 0.3], fills) == (7, 6)
    with pytest.raises(UsageError, match="weight"):
        row_parts([-1, 1], fills)


def test_a_batch_keeps_its_tokens_when_rows_become_longer() -> None:
    assert rows_of_batch(16, seq_len=2048, stage_seq_len=8192) == 4
    assert rows_of_batch(16, seq_len=2048, stage_seq_len=512) == 64
    assert rows_of_batch(3, seq_len=4, stage_seq_len=6) == 2


@pytest.mark.parametrize(("batch_size", "works"), [(3, 4), (2, 4), (7, 8)])
def test_a_batch_that_would_not_be_whole_is_refused_with_one_that_is(
    batch_size: int, works: int
) -> None:
    with pytest.raises(UsageError, match=rf"multiple of 4, like batch_size={works}$"):
        rows_of_batch(batch_size, seq_len=2048, stage_seq_len=8192)
    assert rows_of_batch(works, seq_len=2048, stage_seq_len=8192) == works // 4


def test_expected_epochs_add_up_over_stages_and_stop_at_caps(web: Store, code: Store) -> None:
    sources = {"web": (web, 0.5), "code": (code, 0.5)}
    assert Mixture(sources, stages=[Stage(tokens=200)]).expected_epochs() == (0.5, 2.0)
    # code stops at 50 tokens; web gets the other 150.
    capped = Mixture(sources, stages=[Stage(tokens=200)], max_epochs={"code": 1})
    assert capped.expected_epochs() == (0.75, 1.0)
    stages = [Stage(tokens=200), Stage(tokens=100, weights={"web": 1, "code": 0}), Stage()]
    assert Mixture(sources, stages=stages).expected_epochs() == (1.0, 2.0)
    assert Mixture(sources, stages=[Stage(tokens=9999)], max_epochs=2).expected_epochs() == (2, 2)


def test_the_description_has_a_line_for_each_source_and_stage(web: Store, code: Store) -> None:
    mixture = Mixture(
        {"web": (web, 0.5), "code": (code, 0.5)},
        stages=[Stage(tokens=200), Stage(weights={"web": 0.9, "code": 0.1}, seq_len=8192)],
        max_epochs={"code": 4},
    )
    assert mixture.describe() == (
        "mixture of 2 sources\n"
        "  'web'   200 tokens  weight 0.5, then 0.9, 0.50 epochs in the stages that end\n"
        "  'code'   50 tokens  weight 0.5, then 0.1, at most 4 epochs,"
        " 2.00 epochs in the stages that end\n"
        "  stage 0: 200 tokens\n"
        "  stage 1: endless, rows of 8,192"
    )
    assert "'web'" in repr(mixture)


def test_facts_of_a_stage_are_those_that_decide_its_rows(web: Store, code: Store) -> None:
    sources = {"web": (web, 0.7), "code": (code, 0.3)}
    mixture = Mixture(sources, stages=[Stage(tokens=9)], max_epochs={"code": 1.5})
    scaled = {"web": (web, 70), "code": (code, 30)}
    assert mixture.facts(0) == Mixture(scaled, max_epochs={"code": 1.5}).facts(0)
    assert mixture.facts(0) == {
        "sources": ["web", "code"],
        "weights": [7, 3],
        "max_epochs": [None, "3/2"],
    }


def test_a_store_of_several_splits_is_not_fed_until_one_is_named(tmp_path: Path) -> None:
    units = [SampleUnit(path="a", rows=[("train", "abc"), ("val", "d"), ("train", "efg")])]
    root = SampleStore(units=units).write(tmp_path / "both").root
    for make in (Mixture.of, lambda path: Mixture({"web": (path, 1)})):
        with pytest.raises(UsageError, match="has the splits 'train', 'val'") as caught:
            make(root)
        assert 'split="train"' in str(caught.value.hint)
    assert Mixture.of(root, split="train").stores[0].num_documents == 2
    assert Mixture.of(Store(root, split=None)).stores[0].num_documents == 3
    units = [SampleUnit(path="a", rows=[("val", "abc")])]
    (only,) = Mixture.of(SampleStore(units=units).write(tmp_path / "one").root).stores
    assert (only.split, only.num_documents) == ("val", 1)


def test_the_stores_of_a_mixture_are_the_public_ones_and_decode(tmp_path: Path) -> None:
    units = [SampleUnit(path="a", rows=[("train", "abc")])]
    root = SampleStore(units=units).write(tmp_path / "store").root
    (store,) = Mixture.of(root).stores
    assert type(store) is tokenmill.Store
    assert store.decode(0) == "abc"
