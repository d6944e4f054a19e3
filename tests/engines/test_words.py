"""Words encoded apart have the ids of the whole text; what would not is left to the reference."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import shutil
import sysconfig
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.detectors import byte_level_json, split_sequence
from tests.engines.strategies import documents
from tests.hostile.attack import attack

from tokenmill.engines import find_kernel, words
from tokenmill.engines.base import SpecialTokens, UnencodableError
from tokenmill.engines.load import describe, load_engine
from tokenmill.engines.references import read_sentencepiece_model
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.engines.parity import CheckedEngine

relaxed = attack(short=6, long=1000)
# Whitespace of every kind in front of, after and between words, and what joins with it.
_PARTS = [
    *(
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "\x0b",
        "\x85",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u200b",
        "\u200d",
    ),
    *(
        "\u0301",
        "\u00a8",
        "\ufdfa",
        "\u0600",
        "\ufeff",
        "\x00",
        "\x1f",
        "\u2581",
        "\u2581\u2581",
        "\uff9e",
    ),
    *(
        "\U0001f3fd",
        "the",
        "Word",
        "a",
        "12",
        "``",
        "''",
        "----",
        "\uff46\uff55",
        "\u65e5\u672c",
        "\ufb01",
    ),
    *("e\u0301", "\u0130", "[UNK]", "[CLS]", "<unk>", "</s>", "##s", "</w>", "<x>", "."),
]
spaced = st.lists(st.sampled_from(_PARTS) | st.sampled_from([" ", " the", "a "]), max_size=24)
# Words that are cut into parts: letters, digits and punctuation side by side, and what joins them.
_VISIBLE = [chr(byte) for byte in range(0x21, 0x7F)]
punctuated = st.lists(
    st.sampled_from([*_VISIBLE, " ", "the", "ing", "e\u0301", "\x7f"]), max_size=24
)
texts = st.lists((spaced | punctuated).map("".join) | documents, min_size=1, max_size=8)


@pytest.fixture(autouse=True, scope="module")
def short_texts() -> Iterator[None]:
    """Texts that are short are looked up too, not given to the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "FEW_CHARACTERS", 0)
        yield


def ways(engine: CheckedEngine) -> Iterator[None]:
    """The engine as it is, and without its compiled part where it has one."""
    assert isinstance(engine.fast, words.WordEngine)
    kernel = engine.fast._kernel
    try:
        for engine.fast._kernel in (kernel, None) if kernel is not None else (None,):
            yield
    finally:
        engine.fast._kernel = kernel


def encode_both(engine: CheckedEngine, batch: list[str]) -> None:
    given_texts = TextBatch.from_texts(batch)
    expected = engine.reference.encode(given_texts)
    assert isinstance(engine.fast, words.WordEngine)
    for _ in ways(engine):
        for text, ids, others in zip(batch, engine.fast.encode(given_texts), expected, strict=True):
            assert ids.tolist() == others.tolist(), text
            assert engine.fast.encode_one(text).tolist() == others.tolist(), text
    if engine.fast._kernel is not None:
        found = engine.fast.encode_texts(batch)
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.offsets.tolist() == expected.offsets.tolist()


@cache
def load(path: Path, policy: SpecialTokens = SpecialTokens.TEXT) -> CheckedEngine:
    engine = load_engine(path, choice="words", special_tokens=policy)
    assert engine.name == "words"
    return engine


# SentencePiece models, trained with the package's defaults and with what people change of them.

