"""Train from a store with the Hugging Face Trainer.

python examples/feed_hf_trainer.py STORE [FOLDER FOR CHECKPOINTS]

Needs: pip install torch transformers accelerate

A TrainerDataset with its collator and its callback is all there is to it: labels as the model wants
them, attention within documents, every rank its own rows, and a checkpoint of the Trainer's goes on
with the row after the last one used. With several GPUs: `torchrun --nproc-per-node 8 ...`.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tokenmill
from tokenmill.hf import TrainerDataset

STEPS = 20


def train(store: str, folder: str, *, until: int, resume: bool) -> list[float]:
    """Losses of the steps; `until` of them in all, those of the checkpoint included."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenmill.Store(store, split=None).vocab_size, hidden_size=32,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = TrainerDataset(store, seq_len=64, model=model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=until,
            save_steps=7,
            logging_steps=1,
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=rows.collate,
        callbacks=[rows.callback],
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
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
