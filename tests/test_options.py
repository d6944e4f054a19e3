from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill
from tokenmill.errors import UsageError
from tokenmill.options import BuildOptions
from tokenmill.words import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4_000_000_000),
        ("1.5g", 1_500_000_000),
        ("512MiB", 512 * 1024**2),
        ("10 kb", 10_000),
        ("77", 77),
        (123, 123),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "1,5GB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size") as caught:
        parse_size(text)
    assert "4GB" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (62_790_294, "62.8 MB"), (1e9, "1.0 GB")],
)
def test_sizes_are_written_with_a_unit(size: float, expected: str) -> None:
    assert format_size(size) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"val": 1.0},
        {"val": -0.1},
        {"limit": 0},
        {"unit_bytes": 0},
        {"special_tokens": "keep"},
        {"max_rejects": 2.0},
        {"workers": 0},
        {"address": "auto"},
        {"format": "text", "chat_template": "a.jinja"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BuildOptions("a.txt", tokenizer="bytes", out="store", **options)  # type: ignore[arg-type]


def test_limit_and_threshold_do_not_change_who_a_store_is() -> None:
    made = partial(BuildOptions, "a.txt", tokenizer="bytes", out="store")
    plain = made().identity()
    assert made(limit=5, max_rejects=1.0, workers=3, memory="4GB").identity() == plain
    assert made(text_field="body").identity() != plain


@given(
    eos=st.sampled_from([None, True, False, "</s>"]),
    bos=st.sampled_from([True, False, "<s>"]),
    val=st.sampled_from([0.0, 0.25]),
    limit=st.none() | st.integers(1, 9),
    max_length=st.none() | st.integers(2, 9),
)
def test_what_a_part_keeps_gives_the_same_options_back(
    eos: str | bool | None, bos: str | bool, val: float, limit: int | None, max_length: int | None
) -> None:
    options = BuildOptions(
        "a.txt",
        tokenizer="bytes",
        out="store",
        eos=eos,
        bos=bos,
        val=val,
        limit=limit,
        max_length=max_length,
    )
    kept = options.as_kept()
    again = BuildOptions.of_kept(kept, inputs="b.txt", tokenizer="bytes", out="other")
    assert again.as_kept() == kept
    assert again.identity() == options.identity()


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match="build has no option max_reject") as caught:
        tokenmill.build("a.txt", tokenizer="bytes", out="store", max_reject=0.1)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean max_rejects?"