_KEEP = {"remove_extra_whitespaces": False}
_IDENTITY = {"normalization_rule_name": "identity"}
MODELS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "byte fallback": {"byte_fallback": True},
    "identity": _IDENTITY,
    "identity, whitespace kept": {**_IDENTITY, **_KEEP},
    "whitespace kept": _KEEP,
    "no prefix, whitespace kept": {**_KEEP, "add_dummy_prefix": False},
    "case folded": {"normalization_rule_name": "nmt_nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<x>", "the"]},
    "line breaks as symbols": {"user_defined_symbols": ["\n"], "byte_fallback": True, **_KEEP},
    "runs of spaces": {"allow_whitespace_only_pieces": True, **_IDENTITY, **_KEEP},
}
REFUSED_MODELS: dict[str, dict[str, Any]] = {
    "a piece holds a space inside": {"split_by_whitespace": False},
    "a symbol holds whitespace": {"user_defined_symbols": ["a b"]},
    "it treats whitespace as a suffix": {"treat_whitespace_as_suffix": True},
    "it removes whitespace and puts none in front": {"add_dummy_prefix": False},
    "it is a word model": {"model_type": "word"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    lines = [line for text in training_texts[:60] for line in text.splitlines() if line]
    found = {}
    for number, (name, options) in enumerate({**MODELS, **REFUSED_MODELS}.items()):
        prefix = folder / str(number)
        given: dict[str, Any] = {"vocab_size": 700, "model_type": "bpe", **options}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(prefix),
            hard_vocab_limit=False,
            minloglevel=2,
            **given,
        )
        found[name] = prefix.with_suffix(".model")
    return found


@relaxed
@given(batch=texts)
@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model(models: dict[str, Path], name: str, batch: list[str]) -> None:
    encode_both(load(models[name]), batch)


@pytest.mark.parametrize("reason", REFUSED_MODELS)
def test_a_sentencepiece_model_that_is_refused(models: dict[str, Path], reason: str) -> None:
    coverage = describe(models[reason]).coverages[1]
    assert reason in (coverage.refusal or "")


# tokenizer.json files in the shapes that are published: of T5, XLM-R, DeBERTa, ALBERT, BERT, GPT.


def _metaspace(**options: Any) -> dict[str, Any]:
    plain = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    return {**plain, "split": True, **options}


def _sequence(member: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", member: list(steps)}


_COLLAPSE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
_SPLIT = {"type": "WhitespaceSplit"}
_STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
_QUOTES = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
_BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
_CASED = {**_BERT, "strip_accents": None, "lowercase": False}


def shapes(table: dict[str, Any]) -> dict[str, tuple[str, Any, Any]]:
    """Model, normalizer and pre-tokenizer of each."""
    folded = [{"type": name} for name in ("NFKD", "StripAccents", "Lowercase")]
    t5 = _sequence("pretokenizers", _SPLIT, _metaspace())
    return {
        "t5": ("unigram", table, t5),
        "t5, new": ("unigram", table, _metaspace(prepend_scheme="first")),
        "xlm-r": ("unigram", _sequence("normalizers", table, _COLLAPSE), _metaspace()),
        "deberta": ("unigram", _sequence("normalizers", _STRIP, table, _COLLAPSE), _metaspace()),
        "albert": ("unigram", _sequence("normalizers", _QUOTES, *folded, table), t5),
        "nfkc": ("unigram", {"type": "NFKC"}, _metaspace(prepend_scheme="never")),
        "nothing": ("unigram", None, _metaspace()),
        "bert": ("wordpiece", {**_CASED, "lowercase": True}, {"type": "BertPreTokenizer"}),
        "bert, cased": ("wordpiece", _CASED, {"type": "BertPreTokenizer"}),
        "words and digits": (
            "wordpiece",
            {"type": "Lowercase"},
            _sequence(
                "pretokenizers",
                {"type": "Whitespace"},
                {"type": "Digits", "individual_digits": True},
            ),
        ),
    }


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory,
    unigram_tokenizer_dir: Path,
    wordpiece_tokenizer_dir: Path,
    sentencepiece_unigram_model: Path,
) -> dict[str, Path]:
    charsmap = read_sentencepiece_model(sentencepiece_unigram_model).charsmap
    encoded = base64.b64encode(charsmap).decode()
    table = {"type": "Precompiled", "precompiled_charsmap": encoded}
    bases = {"unigram": unigram_tokenizer_dir, "wordpiece": wordpiece_tokenizer_dir}
    found = {}
    for name, (base, normalizer, split) in shapes(table).items():
        content = json.loads((bases[base] / "tokenizer.json").read_text())
        content.update(normalizer=normalizer, pre_tokenizer=split)
        found[name] = tmp_path_factory.mktemp("json") / "tokenizer.json"
        found[name].write_text(json.dumps(content))
    return found


@relaxed
@given(batch=texts)
@pytest.mark.parametrize("policy", [SpecialTokens.TEXT, SpecialTokens.PARSE])
@pytest.mark.parametrize("name", shapes({}))
def test_a_tokenizer_json(
    files: dict[str, Path], name: str, policy: SpecialTokens, batch: list[str]
) -> None:
    encode_both(load(files[name], policy), batch)


@relaxed
@given(batch=texts)
def test_a_bpe_with_a_suffix(bpe_with_suffix: Path, batch: list[str]) -> None:
    encode_both(load(bpe_with_suffix), batch)


@pytest.fixture(scope="module")
def bpe_with_suffix(tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]) -> Path:
    """As GPT-1 has it."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    trainer = BpeTrainer(
        vocab_size=800, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(training_texts[:60], trainer)
    path = tmp_path_factory.mktemp("suffix") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def _added(content: str, **options: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 1000, "content": content, **flags, **options}


# Each with a text that would have other ids, if its words were encoded apart all the same.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "it normalizes by Prepend": (
        "nothing",
        {"normalizer": {"type": "Prepend", "prepend": "x"}},
        "a b",
    ),
    "it replaces by a pattern": (
        "nothing",
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a b"}, "content": "c"}},
        "the a b the",
    ),
    "it replaces whitespace": (
        "nothing",
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}},
        "the a b the",
    ),
    "it strips a text": ("nothing", {"normalizer": _STRIP}, "the  the"),
    "its Metaspace does not treat all words alike": (
        "t5",
        {"pre_tokenizer": _sequence("pretokenizers", _SPLIT, _metaspace(prepend_scheme="first"))},
        "the the",
    ),
    "its added token 'a b' holds whitespace": (
        "nothing",
        {"added_tokens": [_added("a b")]},
        "the a b the",
    ),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_would_be_wrong_is_refused(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    name, changes, text = WRONG[reason]
    content = {**json.loads(files[name].read_text()), **changes}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert reason in (describe(path).coverages[1].refusal or "")
    for check in ("_refuse_added", "_refuse_normalizers", "_refuse_splits"):
        monkeypatch.setattr(words, check, lambda *_args, **_options: None)
    reference = load_engine(path, choice="tokenizers").reference
    batch = TextBatch.from_texts([text])
    cutting = words.cut_json(content)
    apart = words.WordEngine(reference, cutting).encode(batch)
    assert apart[0].tolist() != reference.encode(batch)[0].tolist(), "the rule is not needed"


# Parts of words.


@pytest.mark.parametrize("name", ["bert", "words and digits"])
def test_no_added_token_is_made_where_a_part_is_encoded(
    files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    content = json.loads(files[name].read_text())
    first = len(content["model"]["vocab"])
    content["added_tokens"] += [
        _added(f"{chr(byte)}the", id=first + number) for number, byte in enumerate(range(33, 48))
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert words.cut_json(content).seams[ord(":"), ord("t")]
    encode_both(load_engine(path, choice="words"), ["a:the b", "the-a.b:the", "a!the"])


@pytest.mark.parametrize("name", MODELS)
def test_what_a_piece_or_a_rule_joins_is_no_seam(models: dict[str, Path], name: str) -> None:
    model = read_sentencepiece_model(models[name])
    seams = words.cut_sentencepiece(model).seams
    assert seams[ord("e"), ord(";")]
    pieces = {text for text, kind in model.pieces if kind.name in ("NORMAL", "USER_DEFINED")}
    for first, second in itertools.pairwise("\n".join(pieces).encode()):
        assert not seams[first, second]
    known = [chr(byte) in pieces for byte in range(128)]
    assert not seams[128:].any()
    if name != "case folded":
        assert not seams[:128][~np.array(known)].any()


# The cache.


def test_words_that_no_longer_fit_are_forgotten_and_learned_again(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 60)
    monkeypatch.setattr(words, "SLICE_BYTES", 300)
    engine, dice = load_engine(files["t5"], choice="words"), random.Random(0)
    vocabulary = [f"{dice.choice('abcdefgh')}{number}" for number in range(200)]
    most, compiled = 0, list[int]()
    for _ in range(30):
        batch = [" ".join(dice.choices(vocabulary, k=40)) for _ in range(5)]
        encode_both(engine, [*batch, "", " "])
        assert isinstance(engine.fast, words.WordEngine)
        most = max(most, len(engine.fast._words._known))
        engine.encode(TextBatch.from_texts(batch[:1]))
        compiled.append(len(engine.fast._kernel) if engine.fast._kernel is not None else 60)
    assert 40 < most <= 60
    assert 20 < max(compiled) <= 60
    assert engine.recycle()
    assert isinstance(engine.fast, words.WordEngine)
    assert not engine.fast._words._known
    assert not engine.fast._kernel
    encode_both(engine, ["some words are learned anew, some words"])


@relaxed
@given(st.lists(st.sets(st.binary(min_size=1, max_size=40), max_size=40), max_size=6))
def test_a_table_has_its_words_and_nothing_else(batches: list[set[bytes]]) -> None:
    table, numbers = words.Table(16), dict[bytes, int]()

    def laid_out(some: list[bytes]) -> tuple[Any, Any, Any]:
        found = TextBatch.from_texts([*some, b"\xfe" * 16])
        return found.data, found.offsets[:-2], found.lengths[:-1]

    def not_utf8(word: bytes) -> bool:
        return b"\xff" in word

    for batch in batches:
        new = [word for word in batch if word not in numbers and not not_utf8(word)]
        numbers |= zip(new, range(len(numbers), len(numbers) + len(new)), strict=True)
        table.add(*laid_out(new), np.array([numbers[word] for word in new], np.int64))
        asked = [*numbers, *(word + b"\x00" for word in numbers), b"\x00" * 16, b"other"]
        found = table.find(*laid_out(asked)).tolist()
        for word, number in zip(asked, found, strict=True):
            assert number in (-1, numbers.get(word, -1))
            assert number == -1 or len(word) <= 16
        held = sum(number >= 0 for number in found[: len(numbers)])
        assert held >= 0.9 * sum(len(word) <= 16 for word in numbers) - 1


def test_texts_without_spaces_are_left_to_the_reference(files: dict[str, Path]) -> None:
    engine = load_engine(files["bert"], choice="words")
    assert isinstance(engine.fast, words.WordEngine)
    engine.fast.recycle()
    assert find_kernel() is None or engine.fast._kernel is not None
    long = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0" * 40
    encode_both(engine, [long, "some english words", "x" * 5000, long + " " + long])
    assert all(len(word) < 20 for word in engine.fast._words._known)
    assert len(engine.fast._kernel or engine.fast._words._known) == 3


# The compiled part.


def test_the_compiled_part_is_there_where_it_can_be_compiled() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if not header.exists() or shutil.which(compiler.split()[0]) is None:
        pytest.skip("nothing can be compiled here")
    assert find_kernel() is not None, "it was left out, or is old: pip install --editable . again"


def test_the_compiled_part_can_be_turned_off(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_KERNEL", "0")
    assert find_kernel() is None
    engine = load_engine(models["defaults"])
    assert isinstance(engine.fast, words.WordEngine)
    assert engine.fast._kernel is None
    encode_both(engine, ["the same words, compiled or not"])


@pytest.fixture
def table() -> Any:
    """Of words that a space is before, or nothing."""
    kernel = find_kernel()
    if kernel is None:
        pytest.skip("the compiled part is not there")
    return kernel.Words(b" ", 0, 100, 24, 1, None)


def _learn(table: Any, new: list[bytes]) -> None:
    """Each word has its bytes as ids; q is delicate."""
    sizes = np.array([len(word) for word in new], np.int64)
    ids = np.frombuffer(b"".join(new), np.uint8).astype(np.uint32)
    table.learn(ids, np.cumsum(sizes) - sizes, sizes, bytes(b"q" in word for word in new))


def test_words_are_handed_out_until_they_are_learned(table: Any) -> None:
    given_texts = TextBatch.from_texts(["a bc a", "", " q a", f"{'d' * 20} a"])
    new = [b"a", b" bc", b" a", b" q", b"d" * 20]
    for _ in range(3):
        assert table.encode(given_texts.data, given_texts.offsets) == new
    _learn(table, new)
    assert len(table) == len(new)
    for answer in (
        table.encode(given_texts.data, given_texts.offsets),
        table.encode_texts(given_texts.texts()),
    ):
        ids, ends, held, before = answer
        assert before is None
        assert (
            bytes(np.frombuffer(ids, np.uint32).astype(np.uint8)) == b"a bc a" + b"d" * 20 + b" a"
        )
        assert np.frombuffer(ends, np.int64).tolist() == [0, 6, 6, 6, 28]
        assert held == b"\0\0\1\0"
    table.forget()
    assert len(table) == 0


def test_ids_before_a_word_are_counted(table: Any) -> None:
    given_texts = TextBatch.from_texts(["", "ab c de", "ab c de", "x", "q a", " b"])
    _learn(table, table.encode(given_texts.data, given_texts.offsets))
    places = np.array([0, 4, 3, 9, 1, -5], np.int64) + given_texts.offsets[:-1]
    ids, ends, held, before = table.encode(given_texts.data, given_texts.offsets, places)
    assert np.frombuffer(ends, np.int64).tolist() == [0, 0, 7, 14, 15, 15, 17]
    assert bytes(np.frombuffer(ids, np.uint32).astype(np.uint8)) == b"ab c de" * 2 + b"x b"
    assert np.frombuffer(before, np.int64).tolist() == [-1, 4, -1, -1, -1, -1]
    assert held == b"\0\0\0\0\1\0"


@pytest.mark.skipif(find_kernel() is None, reason="the compiled part is not there")
def test_borders_at_words_are_counted_where_nothing_else_could_be_meant(
    sentencepiece_unigram_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(sentencepiece_unigram_model)
    assert isinstance(engine.fast, words.WordEngine)
    rows = [("some words", "the end"), ("a", "\u65e5"), ("a\u3000", "b"), ("", "b"), ("c", "d")]
    given_texts = TextBatch.from_texts(f"{one} {other}" for one, other in rows)
    places = np.array([len(one.encode()) + 1 for one, _ in rows])
    monkeypatch.setattr(words, "SLICE_BYTES", 16)
    tokens = engine.encode(replace(given_texts, marks=places))
    found = tokens.ids_before
    assert found is not None
    alone = engine.reference.encode(TextBatch.from_texts(one for one, _ in rows)).lengths
    is_space = engine.token_bytes(int(tokens[4][alone[4]])) == b" "
    assert found.tolist() == [alone[0], -1, -1, -1, alone[4] + is_space]
    assert engine.encode(given_texts).ids_before is None
    # Of a document that is the reference's nothing is known.
    other = TextBatch.from_texts(["a \u2581 b", "some words"])
    tokens = engine.encode(replace(other, marks=np.array([6, 5])))
    assert tokens.ids_before is not None
    assert (tokens.ids_before < 0).tolist() == [True, False]


@pytest.mark.parametrize("bounds", [[], [0, 9], [-1, 2], [2, 1], [0, 2**62], [3, 0, 4]])
def test_offsets_outside_of_the_data_are_refused(table: Any, bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets must ascend within the data"):
        table.encode(b"some", np.array(bounds, np.int64))
    with pytest.raises(ValueError, match="offsets must ascend"):
        table.encode(b"some", b"\0" * 15)
    with pytest.raises(ValueError, match="one place for each document"):
        table.encode(b"some", np.array([0, 4], np.int64), np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("starts", "sizes"),
    [([0], [1]), ([0, 0], [1, 4]), ([0, -1], [1, 1]), ([0, 4], [1, 1]), ([0, 0], [-1, 1])],
)
def test_ids_that_are_not_those_of_the_new_words_are_refused(
    table: Any, starts: list[int], sizes: list[int]
) -> None:
    assert table.encode_texts(["a b"]) == [b"a", b" b"]
    with pytest.raises(ValueError, match="not the ids of the new words"):
        table.learn(
            np.arange(3, dtype=np.uint32),
            *(np.array(each, np.int64) for each in (starts, sizes)),
            bytes(2),
        )
    with pytest.raises(UnicodeEncodeError):
        table.encode_texts(["a", "\ud800"])
    with pytest.raises(TypeError):
        table.encode_texts("a b")
    assert table.encode_texts(["b"]) == [b"b"]


def test_a_table_that_was_never_made_is_refused(table: Any) -> None:
    kind: Any = type(table)
    with pytest.raises(RuntimeError, match="never made"):
        kind.__new__(kind).encode_texts(["a"])
    with pytest.raises(RuntimeError, match="made already"):
        table.__init__(b" ", 0, 100, 24, 1, None)
    no_model = (b"", 0, b"", b"", bytes(256), b"", 0.0, 0.0, 0.0, 0, True, True)
    with pytest.raises(ValueError, match="the model is not one"):
        kind(b" ", 0, 100, 24, 1, no_model)


def test_one_table_is_for_one_thread_at_a_time(table: Any) -> None:
    text = TextBatch.from_texts(["ab " * 3_000_000])
    _learn(table, table.encode(text.data, text.offsets))
    refused: list[RuntimeError] = []

    def encode() -> None:
        try:
            table.encode(text.data, text.offsets)
        except RuntimeError as error:
            refused.append(error)

    threads = [threading.Thread(target=encode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < len(threads)
    assert {str(error) for error in refused} <= {"another thread uses these words"}


def test_the_table_of_normalization_says_what_the_package_does(
    sentencepiece_unigram_model: Path,
) -> None:
    table = words.Charsmap(read_sentencepiece_model(sentencepiece_unigram_model).charsmap)
    model = str(sentencepiece_unigram_model)
    normalize = sentencepiece.SentencePieceNormalizer(model_file=model).normalize
    vanishing = set(table.vanishing_keys())
    for point in (*range(1, 0x3400), *range(0xF900, 0xFFFE)):
        character = chr(point)
        if point in range(0xD800, 0xE000):
            continue
        target = table.target(character.encode())
        expected = normalize(f"\u4e2d{character}\u4e2d")[1:-1]  # which composes with nothing
        assert (character if target is None else target.decode()) == expected
        if target is not None and (not target or b" " in target) and character not in "\t\n\r ":
            assert character in vanishing
    assert not table.joins(b" \t\n\r")
    assert words.Charsmap(b"").target(b" ") is None
    assert np.array_equal(words.Charsmap(b"").vanishing_keys(), [])


def test_texts_on_which_the_reference_fails_are_named_by_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the places of words, or of texts in a slice, which would name other documents."""
    steps = split_sequence((r"(?:[QX]*[QX]*)*q|.",))  # which fails on no probe
    steps["pretokenizers"].insert(0, _SPLIT)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(byte_level_json([(b"a", b"b")], pre_tokenizer=steps)))
    engine = load_engine(path, choice="words")
    monkeypatch.setattr(words, "SLICE_BYTES", 400)
    bad = "Q" * 60
    batch = ["some ab text", *["ab words " * 20] * 3, f"{bad}{' ab' * 40}", "ab", bad, "ab"]
    left, failed = dict(enumerate([*batch, *batch])), set()
    while True:
        places = list(left)
        try:
            found = engine.encode(TextBatch.from_texts(left.values()))
            break
        except UnencodableError as error:
            failed |= {places[index] for index in error.documents}
            left = {place: text for place, text in left.items() if place not in failed}
    assert failed == {4, 6, 12, 14}
    expected = engine.reference.encode(TextBatch.from_texts(left.values()))
    assert found.ids.tolist() == expected.ids.tolist()
