"""TRL's own SFTTrainer, on a CPU, with models made on the spot."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from tokenmill.hf import as_dataset

datasets.disable_progress_bars()


def labels(
    tokenizer: str, chats: str, store: str, exports: dict[str, str], others: list[str]
) -> dict[str, Any]:
    """What TRL makes of chats by itself, and what it takes from the same ones otherwise.

    Of each way the ids and labels of all rows, and how many labels a batch of all of them counts;
    and the rows of other stores.
    """
    rows = [json.loads(line) for line in Path(chats).read_text().splitlines()]
    ways: dict[str, Any] = {
        "trl": datasets.Dataset.from_list(rows),
        "store": as_dataset(store),
        "masks": as_dataset(store).remove_columns("labels"),
        "arrow": datasets.load_from_disk(exports["arrow"]),
        "parquet": datasets.load_dataset(
            "parquet", data_dir=exports["parquet"], split="train", cache_dir=exports["cache"]
        ),
    }
    made = {
        way: _taken(_trainer(tokenizer, dataset, assistant_only_loss=way == "trl", max_length=None))
        for way, dataset in ways.items()
    }
    return made | {"others": [as_dataset(each).to_dict() for each in others]}


def _taken(trainer: Any) -> dict[str, Any]:
    rows = [*trainer.train_dataset]
    batch = trainer.data_collator(rows)
    return {
        "ids": [row["input_ids"] for row in rows],
        # Of a batch: rows have them only since TRL 1.7.
        "labels": [trainer.data_collator([row])["labels"][0].tolist() for row in rows],
        "counted": int((batch["labels"][:, 1:] != -100).sum()),
    }


def _trainer(tokenizer: str, dataset: Any, *, size: int = 32, **options: Any) -> Any:
    processing = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    processing.pad_token = processing.eos_token
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(processing),
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    arguments = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    return trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=dataset,
        processing_class=processing,
    )


def answers(tokenizer: str, store: str, question: str, **options: Any) -> str:
    """What a model that was trained on a store answers."""
    settings = {"per_device_train_batch_size": 8, "lr_scheduler_type": "linear", **options}
    trainer = _trainer(tokenizer, as_dataset(store), size=64, **settings)
    trainer.train()
    processing, model = trainer.processing_class, trainer.model.eval()
    ids = processing.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )["input_ids"]
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    return str(processing.decode(made[0, ids.shape[1] :]))


if __name__ == "__main__":
    function, *arguments = json.loads(sys.argv[1])
    functions: dict[str, Any] = {"labels": labels, "answers": answers}
    options = arguments.pop() if function == "answers" else {}
    print("\n" + json.dumps(functions[function](*arguments, **options)))
