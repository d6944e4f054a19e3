from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tokenmill.errors import StoreError
from tokenmill.store.check import check_store
from tokenmill.store.facts import append_runs
from tokenmill.store.layout import Json, StoreLayout, unseal

from .samples import SampleStore, SampleUnit

if TYPE_CHECKING:
    from pathlib import Path


def read_runs(layout: StoreLayout) -> list[dict[str, Json]]:
    lines = layout.runs.read_bytes().splitlines(keepends=True)
    return [unseal(line, path=layout.runs) for line in lines]


def test_runs_come_back_in_order_and_do_not_change_the_store(tmp_path: Path) -> None:
    layout = SampleStore(units=[SampleUnit(path="a", rows=[("train", "x")])]).write(tmp_path)
    manifest = layout.manifest.read_bytes()
    assert not layout.runs.exists()
    append_runs(layout, [{"date": "2024-01-01", "seconds": 1.5}])
    append_runs(layout, [{"date": "2024-01-02", "host": "h\u00f6st"}])
    assert read_runs(layout) == [
        {"date": "2024-01-01", "seconds": 1.5},
        {"date": "2024-01-02", "host": "h\u00f6st"},
    ]
    assert layout.manifest.read_bytes() == manifest
    assert check_store(tmp_path).is_sound
    assert not layout.tmp.exists()


def test_a_changed_line_is_noticed(tmp_path: Path) -> None:
    layout = SampleStore(units=[SampleUnit(path="a", rows=[("train", "x")])]).write(tmp_path)
    append_runs(layout, [{"seconds": 10}, {"seconds": 20}])
    layout.runs.write_bytes(layout.runs.read_bytes().replace(b"20", b"21", 1))
    with pytest.raises(StoreError, match=r"runs\.jsonl"):
        read_runs(layout)
    (finding,) = check_store(tmp_path).findings
    assert (finding.file, finding.problem) == ("runs.jsonl", "line 2 was changed")
