"""The store in tests/golden/v1 was written by the first version of the format and opens for ever.

If this fails because the writer's bytes changed, the format changed: give it a new version, keep
reading this one, and add a golden store for the new version beside it. `write_golden` made it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.store.check import check_store
from tokenmill.store.layout import StoreLayout
from tokenmill.store.reader import Store
from tokenmill.store.runs import append_run, read_runs

from .samples import GOLDEN, tree

GOLDEN_ROOT = Path(__file__).parents[1] / "golden" / "v1"


def write_golden(root: Path) -> StoreLayout:
    """What made the golden store."""
    layout = GOLDEN.write(root)
    append_run(layout, {"date": "2024-01-01T00:00:00Z", "seconds": 0.5})
    return layout


def test_the_golden_store_opens_and_is_sound() -> None:
    report = check_store(GOLDEN_ROOT)
    assert (report.findings, report.notes, report.files) == ((), (), 15)
    assert len(read_runs(StoreLayout(GOLDEN_ROOT))) == 1


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", ["It was a bright cold day.", "na\u00efve caf\u00e9 \u2603", "\U0001f600", "x"]),
        ("val", ["held out", "only held out"]),
    ],
)
def test_the_golden_store_still_says_the_same(split: str, expected: list[str]) -> None:
    store = Store(GOLDEN_ROOT, split=split)
    found = [bytes(document[:-1].astype("u1")).decode() for document in store]
    assert found == expected
    assert {int(document[-1]) for document in store} == {256}


def test_the_writer_still_makes_the_golden_bytes(tmp_path: Path) -> None:
    write_golden(tmp_path)
    assert tree(tmp_path) == tree(GOLDEN_ROOT)
