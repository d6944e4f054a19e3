"""What a GPU takes: as given, or estimated from the model's size and the GPU's peak.

    tokens/s = peak FLOP/s x share of it that is used (MFU) / FLOPs of one token

It is an estimate of a training that is not limited by its input, and no more exact than the MFU,
which the user may set. Peaks are the vendors' figures for dense bfloat16, or fp16 where there is
none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.diagnosis.values import Demand
from tokenmill.errors import UsageError
from tokenmill.trainer.peaks import PEAKS
from tokenmill.trainer.presets import PRESETS, preset

DEFAULT_GPU = "H200"
DEFAULT_MFU = 0.4
DEFAULT_SEQ_LEN = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the user says of the training: a rate, or a model and a GPU."""

    tokens_per_second: float | None = None
    model: str | None = None
    gpu: str = DEFAULT_GPU
    gpus: int = 1
    mfu: float = DEFAULT_MFU
    seq_len: int = DEFAULT_SEQ_LEN

    def __post_init__(self) -> None:
        rate = self.tokens_per_second
        if rate is not None and self.model is not None:
            raise UsageError(
                f"--tokens-per-second {rate:g} and --model {self.model} both say what the GPU"
                " takes",
                hint="leave one of them out; a rate that you measured is better than an estimate",
            )
        if rate is not None and not 0 < rate < math.inf:
            raise UsageError(
                f"{rate:g} tokens a second is no rate of a GPU",
                hint="use a number above 0, such as --tokens-per-second 500000",
            )
        if self.model is not None:
            preset(self.model)
        if _key(self.gpu) not in GPUS:
            raise UsageError(
                f"the peak of a GPU {self.gpu!r} is not known here",
                hint=f"use one of {', '.join(PEAKS)}, or give a rate: --tokens-per-second N",
            )
        if self.gpus < 1:
            raise UsageError(f"{self.gpus} GPUs take nothing", hint="use --gpus 1 or more")
        if not 0 < self.mfu <= 1:
            raise UsageError(
                f"mfu={self.mfu!r} is not a share of the GPU's peak",
                hint="use a number above 0 and up to 1, such as --mfu 0.4",
            )
        if self.seq_len < 1:
            raise UsageError(
                f"seq_len={self.seq_len!r} has no token", hint="use a number such as 1024"
            )


def demands(wanted: Wanted, *, vocab_size: int) -> tuple[Demand, ...]:
    """The rate that was given, that of the model, or those of all presets where neither was."""
    if wanted.tokens_per_second is not None:
        return (
            Demand(
                name="as given",
                tokens_per_second=wanted.tokens_per_second,
                gpus=wanted.gpus,
                origin="as given, for each GPU",
                is_estimate=False,
            ),
        )
    # The smallest is for tests on a CPU; no GPU is bought to train it.
    names = [name for name in PRESETS if name != "tiny"] if wanted.model is None else [wanted.model]
    return tuple(_estimate(name, wanted, vocab_size=vocab_size) for name in names)


def _estimate(name: str, wanted: Wanted, *, vocab_size: int) -> Demand:
    model, gpu = PRESETS[name], GPUS[_key(wanted.gpu)]
    peak = PEAKS[gpu]
    flops = model.flops_per_token(wanted.seq_len, vocab_size)
    parameters = model.num_parameters(vocab_size) / 1e6
    return Demand(
        name=name,
        tokens_per_second=peak * wanted.mfu / flops,
        gpus=wanted.gpus,
        origin=f"{parameters:,.0f}M parameters with this vocabulary, {flops / 1e9:,.2f} GFLOPs"
        " for each token",
        basis=f"an estimate: {wanted.mfu:.0%} of the {peak / 1e12:,.0f} TFLOP/s of one {gpu}, at"
        f" {wanted.seq_len:,} tokens of context",
        is_estimate=True,
    )


def _key(gpu: str) -> str:
    return gpu.upper().replace(" ", "").replace("-", "")


GPUS = {_key(name): name for name in PEAKS}
"""As anyone may write it -> as it is listed."""
