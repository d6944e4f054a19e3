"""Fine-tune with TRL on a store of chats, as it is: no export, and no tokenizing again.

python examples/feed_trl.py STORE TOKENIZER

STORE is what `tokenmill build chats.jsonl -t TOKENIZER -o STORE --format chat` made. What counts
for the loss is what the store says: the labels of the dataset are -100 elsewhere. TRL is given the
documents; it cuts, pads or packs them itself.
"""

import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import tokenmill
from tokenmill.hf import as_dataset


def main(store: str, tokenizer: str) -> None:
    torch.manual_seed(0)
    processing = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(processing), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),  # or AutoModelForCausalLM.from_pretrained(...)
        args=SFTConfig(
            output_dir="trl-checkpoints",
            max_length=512,
            max_steps=20,
            logging_steps=1,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=torch.cuda.is_available(),
        ),
        train_dataset=as_dataset(store),
        processing_class=processing,
    )
    trainer.train()
    counted = sum(label != -100 for row in trainer.train_dataset for label in row["labels"])
    print(f"{counted:,} labels count, and {tokenmill.Store(store).num_counted:,} of the store")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
