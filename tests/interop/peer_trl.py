"""TRL's own training versions of chat templates, what they count, and its datasets."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

datasets.disable_progress_bars()


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
    """Columns of prompts and completions of messages, as SFTTrainer makes them."""
    made: Any = PreTrainedTokenizerFast
    tool = made.from_pretrained(tokenizer, pad_token="<|endoftext|>")
    tool.chat_template = template
    trainer = trl.SFTTrainer(
        model=tiny(len(tool)),
        args=trl.SFTConfig(output_dir=folder, max_length=None, report_to=[], use_cpu=True),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tool,
    )
    return trainer.train_dataset.to_dict()


def tiny(vocab_size: int) -> Any:
    """A model of a few thousand weights, the same every time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocab_size}
    return LlamaForCausalLM(LlamaConfig(**sizes))


if __name__ == "__main__":
    functions: dict[str, Any] = {"count": count, "complete": complete}
    function, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[function](*arguments)))
