"""The ways people get tokens into a training loop, one small file each.

    one-by-one   the tokenizer is called for each sample, in the loop
    batched      the same with many samples in a call
    joined       many samples joined into one long string, encoded, and split again
    pool         a multiprocessing.Pool whose workers tokenize
    dataloader   a torch DataLoader whose workers tokenize
    build        `tokenmill build`: the cost, paid once
    loader       `tokenmill.Loader` on the store that it made

A way runs in a process of its own (`diagnosis/child.py`) that knows nothing but its job. All but
the last two run the reference engine of the tokenizer, the package that people would call
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.diagnosis.ways.base import Job, Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class WayKind:
    """What is known of a way before it runs."""

    title: str
    in_loop: bool = False
    feeds: bool = True


WAYS = {
    "one-by-one": WayKind(title="one sample at a time", in_loop=True),
    "batched": WayKind(title="in batches", in_loop=True),
    "joined": WayKind(title="joined and split again", in_loop=True),
    "pool": WayKind(title="process pool"),
    "dataloader": WayKind(title="DataLoader workers"),
    "build": WayKind(title="tokenmill build, once", feeds=False),
    "loader": WayKind(title="tokenmill Loader"),
}


def way_function(key: str) -> Callable[[Job], Measured]:
    """What carries out a way; its module is imported only now."""
    match key:
        case "one-by-one":
            from tokenmill.diagnosis.ways.one_by_one import measure
        case "batched":
            from tokenmill.diagnosis.ways.batched import measure
        case "joined":
            from tokenmill.diagnosis.ways.joined import measure
        case "pool":
            from tokenmill.diagnosis.ways.pool import measure
        case "dataloader":
            from tokenmill.diagnosis.ways.dataloader import measure
        case "build":
            from tokenmill.diagnosis.ways.pretokenize import measure
        case "loader":
            from tokenmill.diagnosis.ways.loading import measure
        case _:
            raise AssertionError(f"no such way: {key!r}")
    return measure
