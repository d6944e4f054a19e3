"""datatrove: its TokenizedFile as writer, DatatroveFolderDataset below torch's DataLoader.

mode random      rows in random order, as every other contender
mode in-order    rows in the order of the file: what its authors mean, who shuffle documents
                 when they write
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.utils.dataset import DatatroveFolderDataset

from benchmarks.contenders.feeding import FeedJob, Pair, documents, run
from benchmarks.contenders.feeding_map_style import MapStyle, halves


def prepare(job: FeedJob) -> None:
    file = TokenizedFile(_folder(job), "tokens.ds", token_size=2)
    for tokens in documents(job):
        file.write_bytes(tokens.tobytes())
    file.close()


def open_feeder(job: FeedJob) -> MapStyle:
    dataset = DatatroveFolderDataset(_folder(job), seq_len=job.seq_len, token_size=2)
    return MapStyle(dataset, job, _pair, shuffle=job.mode == "random")


def _pair(batch: dict[str, Any]) -> Pair:
    return halves(batch["input_ids"])


def _folder(job: FeedJob) -> str:
    return str(Path(job.folder) / "tokens")


if __name__ == "__main__":
    run(open_feeder, prepare)
