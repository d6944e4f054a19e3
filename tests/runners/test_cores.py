from __future__ import annotations

import os
import sys

import pytest

from tokenmill.runners.local import physical_cores, pinning


def test_there_is_at_least_one_physical_core_and_no_more_than_usable_ones() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux only")
def test_pinning_gives_each_worker_a_usable_core_and_spreads_them() -> None:
    plan = pinning(5)
    assert plan is not None
    usable = os.sched_getaffinity(0)
    assert all(set(cores) <= usable and len(cores) == 1 for cores in plan)
    assert len(plan) == 5
    assert len({core for cores in plan for core in cores}) == min(5, physical_cores())
