"""Prompts with completions, and texts of several fields."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.reading import read
from tests.supervised.shaping import Press

from tokenmill.engines.load import load_engine
from tokenmill.engines.references import R50K_PATTERN, RankDefinition
from tokenmill.errors import UsageError
from tokenmill.options import BuildOptions, RowShape
from tokenmill.records import RejectReason, TextBatch
from tokenmill.sources.base import SourceOptions
from tokenmill.supervised.rows import RowError, encoded, parse_row, text_of
from tokenmill.supervised.shaper import FieldMaker, TextBoundaries, parse_template

if TYPE_CHECKING:
    from pathlib import Path


EOS = 0
PROMPT: dict[str, Any] = {"format": "prompt-completion"}
pieces = st.text(
    st.one_of(st.sampled_from(" \n\tabcdef.,('_0123"), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize(
    "tokenizer",
    [
        "bytes",
        "bpe_tokenizer_dir",
        "unigram_tokenizer_dir",
        "wordpiece_tokenizer_dir",
        "sentencepiece_bpe_model",
        "sentencepiece_unigram_model",
    ],
)
def test_ids_are_those_of_the_joined_text_and_the_border_is_that_of_the_offsets(
    tokenizer: str, request: pytest.FixtureRequest
) -> None:
    path: Any = tokenizer if tokenizer == "bytes" else request.getfixturevalue(tokenizer)
    press = Press(path, eos=EOS, **PROMPT)
    reference = load_engine(path).reference

    @settings(max_examples=40, deadline=None)
    @given(pieces, pieces)
    def check(prompt: str, completion: str) -> None:
        text = prompt + completion
        found = press({"prompt": prompt, "completion": completion})
        whole = reference.encode(TextBatch.from_texts([text])).ids.tolist()
        if not whole or found.rejects:
            return
        assert found.ids == [[*whole, EOS]]
        offsets = getattr(reference, "offsets", _byte_offsets)(text)
        # By the rules: a token counts if it begins in the completion, or has only spaces before it.
        border = len(prompt) if hasattr(reference, "offsets") else len(prompt.encode())
        expected = [
            int(start >= border or (end > border and not text[start:border].strip(" ")))
            for start, end in offsets
        ]
        assert found.masks[0][-1] == 1
        assert sorted(found.masks[0]) == found.masks[0], "prompt first, completion behind it"
        if all(start < end for start, end in offsets):
            # Else a token has no character of its own, and may lie on either side.
            assert found.masks[0][:-1] == expected

    check()


_TEXT = st.text(
    st.sampled_from("ab 1.\n\t\u00d7\u00d7\u2295\u00e9\u0301\ufb01\u2460\u3000\u2581 \x00<"),
    max_size=12,
) | st.sampled_from(["the answer", "Question: ", "<unk>", "two  spaces \n", "\u00d7", " "])


@pytest.mark.parametrize(
    "tokenizer",
    [
        "bpe_tokenizer_dir",
        "unigram_tokenizer_dir",
        "wordpiece_tokenizer_dir",
        "sentencepiece_bpe_model",
        "sentencepiece_unigram_model",
    ],
)
def test_boundaries_of_a_batch_are_those_of_each_row_alone(
    tokenizer: str, request: pytest.FixtureRequest
) -> None:
    engine = load_engine(request.getfixturevalue(tokenizer))
    together = TextBoundaries(engine, engine.reference)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(_TEXT.filter(bool), _TEXT.filter(bool)), min_size=1, max_size=12))
    def check(rows: list[tuple[str, str]]) -> None:
        texts = TextBatch.from_texts([a + b for a, b in rows])
        tokens = engine.encode(texts)
        places = np.array([len(a.encode()) for a, _ in rows])
        found = together.beginnings(texts, places, tokens)
        for index, (a, b) in enumerate(rows):
            alone = TextBoundaries(engine, engine.reference)
            ids = tokens[index]
            expected = alone.tokens_in(a + b, ids, len(a), len(a + b), touching=False)
            assert (found[index], len(ids)) == expected, (a, b)

    check()


def test_unknown_characters_and_line_breaks_need_no_offsets(
    sentencepiece_unigram_model: Path,
) -> None:
    engine = load_engine(sentencepiece_unigram_model)
    boundaries = TextBoundaries(engine, engine.reference)
    rows = [
        ("the \u00d7 of \u2295\u2295 ", "it\nis \u00d7 said"),
        ("the first", "\u00d7 and\u2295"),
    ]
    texts = TextBatch.from_texts([a + b for a, b in rows * 2])
    places = np.array([len(a.encode()) for a, _ in rows * 2])
    boundaries.beginnings(texts, places, engine.encode(texts))
    assert boundaries._offsets == [], "the reference was asked"


def _byte_offsets(text: str) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(len(text.encode()))]


def test_a_token_of_both_belongs_to_the_prompt(bpe_tokenizer_dir: Path) -> None:
    press = Press(bpe_tokenizer_dir, eos=EOS, **PROMPT)
    # " return" is one token of this tokenizer, and the border lies inside of it.
    found = press({"prompt": "x re", "completion": "turn y"})
    assert press.said(found) == " y<|endoftext|>"
    assert press.engine.decode(found.ids[0]) == "x return y<|endoftext|>"


def test_everything_from_the_completion_on_counts(bpe_tokenizer_dir: Path) -> None:
    press = Press(
        bpe_tokenizer_dir,
        eos=EOS,
        template="Q: {q}\nA: {a.text} ({n})",
        completion_field="a.text",
        **PROMPT,
    )
    found = press({"q": "why?", "a": {"text": "so"}, "n": 7})
    assert found.texts == ["Q: why?\nA: so (7)"]
    # The space before the answer is a part of its first token.
    assert press.said(found) == " so (7)<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "missing-field"),
        ({"prompt": "a", "completion": None}, "null-text"),
        ({"prompt": "a", "completion": ["b"]}, "not-a-string"),
        ({"prompt": "a", "completion": True}, "not-a-string"),
        ({"prompt": "a", "completion": ""}, "nothing-to-train-on: the completion is empty"),
    ],
)
def test_a_row_without_its_texts_is_rejected(row: object, reason: str) -> None:
    found = Press("bytes", eos=256, **PROMPT)(row)
    (reject,) = found.rejects
    assert f"{reject.reason}: {reject.detail}".startswith(reason)


def test_a_row_that_is_too_long_is_whole_until_it_is_cut_up_or_is_cut_off_or_rejected() -> None:
    rows = [
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "ab", "completion": "cdef"},
        {"prompt": "abcdef", "completion": "g"},
    ]
    whole = Press("bytes", eos=256, max_length=5, **PROMPT)(*rows)
    assert [len(ids) for ids in whole.ids] == [5, 7, 8]
    cut = Press("bytes", eos=256, max_length=5, too_long="truncate", **PROMPT)(*rows)
    assert cut.ids == [[*b"abcd", 256], [*b"abcde"]]
    assert cut.masks == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert [(one.row, str(one.reason)) for one in cut.rejects] == [(2, "nothing-to-train-on")]
    refused = Press("bytes", eos=256, max_length=5, too_long="reject", **PROMPT)(*rows)
    assert refused.ids == [[*b"abcd", 256]]
    assert [(one.row, str(one.reason)) for one in refused.rejects] == [
        (1, "too-long"),
        (2, "too-long"),
    ]


_VALUES = (
    *(
        '"a"',
        '""',
        '"b \u2192"',
        r'"\u00e9\n"',
        r'"\ud83d\ude00"',
        r'"\ud800"',
        '"Inf, -NaN]"',
        '"}\t{"',
    ),
    *("1", "-0", "1.50", "1e3", "1E400", "NaN", "-NaN", "Inf", "-Inf", "Infinity", "true", "null"),
    *(
        "[]",
        '{"q": "x"}',
        "[" * 99 + "]" * 99,
        "[" * 100 + "]" * 100,
        "9" * 4300,
        "9" * 4301,
        "'a'",
    ),
)
_GOOD = '{"q": "why?", "a": "so"}\n'
_ODD = (
    *(_GOOD.replace("}", f', "x": {value}}}') for value in _VALUES),
    *(_GOOD.replace('"so"', value) for value in _VALUES),
    *(_GOOD.replace('"why?"', value) for value in _VALUES),
    *(_GOOD.replace("\n", end) for end in ("", "\r\n", "\n\n", " \n", " {}\n", _GOOD)),
    *("", "\n", "[]\n", "{}", "{}{}", '{"q": "1", "q": "2", "a": "3", "a": ""}\n', '{"q": "x"}\n'),
    *('{"q": "x}', '{q", "a": "b"}', '{"q": "x", "a": "b"', '"q": "x"}\n', "{\n", "}\n"),
)


@pytest.mark.usefixtures("ways_to_read_fields")
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([_GOOD, *_ODD]), max_size=3),
    st.sampled_from(["{q}{a}", "{q}: {a}.", "{q}"]),
    st.booleans(),
)
def test_rows_read_together_are_what_python_reads_of_each(
    lines: list[str], template: str, has_completion: bool
) -> None:
    shape = RowShape(format="text", template=template)
    if has_completion and "{a}" in template:
        shape = RowShape(format="prompt-completion", template=template, completion_field="a")
    _check_rows(shape, lines)
    if lines:
        return
    for line in _ODD:
        _check_rows(shape, [_GOOD, line, _GOOD])
    # As many values as lines, but not one on each.
    two = _GOOD.strip() * 2 + "\n"
    _check_rows(shape, ['{"q": "x}', '{q", "a": "b"}', two])
    _check_rows(shape, [_GOOD.replace("}", ', "x":'), _GOOD.replace("}", "}}"), two])


def _check_rows(shape: RowShape, lines: list[str]) -> None:
    assert shape.template is not None
    before, _, after = shape.template.partition("{a}")
    expected: dict[int, tuple[str, str | None]] = {}
    for number, line in enumerate(lines):
        try:
            row = parse_row(line.encode())
            prompt = before.replace("{q}", text_of(row, "q"))
            text = prompt + (text_of(row, "a") + after if "{a}" in shape.template else "")
            if shape.has_mask and text and prompt == text:
                raise RowError(RejectReason.NOTHING_TO_TRAIN, "the completion is empty")
            expected[number] = encoded(text).decode(), prompt if shape.has_mask else None
        except RowError as error:
            expected[number] = str(error.reason), error.detail
    maker = FieldMaker(shape, bos=None, eos=0, refused=())
    pieces, texts, kept, refused = maker.make(TextBatch.from_texts(lines))
    found: dict[int, tuple[str, str | None]] = {
        number: (str(why.reason), why.detail) for number, why in refused.items()
    }
    for place, number in enumerate(kept.tolist()):
        data, places = texts.bytes_at(place), pieces.places
        found[number] = data.decode(), None if places is None else data[: places[place]].decode()
    assert found == expected, lines


@pytest.mark.usefixtures("ways_to_read_fields")
def test_rows_of_strings_are_read_by_columns() -> None:
    shape = RowShape(format="prompt-completion")
    maker = FieldMaker(shape, bos=None, eos=0, refused=())
    rows = [json.dumps({"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}) for n in range(500)]
    rows[77] = json.dumps({"prompt": "?", "completion": 5})
    for ends in ("", "\n", "\r\n"):
        batch = TextBatch.from_texts([row + ends for row in rows])
        read = maker._by_arrow if maker._reader is None else maker._by_reader
        numbers, texts, places = read(batch)
        assert 500 - 64 <= len(numbers) < 500
        assert maker._reader is None or len(numbers) == 499
        assert texts[0].as_py() == b"0 + 1 = 1"
        assert places[0] == len("0 + 1 =")


def test_fields_make_one_text() -> None:
    press = Press("bytes", format="text", template="{title}\n\n{body} {{x}}")
    found = press({"title": "T", "body": "B"}, {"title": "", "body": ""})
    assert found.texts == ["T\n\nB {x}", "\n\n {x}"]
    assert found.ids[0] == [*b"T\n\nB {x}"]


@pytest.mark.parametrize("template", ["", "no field", "{", "a}b", "{}", "{ }", "{a{b}}"])
def test_a_template_that_cannot_be_meant_is_refused(template: str) -> None:
    with pytest.raises(UsageError):
        parse_template(template)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "poem"},
        {"format": "chat", "template": "{x}"},
        {"format": "chat", "train_on": "user"},
        {"format": "chat", "too_long": "truncate"},
        {"format": "chat", "max_length": 1},
        {"format": "prompt-completion", "train_on": "last"},
        {"prompt_field": "q"},
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BuildOptions("a.jsonl", tokenizer="bytes", out="store", **options)


def test_a_completion_that_the_template_does_not_name_is_refused() -> None:
    with pytest.raises(UsageError, match="completion_field='answer'"):
        Press("bytes", template="{question} {answer}", **PROMPT)


def test_the_border_is_found_in_text_that_a_rank_file_normalizes(tmp_path: Path) -> None:
    merges = [b"ca", b"caf", "caf\u00e9".encode(), b" x"]
    tokens = [bytes([byte]) for byte in range(256)] + merges
    ranks = tmp_path / "small.tiktoken"
    ranks.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
    )
    definition = RankDefinition(
        pattern=R50K_PATTERN,
        special_tokens={"<|end|>": 300},
        eos_token="<|end|>",
        normalization="NFC",
    )
    (tmp_path / "small.tiktoken.json").write_text(json.dumps(asdict(definition)))
    press = Press(ranks, eos=300, **PROMPT)
    # "e" and the accent become one character; the border lies behind it in both spellings.
    found = press(
        {"prompt": "cafe\u0301", "completion": " x"}, {"prompt": "caf\u00e9", "completion": " x"}
    )
    assert found.ids[0] == found.ids[1]
    assert found.masks == [[0] * (len(found.ids[0]) - 2) + [1, 1]] * 2
    # Here it lies inside, so the token belongs to the prompt.
    found = press({"prompt": "cafe", "completion": "\u0301 x"})
    assert press.said(found) == " x<|end|>"


@pytest.mark.parametrize(
    ("row", "text", "reason"),
    [
        ({"a.b": "literal", "a": {"b": "x"}}, "literal", None),
        ({"a.b": None, "a": {"b": "x"}}, "x", None),
        ({"a.b": None}, None, "null-text"),
        ({"a": None}, None, "null-text"),
        ({"a": {"b": None}}, None, "null-text"),
        ({"a": {}}, None, "missing-field"),
        ({"a": 5}, None, "missing-field"),
        ({}, None, "missing-field"),
    ],
)
def test_a_dotted_field_means_the_same_as_a_text_field_and_in_a_template(
    row: dict[str, Any], text: str | None, reason: str | None, tmp_path: Path
) -> None:
    pressed = Press("bytes", format="text", template="{a.b}")(row)
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row) + "\n")
    found = read(source, SourceOptions(text_field="a.b"))
    expected = [] if text is None else [text]
    assert [bytes(ids).decode() for ids in pressed.ids] == found.documents == expected
    reasons = [str(reject.reason) for reject in pressed.rejects]
    assert reasons == [why for _, why in found.rejects] == ([reason] if reason else [])
