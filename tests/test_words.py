from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenmill import words


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.0k"),
        (38_234_000, "38.2M"),
        (294e6, "294M"),
        (2e15, "2,000T"),
    ],
)
def test_a_compact_number_has_three_digits_and_a_unit(number: float, shown: str) -> None:
    assert words.compact(number) == shown


def test_counts_have_separators_and_the_right_noun() -> None:
    assert words.count(1_234_567) == "1,234,567"
    assert words.count(1, "document") == "1 document"
    assert words.count(0, "document") == "0 documents"
    assert words.count(2, "process", plural="processes") == "2 processes"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.04 s"), (9.94, "9.9 s"), (12.4, "12 s"), (187, "3:07"), (7387, "2:03:07")],
)
def test_a_duration_is_told_in_the_unit_a_person_would_use(seconds: float, shown: str) -> None:
    assert words.duration(seconds) == shown


def test_memory_is_told_in_the_unit_of_its_budget() -> None:
    assert words.of_budget(1_130_000_000, 1_500_000_000) == "1.1 of 1.5 GB"
    assert words.of_budget(80_000_000, 1_500_000_000) == "0.1 of 1.5 GB"
    assert words.of_budget(80_000_000, 512_000_000) == "80.0 of 512 MB"
    assert words.of_budget(0, 0) == "0.0 of 0 B"


def test_a_share_of_nothing_is_zero() -> None:
    assert words.share(0, 0) == "0%"
    assert words.share(1, 8) == "12.5%"


def test_a_rate_has_its_denominator() -> None:
    assert words.rate(326_000_000, 2) == "163 MB/s"
    assert words.rate(1, 0) == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 us"),
        (3.2e-6, "3.2 us"),
        (0.0009996, "1.0 ms"),
        (0.041, "41.0 ms"),
        (0.9996, "1.0 s"),
        (120.4, "120 s"),
    ],
)
def test_a_short_time_is_told_in_a_unit_that_fits_it(seconds: float, shown: str) -> None:
    assert words.brief(seconds) == shown


ROOT = Path(__file__).parents[1]
# In the words of torch, Arrow and Megatron: after, is, download, boundary, range.
OTHER_WORDS = re.compile(
    r"(?<![a-z])(behind|lies|lie(?! about)|brings?|brought|borders?|stretch(es)?)(?![a-z])",
    re.IGNORECASE,
)
LEFT = re.compile(r"\b(left|leave)\b.*\bbehind\b")


def test_everything_is_said_in_the_words_of_the_field() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for folder in ("src", "benchmarks", "examples"):
        pages += (ROOT / folder).rglob("*.py")
    assert len(pages) > 100
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if OTHER_WORDS.search(line) and not LEFT.search(line)
    ]
    assert not found


def test_a_part_of_the_input_is_called_by_its_files_and_its_place_in_them() -> None:
    assert words.slice_of(["a.jsonl"], 0, None, "bytes") == "'a.jsonl'"
    assert words.slice_of(["a.jsonl"], 4000, 8000, "bytes") == "bytes 4,000 to 7,999 of 'a.jsonl'"
    assert words.slice_of(["a.jsonl"], 8000, None, "bytes") == "bytes 8,000 and on of 'a.jsonl'"
    assert words.slice_of(["a.parquet"], 2, 3, "row groups") == "row groups 2 to 2 of 'a.parquet'"
    assert words.slice_of([f"{k}.txt" for k in range(1200)], 0, None, "bytes") == (
        "the 1,200 files from '0.txt' to '1199.txt'"
    )
