"""Who takes part: the rows of each table, and where each of them runs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import render


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of a table."""

    name: str
    """How the results and the tables call it."""
    module: str
    """In `contenders/`."""
    mode: str = ""
    file_format: str = "jsonl"
    environment: str = ""
    """Name of a file in `peers/`, or "candidate" for the release candidate of tokenizers."""
    starts_processes: bool = False
    """It starts processes inside its time: how long that takes is measured on a few documents."""


ENGINES_AND_BUILDS = (
    Contender(name=render.CEILINGS[0], module="gigatoken_alone", mode="threads"),
    Contender(name=render.CEILINGS[1], module="gigatoken_alone", mode="processes"),
    Contender(
        name="tokenizers 1.0.0rc3, alone",
        module="tokenizers_candidate",
        environment="candidate",
    ),
    Contender(name=f"{render.OWN} from jsonl", module="tokenmill_build"),
    Contender(name=f"{render.OWN} from parquet", module="tokenmill_build", file_format="parquet"),
    Contender(
        name=f"{render.OWN} from jsonl.zst", module="tokenmill_build", file_format="jsonl.zst"
    ),
)
OUTSIDE = (
    *ENGINES_AND_BUILDS[:2],
    Contender(name=f"{render.OWN} from jsonl", module="tokenmill_build"),
    Contender(name=render.OUTSIDE, module="tokenmill_command"),
    Contender(name=f"{render.OUTSIDE}, no parts in C", module="tokenmill_command", mode="no-c"),
)
OUTSIDE_WORDS = (
    Contender(name=render.CEILINGS[2], module="words_alone"),
    Contender(name=render.OUTSIDE, module="tokenmill_command", mode="no-eos"),
)
PEERS = (
    Contender(name=f"{render.OWN} from jsonl", module="tokenmill_build"),
    Contender(name="tokenizers, one by one", module="tokenizers_stable", mode="loop"),
    Contender(name="tokenizers, encode_batch", module="tokenizers_stable", mode="batch"),
    Contender(name="tokenizers, encode_batch_fast", module="tokenizers_stable", mode="batch-fast"),
    Contender(
        name="datasets.map",
        module="datasets_map",
        environment="datasets",
        starts_processes=True,
    ),
    Contender(
        name="datatrove",
        module="datatrove_pipeline",
        environment="datatrove",
        starts_processes=True,
    ),
)
