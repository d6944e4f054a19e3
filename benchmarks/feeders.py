"""Who takes part in the measurement of feeding: the rows of its tables."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT, BOUND, OWN, PEER = "limit", "bound", "own", "peer"
"""A bound is what no loader of a kind can pass: made for this table, used by nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row."""

    name: str
    role: str
    module: str
    """In `contenders/`."""
    mode: str = ""
    workers: int = 0
    shards: int = 16
    """Which of the two stores with the same tokens tokenmill reads."""
    environment: str = ""
    """Name of a file in `peers/`; none is the environment of the benchmark itself."""
    resumes: bool = True
    """It is also stopped in the middle of an epoch; once for each way of keeping a state."""
    prepares: bool = False
    """It reads a format of its own, which it writes first."""


def _own(name: str, mode: str, *, resumes: bool = False, shards: int = 16) -> Contender:
    return Contender(
        name=f"tokenmill, {name}",
        role=OWN,
        module="feeding_tokenmill",
        mode=mode,
        resumes=resumes,
        shards=shards,
    )


def _own_torch(name: str, mode: str, *, workers: int = 0, resumes: bool = True) -> Contender:
    return Contender(
        name=f"tokenmill.torch, {name}",
        role=OWN,
        module="feeding_tokenmill_torch",
        mode=mode,
        workers=workers,
        resumes=resumes and not workers,
    )


def _memmap(name: str, mode: str, *, workers: int = 0) -> Contender:
    return Contender(
        name=name,
        role=PEER,
        module="feeding_memmap",
        mode=mode,
        workers=workers,
        resumes=not workers,
    )


def _peer(
    name: str, module: str, *, mode: str = "", workers: int = 0, environment: str = "feeding"
) -> Contender:
    return Contender(
        name=name,
        role=PEER,
        module=f"feeding_{module}",
        mode=mode,
        workers=workers,
        environment=environment,
        resumes=not workers,
        prepares=True,
    )


_DATALOADER = "torch DataLoader over a memmap"
_MOSAICML = "MosaicML StreamingDataset"

CONTENDERS = (
    Contender(name="one numpy gather", role=LIMIT, module="feeding_limit", resumes=False),
    Contender(
        name="bound of a DataLoader of rows",
        role=BOUND,
        module="feeding_memmap",
        mode="unfolded",
        resumes=False,
    ),
    _own("concat", "concat", resumes=True),
    _own("concat, prefetching", "prefetch"),
    _own("concat, one shard", "concat", shards=1),
    _own("concat, block shuffle", "block"),
    _own("best-fit", "best-fit", resumes=True),
    _own("pad", "pad"),
    _own("concat, position ids, cu_seqlens", "fields"),
    _own_torch("DeviceFeeder on the CPU", "feeder"),
    _own_torch("BatchDataset in a DataLoader", "batches"),
    _own_torch("BatchDataset in a DataLoader", "batches", workers=2),
    _own_torch("TokenDataset in a DataLoader", "rows", resumes=False),
    _memmap("memmap, as in nanoGPT", "nanogpt"),
    _memmap(_DATALOADER, "int64"),
    _memmap(_DATALOADER, "int64", workers=2),
    _memmap(f"{_DATALOADER}, not widened", "uint16"),
    _memmap("torchdata StatefulDataLoader over a memmap", "stateful"),
    _memmap("torchdata StatefulDataLoader over a memmap", "stateful", workers=2),
    _peer("LitData TokensLoader", "litdata"),
    _peer("LitData TokensLoader", "litdata", workers=2),
    _peer("datatrove", "datatrove", mode="random"),
    _peer("datatrove", "datatrove", mode="random", workers=2),
    _peer("datatrove, rows in order", "datatrove", mode="in-order"),
    _peer("Hugging Face datasets in a DataLoader", "datasets", mode="loader"),
    _peer("Hugging Face datasets in a DataLoader", "datasets", mode="loader", workers=2),
    _peer("Hugging Face datasets, own batches", "datasets", mode="batches"),
    _peer("Hugging Face iterable in a DataLoader", "datasets", mode="iterable-loader"),
    _peer("Hugging Face iterable, own batches", "datasets", mode="iterable"),
    _peer("Megatron-core GPTDataset", "megatron"),
    _peer("Megatron-core GPTDataset", "megatron", workers=2),
    _peer(_MOSAICML, "mosaicml", environment="mosaicml"),
    _peer(_MOSAICML, "mosaicml", environment="mosaicml", workers=2),
)
