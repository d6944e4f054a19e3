from __future__ import annotations

import random
import re
from importlib.metadata import version

import pytest
import tokenizers
from tests.engines.detectors import (
    NFC_TEMPLATE,
    SPLIT_TEMPLATE,
    detector_json,
    disagreements,
    pattern_sets,
)
from tests.engines.sweep_unicode import code_points

from tokenmill.engines.gigatoken import contested_ranges

ENGINES = [("tokenizers", tokenizers.__version__), ("gigatoken", version("gigatoken"))]


def contested(patterns: tuple[str, ...], *, nfc: bool) -> set[int]:
    text = "\n".join(patterns)
    ranges = contested_ranges(patterns=text, normalizes=nfc, engines=ENGINES)
    assert ranges is not None
    return {point for low, high in ranges for point in range(low, high + 1)}


def sampled_points() -> list[int]:
    """All contested characters, their neighbours, and a random part of the others."""
    points = contested(("\\p{S}",), nfc=True)
    points = {p for p in points if not 0x32400 < p < 0x33400}
    near = {p + d for p in points for d in (-2, -1, 1, 2)}
    others = random.Random(7).sample(code_points(), 2500)
    return sorted(p for p in points | near | set(others) if not 0xD800 <= p < 0xE000)


@pytest.mark.parametrize("patterns", pattern_sets(), ids=lambda p: re.sub(r"\W+", "", p[-1])[:24])
def test_the_engines_split_alike_but_for_contested_characters(patterns: tuple[str, ...]) -> None:
    found = disagreements(detector_json(patterns), sampled_points(), SPLIT_TEMPLATE)
    assert set(found) <= contested(patterns, nfc=False)
    assert len(found) > 200, "the tables are needed as long as the engines differ"


def test_the_engines_normalize_alike_but_for_contested_characters() -> None:
    patterns = pattern_sets()[0]
    found = disagreements(detector_json(patterns, nfc=True), sampled_points(), NFC_TEMPLATE)
    assert set(found) <= contested(patterns, nfc=True)
    assert set(found) - contested(patterns, nfc=False)


@pytest.mark.slow
@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("patterns", pattern_sets(), ids=lambda p: re.sub(r"\W+", "", p[-1])[:24])
def test_no_other_code_point_is_treated_differently(patterns: tuple[str, ...], nfc: bool) -> None:
    template = NFC_TEMPLATE if nfc else SPLIT_TEMPLATE
    found = disagreements(detector_json(patterns, nfc=nfc), code_points(), template)
    assert set(found) <= contested(patterns, nfc=nfc)
    assert found
