"""TRL's own training versions of chat templates, what they count, and its datasets."""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl.chat_template_utils import get_training_chat_template

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from tokenmill import PairLoader
from tokenmill.hf import as_dataset

datasets.disable_progress_bars()

COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def count(tokenizer: str, names: list[str], chats: list[list[dict[str, Any]]]) -> Any:
    """By published template: ids and masks of chats, as SFTTrainer makes them for the assistant's
    part. The templates too."""
    made: Any = PreTrainedTokenizerFast
    folder = Path(trl.__file__).parent / "chat_templates"
    templates = {name: (folder / f"{name}.jinja").read_text() for name in names}
    today = datetime.date.today().isoformat()
    answers: dict[str, Any] = {"templates": templates, "today": today}
    for name, template in templates.items():
        tool = made.from_pretrained(tokenizer)
        tool.chat_template = template
        training = get_training_chat_template(tool)
        answers[name] = [
            dict(
                tool.apply_chat_template(
                    chat,
                    chat_template=training,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
            )
            for chat in chats
        ]
    return answers


def complete(tokenizer: str, template: str, rows: list[dict[str, Any]], folder: str) -> Any:
    """Ids and labels of prompts and completions of messages, as SFTTrainer makes them."""
    made: Any = PreTrainedTokenizerFast
    tool = made.from_pretrained(tokenizer, pad_token="<|endoftext|>")
    tool.chat_template = template
    trainer = trl.SFTTrainer(
        model=tiny(len(tool)),
        args=trl.SFTConfig(output_dir=folder, max_length=None, report_to=[], use_cpu=True),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tool,
    )
    made_rows = [*trainer.train_dataset]
    labels = [trainer.data_collator([row])["labels"][0].tolist() for row in made_rows]
    return {"input_ids": [row["input_ids"] for row in made_rows], "labels": labels}


def prefer(
    tokenizer: str, template: str, given: dict[str, list[dict[str, Any]]], stores: dict[str, str]
) -> Any:
    """Columns of pairs as DPOTrainer and RewardTrainer make them, and their losses on them and on
    those of a store."""
    answers: dict[str, Any] = {}
    for name, rows in given.items():
        made: Any = PreTrainedTokenizerFast
        tool = made.from_pretrained(tokenizer, pad_token="<|endoftext|>")
        tool.chat_template = template
        columns, losses = [], []
        given_rows = datasets.Dataset.from_list(rows)
        for dataset in (given_rows, as_dataset(stores[name], trainer="dpo")):
            with tempfile.TemporaryDirectory() as folder:
                trainer = StoreDPOTrainer(
                    model=tiny(len(tool)),
                    ref_model=tiny(len(tool), seed=1),
                    args=trl.DPOConfig(
                        output_dir=folder, max_length=64, report_to=[], use_cpu=True
                    ),
                    train_dataset=dataset,
                    processing_class=tool,
                )
                batch = trainer.data_collator([*trainer.train_dataset])
                with torch.no_grad():
                    losses.append(float(trainer.compute_loss(trainer.model, batch)))
                if dataset is not given_rows:
                    loader = PairLoader(
                        stores[name], seq_len=64, batch_size=len(rows), shuffle=False
                    )
                    own = loader.batch(0)
                    keys = ("input_ids", "attention_mask", "completion_mask")
                    batch = {key: torch.from_numpy(getattr(own, key)) for key in keys}
                    with torch.no_grad():
                        losses.append(float(trainer.compute_loss(trainer.model, batch)))
                columns.append({each: trainer.train_dataset[each][:] for each in COLUMNS})
        answers[name] = {"columns": columns, "losses": losses}
        answers[name]["reward"] = [
            reward(dataset, tool)
            for dataset in (given_rows, as_dataset(stores[name], trainer="reward"))
        ]
    return answers


def reward(dataset: Any, tool: Any) -> Any:
    """Columns as RewardTrainer has them, and its loss."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(small(len(tool), num_labels=1))
    with tempfile.TemporaryDirectory() as folder:
        args = trl.RewardConfig(output_dir=folder, max_length=64, report_to=[], use_cpu=True)
        trainer = trl.RewardTrainer(
            model=model, args=args, train_dataset=dataset, processing_class=tool
        )
        batch = trainer.data_collator([*trainer.train_dataset])
        with torch.no_grad():
            loss = float(trainer.compute_loss(trainer.model, batch))
    return [{name: trainer.train_dataset[name][:] for name in COLUMNS[1:]}, loss]


class StoreDPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
    """As docs/supervised.md writes it."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        is_ready = "prompt_ids" in dataset.column_names
        return dataset if is_ready else super()._prepare_dataset(dataset, *args)


def tiny(vocab_size: int, *, seed: int = 0) -> Any:
    """A model of a few thousand weights, the same every time."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(small(vocab_size))


def small(vocab_size: int, **more: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocab_size}
    return LlamaConfig(**sizes, **more)


if __name__ == "__main__":
    functions: dict[str, Any] = {"count": count, "complete": complete, "prefer": prefer}
    function, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[function](*arguments)))
