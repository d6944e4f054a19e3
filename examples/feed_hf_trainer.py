"""Train from a store with the Hugging Face Trainer.

python examples/feed_hf_trainer.py STORE [FOLDER FOR CHECKPOINTS]

TokenDataset has a length and rows by number, so that the Trainer shuffles, shards and resumes as it
always does. Mind the labels: tokenmill's are the next tokens, and models of transformers shift
`labels` once more unless they are given as `shift_labels`, too.
"""

import sys

import torch
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tokenmill.torch import TokenDataset

STEPS = 20


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = default_collate(rows)
    return {**batch, "shift_labels": batch["labels"]}


def train(store: str, folder: str, *, until: int, resume: bool) -> list[float]:
    """Losses of the steps; `until` of them in all, those of the checkpoint included."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=until,
            save_steps=7,
            logging_steps=1,
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=TokenDataset(store, seq_len=64, boundaries="mask"),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(store: str, folder: str = "hf-checkpoints") -> None:
    straight = train(store, f"{folder}/straight", until=STEPS, resume=False)
    train(store, f"{folder}/resumed", until=7, resume=False)
    resumed = train(store, f"{folder}/resumed", until=STEPS, resume=True)
    print(f"loss {straight[0]:.3f} -> {straight[-1]:.3f}")
    print("resumed exactly" if resumed == straight else f"{straight} became {resumed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
