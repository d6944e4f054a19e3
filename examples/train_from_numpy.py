"""Feed a training loop from a store with numpy alone: random windows of a fixed length.

python examples/train_from_numpy.py STORE
"""

import sys
from collections.abc import Iterator

import numpy as np

import tokenmill

SEQUENCE = 128
BATCH = 4


def batches(store: tokenmill.Store, *, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets, shifted by one, from anywhere in the store."""
    dice = np.random.default_rng(seed)
    shards = [store.map_shard(number).tokens for number in range(len(store.shards))]
    shards = [tokens for tokens in shards if len(tokens) > SEQUENCE]
    if not shards:
        sys.exit(f"no shard has more than {SEQUENCE} tokens: give a larger store")
    chance = np.array([len(tokens) for tokens in shards], np.float64)
    while True:
        rows = []
        for shard in dice.choice(len(shards), size=BATCH, p=chance / chance.sum()):
            start = dice.integers(len(shards[shard]) - SEQUENCE)
            rows.append(shards[shard][start : start + SEQUENCE + 1])
        window = np.stack(rows).astype(np.int64)
        yield window[:, :-1], window[:, 1:]


def main(path: str) -> None:
    store = tokenmill.Store(path, split="train")
    print(store)
    for step, (inputs, targets) in zip(range(3), batches(store, seed=1), strict=False):
        print(f"step {step}: inputs {inputs.shape}, first target {targets[0, 0]}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
