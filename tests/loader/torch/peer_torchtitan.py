"""torchtitan's own loss, on what the loader of examples/feed_torchtitan.py gives.

Its models train on a GPU alone: their attention is flex or varlen. A table of which id follows
which learns from the same loss, and shows as well whether labels are the next tokens.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import torch
from torchtitan.components.loss import cross_entropy_loss

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from feed_torchtitan import TokenmillDataLoader  # type: ignore[import-not-found]  # of examples/


def answer(store: str, vocab_size: int, begin: int, *, steps: int, length: int) -> list[int]:
    """What is written after an id."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(vocab_size, vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = TokenmillDataLoader.Config(dataset=store)
    loader = config.build(
        dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=24, local_batch_size=8
    )
    for inputs, labels in islice(loader, steps):
        (cross_entropy_loss(model(inputs["input"]), labels) / (labels != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = [begin]
    for _ in range(length):
        ids.append(int(model(torch.tensor(ids[-1])).argmax()))
    return ids[1:]


if __name__ == "__main__":
    store, vocab_size, begin = json.loads(sys.argv[1])
    print("\n" + json.dumps(answer(store, vocab_size, begin, steps=60, length=8)))
