"""Megatron-core's GPTDataset over the store's own `.bin` and `.idx`, below torch's DataLoader.

It shuffles documents, cuts the shuffled stream into rows and shuffles the rows; the orders are made
once, in `prepare`, and mapped. Its samplers walk through that order, so ours does not shuffle
again. Left out, because it would cost most of its time and modern attention does without: the
attention mask of seq_len squared for every row. Its loss mask and position ids are in the time.
"""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from benchmarks.contenders.feeding import FeedJob, run
from benchmarks.contenders.feeding_map_style import MapStyle

if TYPE_CHECKING:
    from benchmarks.contenders.feeding import Pair


def open_dataset(job: FeedJob) -> Any:
    logging.disable(logging.WARNING)
    # All it asks its tokenizer for.
    tokenizer = types.SimpleNamespace(
        eod=job.eos_id, pad=-1, vocab_size=job.vocab_size, unique_identifiers={"class": "benchmark"}
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=job.seq_len,
        blend=([job.tokens], None),
        split="1,0,0",
        path_to_cache=str(Path(job.folder) / "orders"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = GPTDataset.build_low_level_dataset(job.tokens, config)
    everything = np.arange(len(indexed), dtype=np.int32)
    return GPTDataset(indexed, job.tokens, everything, None, Split.train, config)


def prepare(job: FeedJob) -> None:
    Path(job.folder, "orders").mkdir(exist_ok=True)
    open_dataset(job)


def open_feeder(job: FeedJob) -> MapStyle:
    return MapStyle(open_dataset(job), job, _pair, shuffle=False)


def _pair(batch: dict[str, Any]) -> Pair:
    return batch["tokens"], batch["labels"]


if __name__ == "__main__":
    run(open_feeder, prepare)
