"""A second fast engine needs its module and a line in the registry, and is held to the same law."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tokenmill.engines
from tokenmill.engines import engine_names
from tokenmill.engines.base import Coverage, SpecialTokens, TokenizerKind
from tokenmill.engines.load import TokenizerFiles, describe, load_engine
from tokenmill.engines.parity import SpecialText
from tokenmill.engines.references import HuggingFaceEngine
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine

WRONG = "zebra"
"""What the engine below gets wrong, where it is told to."""


class SecondEngine(HuggingFaceEngine):
    """Encodes with the reference, except for texts that hold the wrong word."""

    name = "second"
    lies: Callable[[str], bool] = staticmethod(lambda _text: False)

    def encode(self, texts: TextBatch) -> TokenBatch:
        tokens = super().encode(texts)
        lied = [self.lies(texts.text_at(index)) for index in range(len(texts))]
        return TokenBatch.from_lists([[0] if lie else tokens[i] for i, lie in enumerate(lied)])


class Plug(ModuleType):
    """The module of a fast engine that covers WordPiece alone."""

    def __init__(self, *, lies: Callable[[str], bool] = lambda _text: False) -> None:
        super().__init__("plugs.second")
        self.lies = lies

    def covers(self, tokenizer: TokenizerFiles, _policy: SpecialTokens) -> Coverage:
        is_json = tokenizer.kind is TokenizerKind.HUGGINGFACE
        covered = is_json and tokenizer.parsed["model"].get("type") == "WordPiece"
        refusal = None if covered else "it runs WordPiece alone"
        return Coverage(engine="second", refusal=refusal, contested=(WRONG,))

    def contested(
        self, _tokenizer: TokenizerFiles, coverage: Coverage, _reference: Engine
    ) -> Callable[[TextBatch], NDArray[np.int64]]:
        strings = SpecialText(coverage.contested)
        return lambda texts: np.flatnonzero(strings.find(texts))

    def build(self, tokenizer: TokenizerFiles, _coverage: Coverage, **given: Any) -> SecondEngine:
        engine = SecondEngine(
            tokenizer.path, special_tokens=given["policy"], threads=given["threads"]
        )
        engine.lies = self.lies
        return engine


@pytest.fixture(autouse=True)
def _gigatoken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engines of the registry are not what is looked at here."""
    monkeypatch.setattr(tokenmill.engines, "FAST_ENGINES", ("tokenmill.engines.gigatoken",))


def plug_in(monkeypatch: pytest.MonkeyPatch, plug: Plug) -> None:
    monkeypatch.setitem(sys.modules, plug.__name__, plug)
    registered = (*tokenmill.engines.FAST_ENGINES, plug.__name__)
    monkeypatch.setattr(tokenmill.engines, "FAST_ENGINES", registered)


def test_the_first_fast_engine_that_covers_a_tokenizer_is_taken(
    monkeypatch: pytest.MonkeyPatch, wordpiece_tokenizer_dir: Path, bpe_tokenizer_dir: Path
) -> None:
    assert load_engine(wordpiece_tokenizer_dir).name == "tokenizers"
    plug_in(monkeypatch, Plug())
    assert engine_names()[:2] == ("gigatoken", "second")
    assert load_engine(wordpiece_tokenizer_dir).name == "second"
    assert load_engine(wordpiece_tokenizer_dir, choice="second").name == "second"
    assert load_engine(bpe_tokenizer_dir).name == "gigatoken"


def test_what_was_described_is_asked_again_under_another_policy(
    monkeypatch: pytest.MonkeyPatch, wordpiece_tokenizer_dir: Path
) -> None:
    plug_in(monkeypatch, Plug())
    info = describe(wordpiece_tokenizer_dir, policy=None)
    assert info.coverages == ()
    assert load_engine(info, special_tokens=SpecialTokens.PARSE).name == "second"


def test_a_refusal_names_each_engine_that_refused(
    monkeypatch: pytest.MonkeyPatch, unigram_tokenizer_dir: Path, bpe_tokenizer_dir: Path
) -> None:
    alone = load_engine(unigram_tokenizer_dir).refusal
    plug_in(monkeypatch, Plug())
    engine = load_engine(unigram_tokenizer_dir)
    assert engine.name == "tokenizers"
    assert engine.refusal == f"gigatoken: {alone}; second: it runs WordPiece alone"
    with pytest.raises(
        TokenizerError, match=r"second may not be used .*: it runs WordPiece alone;"
    ):
        load_engine(bpe_tokenizer_dir, choice="second")
    with pytest.raises(UsageError, match="there is no engine 'third'") as refused:
        load_engine(bpe_tokenizer_dir, choice="third")
    assert "auto, gigatoken, second, tokenizers" in (refused.value.hint or "")


def test_an_engine_that_differs_on_a_probe_is_refused(
    monkeypatch: pytest.MonkeyPatch, wordpiece_tokenizer_dir: Path
) -> None:
    plug_in(monkeypatch, Plug(lies=lambda text: text.startswith("don't")))
    engine = load_engine(wordpiece_tokenizer_dir)
    assert engine.name == "tokenizers"
    assert "second: it disagrees with tokenizers" in (engine.refusal or "")
    assert "on 1 probes, first on \"don't" in (engine.refusal or "")


def test_contested_text_is_routed_around_the_engine(
    monkeypatch: pytest.MonkeyPatch, wordpiece_tokenizer_dir: Path
) -> None:
    plug_in(monkeypatch, Plug(lies=lambda text: WRONG in text))
    engine = load_engine(wordpiece_tokenizer_dir)
    assert engine.name == "second"
    texts = TextBatch.from_texts(["a plain text", f"a {WRONG} here", "another", WRONG])
    tokens, expected = engine.encode(texts), engine.reference.encode(texts)
    assert tokens.ids.tolist() == expected.ids.tolist()
    assert tokens.offsets.tolist() == expected.offsets.tolist()
    assert engine.routed_documents == 2
    assert engine.fast is not None
    assert engine.fast.encode(texts).ids.tolist() != expected.ids.tolist()
