"""Is a loop starved? A DataLoader that tokenizes as it goes, then the same batches from memory.

python examples/stall_meter.py
"""

import json
import time

import torch
from torch.utils.data import DataLoader, Dataset

import tokenmill

STEPS = 30
BATCH_SIZE = 8


class SlowText(Dataset[torch.Tensor]):
    """Stands for text that is tokenized when it is asked for: 2 ms a row."""

    def __len__(self) -> int:
        return STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((64,), index % 256)


def train_step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    time.sleep(0.005)  # stands for a larger model


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
    in_the_loop = DataLoader(SlowText(), batch_size=BATCH_SIZE)
    in_memory = [batch.clone() for batch in in_the_loop]
    for name, batches in (("tokenized in the loop", in_the_loop), ("in memory", in_memory)):
        with tokenmill.StallMeter() as meter:
            for batch in meter.watch(batches):
                train_step(model, batch)
        report = meter.report()
        print(f"--- {name}\n{report.describe()}\n")
    print(json.dumps(report.as_json())[:60], "...")  # for: tokenmill diagnose --stalls FILE


if __name__ == "__main__":
    main()
