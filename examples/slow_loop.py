"""A loop that loses its time in three ways. Which, and how much of it, says:

python -m tokenmill.stalls examples/slow_loop.py

It cleans its texts in the loader, character by character; it tokenizes them in every step; and it
reads the loss in every step, so that it waits for the device each time. `--without` takes any of
these out: what a step takes then is what the account said that it would.
"""

import argparse
import random
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

BATCH_SIZE = 32
VOCABULARY = 2048
WARM_STEPS = 10
HAS_CUDA = torch.cuda.is_available()
DEVICE, LAYERS, WIDTH, LENGTH = ("cuda", 12, 1024, 256) if HAS_CUDA else ("cpu", 1, 64, 8)


def some_texts(count: int) -> list[str]:
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(4000)]
    return [" ".join(chance.choices(words, k=512)) for _ in range(count)]


def trained_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def clean(texts: list[str]) -> list[str]:
    """The slow collate. These texts are clean, so that leaving it out changes nothing else."""
    cleaned = []
    for text in texts:
        kept = [letter for letter in text if letter.isalnum() or letter == " "]
        cleaned.append("".join(kept))
    return cleaned


def make_model() -> torch.nn.Module:
    block = torch.nn.TransformerEncoderLayer(
        WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH),
        torch.nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False),
        torch.nn.Linear(WIDTH, VOCABULARY),
    )
    return model.to(DEVICE, dtype=torch.bfloat16 if HAS_CUDA else torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--without", nargs="*", default=[], choices=["clean", "tokenize", "item"])
    options = parser.parse_args()
    if not HAS_CUDA:
        torch.set_num_threads(1)  # what is so small only loses by more

    texts = some_texts(8 * BATCH_SIZE)
    tokenizer = trained_tokenizer(texts)
    known = {text: tokenizer.encode(text[:1536]).ids for text in texts}
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=HAS_CUDA)
    loader = DataLoader(
        texts * (options.steps // 8 + 1),  # type: ignore[arg-type]
        batch_size=BATCH_SIZE,
        collate_fn=list if "clean" in options.without else clean,
    )
    total: float | torch.Tensor = 0.0
    began = 0.0
    for step, batch in enumerate(loader):
        if step == WARM_STEPS:
            finish()
            began = time.perf_counter()
        if step == options.steps:
            break
        if "tokenize" in options.without:
            ids = [known[text] for text in batch]
        else:
            ids = [tokenizer.encode(text[:1536]).ids for text in batch]
        rows = torch.tensor([row[: LENGTH + 1] for row in ids])
        if HAS_CUDA:
            rows = rows.pin_memory().to(DEVICE, non_blocking=True)
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "item" in options.without:
            total = total + loss.detach()
        else:
            total += loss.item()
    finish()
    seconds = (time.perf_counter() - began) / (options.steps - WARM_STEPS)
    print(f"{1000 * seconds:.2f} ms a step, mean loss {float(total) / options.steps:.3f}")


def finish() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
