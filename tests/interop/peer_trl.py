"""TRL's own training versions of chat templates, and what they count."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import trl
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template


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


if __name__ == "__main__":
    functions: dict[str, Any] = {"count": count}
    function, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[function](*arguments)))
