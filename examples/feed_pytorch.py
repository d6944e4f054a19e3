"""Train from a store with plain PyTorch; stop, and go on exactly where the run stopped.

python examples/feed_pytorch.py STORE [FOLDER FOR CHECKPOINTS]

Needs: pip install torch
"""

import sys
from pathlib import Path

import torch
from torch import nn

import tokenmill
from tokenmill.torch import DeviceFeeder

STEPS = 20


def train(store: str, checkpoint: Path, *, until: int) -> list[float]:
    """Losses of the steps up to `until`, from the checkpoint on if there is one."""
    loader = tokenmill.Loader(
        store, split="train", seq_len=64, batch_size=8, boundaries="mask", seed=0
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    vocab_size = loader.mixture.stores[0].vocab_size
    model = nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])

    losses = []
    with DeviceFeeder(loader, device=device) as feeder:
        for batch in feeder:
            logits = model(batch.input_ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())  # no .item() here: it would make the host wait
            if loader.step == until:
                break
        print(f"waited {1e6 * feeder.wait_seconds / len(losses):.0f} us per batch")

    # The feeder reads ahead, but the loader's state is what this loop has consumed.
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        },
        checkpoint,
    )
    return torch.stack(losses).tolist()


def main(store: str, folder: str = ".") -> None:
    straight = train(store, Path(folder) / "straight.pt", until=STEPS)
    checkpoint = Path(folder) / "resumed.pt"
    resumed = train(store, checkpoint, until=7) + train(store, checkpoint, until=STEPS)
    print(f"loss {straight[0]:.3f} -> {straight[-1]:.3f}")
    print("resumed exactly" if resumed == straight else "resumed with another stream")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
