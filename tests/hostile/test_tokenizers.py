"""Tokenizers made by someone who wishes harm, and texts that break one that is sound."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.detectors import (
    ATOMS,
    byte_level_json,
    pattern_sets,
    piece_json,
    split_sequence,
)
from tests.engines.strategies import documents
from tests.hostile.attack import LONG, attack, tried

import tokenmill
from tokenmill.engines import base
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.gigatoken import RANK_PATTERNS
from tokenmill.engines.load import describe, load_engine
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.engines.parity import CheckedEngine

# Fails in a second on a text that the pattern of o200k fails on after eleven million letters.
CATASTROPHIC = r"(?:[A-Z]*[A-Z]*)*[a-z]|."
BAD_ROW = "A" * 60


def write_tokenizer(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files_of(store: Path) -> dict[str, bytes]:
    """Everything that a build committed."""
    return {
        str(file.relative_to(store)): file.read_bytes()
        for kind in ("shards", "rejects")
        for file in sorted((store / kind).iterdir())
    }


def assert_agree(engine: CheckedEngine, texts: list[str]) -> None:
    batch = TextBatch.from_texts(texts)
    found, expected = engine.encode(batch), engine.reference.encode(batch)
    for index, text in enumerate(texts):
        assert found[index].tolist() == expected[index].tolist(), text


@pytest.mark.parametrize("shape", ["text", "prompt-completion"])
def test_a_row_on_which_the_reference_fails_is_rejected_and_nothing_else(
    shape: str, tmp_path: Path
) -> None:
    content = byte_level_json([(b"a", b"b")], pre_tokenizer=split_sequence((CATASTROPHIC,)))
    folder = write_tokenizer(tmp_path / "tokenizer", content)
    texts = [f"ab row {index} ab" for index in range(300)]
    bad = [5, 6, 299]
    for index in bad:
        texts[index] = BAD_ROW
    options: dict[str, Any] = {"max_rejects": 0.02, "eos": False}
    if shape == "text":
        rows = write_rows(tmp_path / "rows.jsonl", texts)
    else:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": t, "completion": "1"}) + "\n" for t in texts))
        options["format"] = shape
    stores = []
    for workers, memory in ((1, "1GB"), (2, "3GB")):
        store = tmp_path / f"store-{workers}"
        result = tokenmill.build(
            rows, out=store, tokenizer=folder, workers=workers, memory=memory, **options
        )
        assert (result.totals.documents, result.totals.rejected) == (297, 3)
        stores.append(files_of(store))
    assert stores[0] == stores[1]
    (rejects,) = (data for name, data in stores[0].items() if name.startswith("rejects"))
    lines = [json.loads(line) for line in rejects.splitlines()]
    assert [line["row"] for line in lines] == bad
    assert {line["reason"] for line in lines} == {"cannot-encode"}
    assert tokenmill.verify(tmp_path / "store-1").ok
    tried("a row on which the reference engine fails", len(bad))


def test_a_tokenizer_that_fails_on_every_text_ends_the_build_with_a_clear_error(
    tmp_path: Path,
) -> None:
    content = byte_level_json([(b"a", b"b")], pre_tokenizer=split_sequence((CATASTROPHIC,)))
    folder = write_tokenizer(tmp_path / "tokenizer", content)
    rows = write_rows(tmp_path / "rows.jsonl", [BAD_ROW] * 22)
    with pytest.raises(TokenizerError, match="fails on text after text with this tokenizer"):
        tokenmill.build(rows, out=tmp_path / "store", tokenizer=folder, eos=False, workers=1)
    tried("a split pattern that goes back and forth without end")


# Texts that show a split between any two of these, in every order, and at the end of a text too.
DEEP = {
    "contractions": ("'", "l", "L", "v", "e", "\u017f", "S", "t", " "),
    "whitespace": (" ", "\n", "\r", "a", "1", "!", "\u00a0", "\u0301"),
    "classes": ("1", "\u00b2", "\u0661", "a", "A", "\u4e2d", "-", "\u2160", "\u02b0", "\u01c5"),
}


@pytest.mark.parametrize("name", DEEP)
def test_every_covered_split_on_every_short_text(name: str, tmp_path: Path) -> None:
    for patterns in pattern_sets()[:: 1 if LONG else 4]:
        content, texts = piece_json(patterns, length=5 if LONG else 3, atoms=DEEP[name])
        token = {"id": len(content["model"]["vocab"]), "content": "<x>", "special": False}
        flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
        content["added_tokens"] = [token | flags]
        engine = load_engine(write_tokenizer(tmp_path, content))
        assert engine.fast is not None, engine.refusal
        short = [text for text in texts if len(text) < 3]
        assert_agree(engine, texts + [f"{text}<x>{text}" for text in short])
        tried("a covered split on every short text", len(texts) + len(short))


@pytest.mark.parametrize("pattern", RANK_PATTERNS)
def test_every_covered_split_of_rank_files_on_every_short_text(
    pattern: str, tmp_path: Path
) -> None:
    content, texts = piece_json((pattern,), length=3 if LONG else 2)
    ranks = content["model"]["vocab"]
    lines = [
        base64.b64encode(base.to_bytes(piece) or b"") + b" %d\n" % rank
        for piece, rank in ranks.items()
    ]
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"".join(lines))
    definition = {"pattern": pattern, "special_tokens": {"<x>": len(ranks)}}
    path.with_name("x.tiktoken.json").write_text(json.dumps(definition))
    engine = load_engine(path, special_tokens=SpecialTokens.PARSE)
    assert engine.fast is not None, engine.refusal
    assert_agree(engine, texts + [f"{text}<x>{text}" for text in texts if len(text) < 3])
    tried("a covered split of rank files on every short text", len(texts))


_stuff = st.one_of(st.sampled_from(ATOMS), st.sampled_from(["the", "in", "ll", "\r\n", "  ", "12"]))
_words = st.lists(_stuff, min_size=1, max_size=6).map("".join)


@attack(short=12, long=1600, parts=8)
@given(
    patterns=st.sampled_from([("",), *pattern_sets()]),
    words=st.lists(_words, min_size=1, max_size=40),
    nfc=st.booleans(),
    ignore_merges=st.booleans(),
    texts=st.lists(st.one_of(documents, st.lists(_words, max_size=12).map("".join)), max_size=20),
)
def test_tokenizers_nobody_has_seen_on_wild_texts(
    tmp_path_factory: pytest.TempPathFactory,
    patterns: tuple[str, ...],
    words: list[str],
    nfc: bool,
    ignore_merges: bool,
    texts: list[str],
) -> None:
    """Merges are of whole words, across whatever the pattern splits at."""
    merges = [
        (data[:size], data[size : size + 1])
        for word in words
        for data in [word.encode()]
        for size in range(1, min(len(data), 12))
    ]
    content = byte_level_json(
        merges,
        pre_tokenizer=split_sequence(patterns) if patterns != ("",) else None,
        normalizer={"type": "NFC"} if nfc else None,
    )
    content["model"]["ignore_merges"] = ignore_merges
    folder = write_tokenizer(tmp_path_factory.getbasetemp() / "unseen", content)
    engine = load_engine(folder)
    endings = ["", " ", "\n", "\n ", "\t", "\r\n  ", "\u00a0", "'s", "1"]
    wild = texts + words + [word + end for word in words for end in endings]
    assert_agree(engine, wild)
    tried("an unseen tokenizer on wild texts", len(wild))
    if engine.fast is not None:
        tried("an unseen tokenizer that the fast engine ran")


BASE = byte_level_json([(b"a", b"b"), (b"ab", b"b")])


def changed(path: str, value: object) -> dict[str, Any]:
    """The plain tokenizer.json with one member, named by its path, set to something else."""
    content: dict[str, Any] = json.loads(json.dumps(BASE))
    *parents, last = path.split(".")
    place: Any = content
    for name in parents:
        place = place[name]
    place[last] = value
    return content


def replaced(content: str, *, times: int = 1, pattern: object = None) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}
    return changed("normalizer", {"type": "Sequence", "normalizers": [step] * times})


def with_added(**changes: object) -> dict[str, Any]:
    flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    return changed("added_tokens", [{"id": 258, "content": "<x>"} | flags | changes])


HARMFUL = {
    "merges that are numbers": changed("model.merges", [1, 2]),
    "merges that are nothing": changed("model.merges", None),
    "merges of lists": changed("model.merges", [["a", ["b"]]]),
    "merges of three": changed("model.merges", [["a", "b", "b"]]),
    "merges by name": changed("model.merges", {"a": "b"}),
    "an id that is a text": changed("model.vocab.zz", "7"),
    "an id that is a fraction": changed("model.vocab.zz", 7.5),
    "an id that is nothing": changed("model.vocab.zz", None),
    "an id that is negative": changed("model.vocab.zz", -1),
    "an id near 2^31": changed("model.vocab.zz", 2**31 - 1),
    "an id near 2^30": changed("model.vocab.zz", 2**30),
    "an id beyond 2^32": changed("model.vocab.zz", 2**32),
    "a lone surrogate": changed("model.vocab.\ud800", 300),
    "an added token with an id near 2^31": with_added(id=2**31 - 1),
    "an added token with a text for an id": with_added(id="x"),
    "an added token of no text": with_added(content=5),
    "an added token of ten megabytes": with_added(content="x" * 10_000_000),
    "a special token of ten megabytes": with_added(content="x" * 10_000_000, special=True),
    "added tokens that are a text": changed("added_tokens", "x"),
    "a text that doubles forty times": replaced("aa", times=40),
    "a letter that becomes a megabyte": replaced("b" * 1_000_000),
    "a pattern that makes much of all": replaced("b" * 1000, pattern={"Regex": "."}),
    "a pattern that finds nothing everywhere": replaced("b", times=30, pattern={"Regex": ""}),
    "a prefix of ten megabytes": changed(
        "normalizer", {"type": "Prepend", "prepend": "b" * 10_000_000}
    ),
    "a normalizer that is a text": changed("normalizer", "x"),
    "a pre-tokenizer without a type": changed("pre_tokenizer", {}),
    "a pre-tokenizer of letters": changed(
        "pre_tokenizer", {"type": "Sequence", "pretokenizers": ["ab"]}
    ),
    "a vocabulary that is a list": changed("model.vocab", [["a", 1]]),
    "a model without a kind": changed("model.type", 5),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_tokenizer_json_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, HARMFUL[name])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_engine(folder)
    tried("a harmful tokenizer.json")


TAKES_MEMORY = {
    name: content
    for name, content in HARMFUL.items()
    if "2^3" in name or "megabyte" in name or name.startswith(("a text that", "a pattern that"))
}


@pytest.mark.parametrize("disguised", [False, True])
@pytest.mark.parametrize("name", TAKES_MEMORY)
def test_no_engine_is_begun_for_what_would_take_all_memory(
    name: str, disguised: bool, tmp_path: Path
) -> None:
    content = TAKES_MEMORY[name]
    folder = write_tokenizer(tmp_path, content)
    if disguised:
        # The plain members come first, and those that count have escapes in their names.
        members = {key: content[key] for key in ("added_tokens", "normalizer", "model")}
        text = json.dumps(members)
        for key in members:
            text = text.replace(f'"{key}":', f'"{key[:-1]}\\u{ord(key[-1]):04x}":', 1)
        (folder / "tokenizer.json").write_text(f"{json.dumps(BASE)[:-1]}, {text[1:]}")
    begun: list[str] = []
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        describe(folder, when_harmless=lambda _: begun.append(name))
    assert not begun
    tried("a harmful tokenizer.json")


@pytest.mark.parametrize("word", ["a", "normalizer", "added_tokens"])
def test_engines_are_begun_once_for_what_does_no_harm(word: str, tmp_path: Path) -> None:
    begun: list[str] = []
    folder = write_tokenizer(tmp_path, changed(f"model.vocab.{word}", 300))
    describe(folder, when_harmless=lambda _: begun.append(word))
    assert begun == [word]


_PATHS = st.sampled_from(
    [
        *("model", "model.vocab", "model.merges", "model.type", "model.byte_fallback"),
        *("model.vocab.a", "added_tokens", "normalizer", "pre_tokenizer", "decoder"),
        *("pre_tokenizer.type", "post_processor", "model.unk_token", "model.dropout", "version"),
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "a", "id", "content", "normalizers"]), inner)
    ),
    max_leaves=6,
)


@attack(short=30, long=8000, parts=2)
@given(path=_PATHS, value=_VALUES)
def test_any_value_in_a_tokenizer_json_is_taken_or_refused_clearly(
    tmp_path_factory: pytest.TempPathFactory, path: str, value: object
) -> None:
    folder = write_tokenizer(tmp_path_factory.getbasetemp() / "fuzzed", changed(path, value))
    tried("any value in a tokenizer.json")
    try:
        engine = load_engine(folder)
    except TokenizerError:
        return
    assert_agree(engine, ["hello ab", "abb\n "])


def test_a_definition_of_the_wrong_types_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)))
    for definition in (
        {"pattern": 5, "special_tokens": {}},
        {"pattern": "a", "special_tokens": {"<x>": "7"}},
        {"pattern": "a", "special_tokens": {"<x>": -7}},
        {"pattern": "a", "special_tokens": {"<x>": 2**31 - 1}},
        {"pattern": "a", "special_tokens": ["<x>"]},
        {"pattern": "(", "special_tokens": {}},
    ):
        path.with_name("x.tiktoken.json").write_text(json.dumps(definition))
        with pytest.raises(TokenizerError, match=r"x\.tiktoken"):
            load_engine(path)
        tried("a harmful definition of a rank file")
