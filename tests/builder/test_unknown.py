"""Text that a tokenizer does not know is counted, told, and refused where it is much."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import tree, write_jsonl
from tests.once import once

import tokenmill
from tokenmill.cli import show
from tokenmill.errors import UnknownTextError, UsageError
from tokenmill.store import facts
from tokenmill.store.check import check_store
from tokenmill.store.layout import StoreLayout

if TYPE_CHECKING:
    from tokenmill.builder.progress import BuildResult

JAPANESE = "\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002\u540d\u524d\u306f\u307e\u3060\u7121"


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that has seen English alone, trained with the package's defaults."""
    monkeypatch.chdir(tmp_path_factory.mktemp("unknown"))
    return once(tmp_path_factory, "spm-english", train_english)


def english(count: int, *, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    words = ["the", "a", "mill", "of", "grain", "and", "stone", "that", "turns", "in", "water"]
    return [" ".join(dice.choices(words, k=dice.randint(5, 30))) + "." for _ in range(count)]


def train_english(folder: Path) -> Path:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(english(300)),
        model_prefix=str(folder / "english"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "english.model"


def build(inputs: object, model: Path, out: str = "store", **options: Any) -> BuildResult:
    settings: dict[str, Any] = {"memory": "1GB", "serial": "workers" not in options}
    return tokenmill.build(inputs, tokenizer=model, out=out, **(settings | options))  # type: ignore[arg-type]


def japanese(count: int, *, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices(JAPANESE, k=dice.randint(5, 40))) for _ in range(count)]


def test_text_that_is_mostly_unknown_is_refused_with_what_was_lost_and_the_rest_is_kept(
    model: Path,
) -> None:
    write_jsonl(Path("a.jsonl"), english(50))
    write_jsonl(Path("b.jsonl"), japanese(50))
    with pytest.raises(UnknownTextError, match=r"100% of the text of .*'b\.jsonl'") as caught:
        build(["a.jsonl", "b.jsonl"], model)
    assert "became '<unk>', more than the threshold of 5.00%" in caught.value.message
    assert f"'{max(JAPANESE, key=''.join(japanese(50)).count)}' (" in caught.value.message
    share = str(caught.value.hint).split("--max-unknown ")[1]
    assert not Path("store/tokenmill.json").exists()
    assert not Path("store/tmp").exists()
    result = build(["a.jsonl", "b.jsonl"], model, max_unknown=float(share))
    assert (result.units_built, result.units_resumed) == (1, 1)
    lost = "".join(japanese(50))
    totals = result.totals
    assert (totals.lost_characters, totals.lost_bytes) == (len(lost), len(lost.encode()))
    verdict = dict(show.verify_rows(tokenmill.verify("store")))["verdict"]
    assert verdict.startswith("whole, but ")
    assert verdict.endswith("% of the text is unknown to the tokenizer")
    # Few ids stand for all of it: a row of unknown characters is one.
    assert totals.unknown_ids == 50


def test_the_share_is_of_all_text_and_told_file_by_file(model: Path) -> None:
    write_jsonl(Path("a.jsonl"), english(400))
    write_jsonl(Path("b.jsonl"), [*english(50), "one \u732b two \u732b\u732b", "\u306f"])
    result = build(["a.jsonl", "b.jsonl"], model)
    assert (result.totals.unknown_ids, result.totals.lost_characters) == (3, 4)
    assert result.totals.lost_bytes == 12
    (warning,) = result.warnings
    assert "of the text is unknown to this tokenizer and became '<unk>', most often" in warning
    assert "'\u732b' (3), '\u306f' (1); it is " in warning
    assert warning.endswith("% of 'b.jsonl'")
    manifest = facts.read_manifest(Path("store"))
    first, second = manifest.sources
    assert (first.lost_bytes, first.text_bytes) == (0, 0)
    assert (second.unknown_ids, second.lost_characters, second.lost_bytes) == (3, 4, 12)
    texts = [*english(50), "one \u732b two \u732b\u732b", "\u306f"]
    assert second.text_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.unknown == facts.UnknownFacts.of("<unk>", 0, {"\u732b": 3, "\u306f": 1})
    found = tokenmill.inspect("store")
    assert found.unknown == manifest.unknown
    shown = dict(show.store_rows(found))
    assert shown["unknown"].startswith("4 characters, ")
    assert "became 3 <unk>; most often: '\u732b' (3), '\u306f' (1)" in shown["unknown"]
    assert "of the text unknown)" in shown["sources"]
    again = build(["a.jsonl", "b.jsonl"], model)
    assert again.nothing_to_do
    assert again.warnings == result.warnings


def test_verify_says_it_and_counts_the_ids_again(model: Path) -> None:
    write_jsonl(Path("a.jsonl"), [*english(99), "one \u732b"])
    build("a.jsonl", model)
    report = tokenmill.verify("store")
    assert report.ok
    shown = dict(show.verify_rows(report))
    assert shown["unknown"].startswith("1 character, ")
    assert shown["verdict"] == "whole and right", "it is less than 0.1%"
    layout = StoreLayout(Path("store"))
    name = facts.read_manifest(Path("store")).units[0].name
    receipt = facts.read_receipt(layout, name)
    counts = receipt.counts
    facts.rewrite_receipt(layout, receipt.but(counts=counts.but(unknown_ids=2)))
    problems = [finding.problem for finding in check_store("store").findings]
    assert any("counts 2 ids of the unknown token, the shards have 1" in each for each in problems)


def test_a_store_without_any_says_nothing_and_has_the_version_of_before(model: Path) -> None:
    write_jsonl(Path("a.jsonl"), english(20))
    result = build("a.jsonl", model)
    assert (result.unknown, result.warnings) == (None, ())
    assert "unknown" not in {name for name, text in show.build_rows(result) if text}
    manifest = Path("store/tokenmill.json").read_bytes()
    assert b'"format_version":1,' in manifest
    assert b"unknown" not in manifest
    assert b"lost" not in manifest


def test_what_is_counted_does_not_follow_from_workers_parts_or_resuming(model: Path) -> None:
    Path("data").mkdir()
    for number in range(3):
        rows = english(60, seed=number) + japanese(2 * number, seed=number)
        write_jsonl(Path(f"data/{number}.jsonl"), random.Random(number).sample(rows, len(rows)))
        Path(f"data/small{number}.txt").write_text(f"stone {JAPANESE[number]} stone")
    options: dict[str, Any] = {"unit_bytes": 3000, "val": 0.2, "max_unknown": 1.0}
    result = build("data", model, "serial", **options)
    assert result.totals.lost_bytes > 100
    whole = tree(Path("serial"))
    # Another engine has another name in the receipts, so this one is made of the same choice.
    assert build("data", model, "two", workers=2, **(options | {"memory": "2GB"})).units_built > 3
    assert tree(Path("two")) == whole
    for number in (2, 1, 3):
        build("data", model, "parts", part=f"{number}/3", **options)
    tokenmill.finish("parts")
    assert tree(Path("parts")) == whole
    with pytest.raises(UnknownTextError):
        build("data", model, "resumed", **(options | {"max_unknown": 0.05}))
    build("data", model, "resumed", **options)
    assert tree(Path("resumed")) == whole
    counted = [
        build("data", model, f"by-{engine}", engine=engine, **options).totals
        for engine in ("words", "sentencepiece")
    ]
    assert counted == [result.totals] * 2


def test_finish_refuses_what_the_parts_were_asked_to_refuse(model: Path) -> None:
    write_jsonl(Path("a.jsonl"), [*english(40), *japanese(10)])
    build("a.jsonl", model, part="1/1", max_unknown=1.0)
    totals = tokenmill.finish("store").totals
    assert totals.lost_bytes > 0.05 * totals.text_bytes
    with pytest.raises(UnknownTextError, match=r"more than the threshold of 0\.10%"):
        build("a.jsonl", model, "strict", part="1/1", max_unknown=0.001)


def test_a_plan_tells_of_it_before_the_build(model: Path) -> None:
    write_jsonl(Path("a.jsonl"), english(20) + japanese(20))
    planned = tokenmill.plan("a.jsonl", tokenizer=model)
    assert planned.unknown is not None
    assert planned.sample_lost_bytes == len("".join(japanese(20)).encode())
    assert planned.sample_text_bytes > planned.sample_lost_bytes
    shown = show._planned_unknown(planned)
    assert "of the sample's text becomes <unk>, and a build refuses more than 5%" in shown
    write_jsonl(Path("b.jsonl"), english(20))
    assert tokenmill.plan("b.jsonl", tokenizer=model).unknown is None


def test_rows_with_masks_and_rows_that_are_cut_off_count_their_whole_text(model: Path) -> None:
    rows = [{"prompt": f"{one} \u732b", "completion": "grain \u306f stone"} for one in english(30)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"max_unknown": 1.0, "eos": False}
    masked = build("a.jsonl", model, format="prompt-completion", **options)
    assert (masked.totals.lost_characters, masked.totals.unknown_ids) == (60, 60)
    write_jsonl(Path("b.jsonl"), [f"{one} \u732b" for one in english(30)])
    cut = {"max_length": 4, "too_long": "truncate"}
    result = build("b.jsonl", model, "cut", **cut, **options)
    assert result.totals.lost_characters == 30
    with tokenmill.Store("cut") as store:
        ids = np.concatenate([store[k] for k in range(len(store))])
    assert result.totals.unknown_ids == np.count_nonzero(ids == 0)


def test_a_unit_is_refused_before_it_is_read_to_its_end(model: Path) -> None:
    write_jsonl(Path("a.jsonl"), japanese(30_000))
    size = Path("a.jsonl").stat().st_size
    with pytest.raises(
        UnknownTextError, match=r"of the text of the first [\d.]+ [kM]B of "
    ) as caught:
        build("a.jsonl", model, unit_bytes=10 * size)
    assert "tmp" not in {path.name for path in Path("store").iterdir()}
    assert caught.value.hint is not None


def test_a_compressed_file_is_refused_at_its_end(model: Path) -> None:
    raw = write_jsonl(Path("raw"), english(30) + japanese(30)).read_bytes()
    Path("a.jsonl.gz").write_bytes(gzip.compress(raw, mtime=0))
    with pytest.raises(UnknownTextError, match=r"of the text of bytes 0 to [\d,]+ of 'a\.jsonl"):
        build("a.jsonl.gz", model)


def test_a_small_input_is_measured_as_a_whole_and_what_is_built_stays(model: Path) -> None:
    rows = [*japanese(600), *english(9000)]
    # Each of its units may have more than the share, since it stands for a larger one.
    random.Random(0).shuffle(rows)
    assert write_jsonl(Path("a.jsonl"), rows).stat().st_size > 600_000
    lost = len("".join(japanese(600)).encode())
    share = lost / sum(len(text.encode()) for text in rows)
    first = build("a.jsonl", model, "whole", max_unknown=2 * share)
    assert first.units_built > 3
    for each in (0.9 * share, 1.1 * share):
        if each < share:
            with pytest.raises(UnknownTextError, match="of the text of the input"):
                build("a.jsonl", model, max_unknown=each)
            assert not Path("store/tokenmill.json").exists()
        else:
            result = build("a.jsonl", model, max_unknown=each)
            assert (result.units_built, result.units_resumed) == (0, first.units_built)
    assert tree(Path("store")) == tree(Path("whole"))


def test_a_short_last_unit_of_a_small_input_may_have_what_the_input_may(model: Path) -> None:
    many = english(9000)
    size = 0
    while size < 530_000:
        size += len(json.dumps({"text": many[len(many) // 2]})) + 1
        many = many[1:]
    write_jsonl(Path("a.jsonl"), [*english(9000 - len(many)), "\u732b" * 5000])
    share = 15_000 / Path("a.jsonl").stat().st_size
    assert share < 0.04
    result = build("a.jsonl", model)
    assert result.units_built > 2
    assert 0.02 < result.totals.lost_bytes / result.totals.text_bytes < 0.05


def test_a_threshold_is_a_share() -> None:
    with pytest.raises(UsageError, match="max_unknown=2 is not a share of the text"):
        tokenmill.build("a.jsonl", tokenizer="bytes", out="store", max_unknown=2)


def test_a_build_warns_where_line_breaks_are_lost(
    model: Path, sentencepiece_bpe_model: Path, bpe_tokenizer_dir: Path
) -> None:
    write_jsonl(Path("a.jsonl"), ["no line here", "one stone\nturns", "in water\n"])
    (warning,) = build("a.jsonl", model).warnings
    assert "loses line breaks: 'one stone\\nturns' does not come back with them" in warning
    for number, other in enumerate([sentencepiece_bpe_model, bpe_tokenizer_dir, "bytes"]):
        eos: dict[str, Any] = {"eos": False}
        assert build("a.jsonl", other, str(number), **eos).warnings == ()  # type: ignore[arg-type]
    write_jsonl(Path("b.jsonl"), ["no line here", "one at the end\n"])
    assert build("b.jsonl", model, "none").warnings == ()
