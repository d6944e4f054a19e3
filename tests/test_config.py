from __future__ import annotations

import pytest

from tokenmill.config import BuildConfig, BuildResources
from tokenmill.errors import UsageError
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
        {"val_fraction": 1.0},
        {"val_fraction": -0.1},
        {"limit": 0},
        {"unit_bytes": 0},
        {"special_tokens": "keep"},
        {"max_reject_fraction": 2.0},
        {"eos": "</s>", "add_eos": False},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BuildConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        BuildResources(workers=0)


def test_limit_and_threshold_do_not_change_who_a_store_is() -> None:
    plain = BuildConfig().identity()
    assert BuildConfig(limit=5, max_reject_fraction=1.0).identity() == plain
    assert BuildConfig(text_field="body").identity() != plain
