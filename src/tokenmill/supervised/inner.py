"""An engine for text that does not open its row, where that makes a difference.

Some tokenizers put a space in front of a text, but only where it is the beginning of everything
(`Metaspace` with the scheme `first`). A chat is cut at its special tokens, so all stretches but the
first must be encoded by the same tokenizer without that space.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.huggingface import HuggingFaceEngine

if TYPE_CHECKING:
    from tokenmill.engines.base import Engine, TokenizerInfo


def load_inner(info: TokenizerInfo) -> Engine | None:
    """The engine for later stretches; None where the tokenizer treats all of them alike."""
    if not info.spaces_beginnings:
        return None
    path = info.files["tokenizer.json"]
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    _silence(content["pre_tokenizer"])
    return HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT, content=json.dumps(content))


def _silence(step: dict[str, Any]) -> None:
    """Take the space away."""
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        step["prepend_scheme"] = "never"
    for member in step.get("pretokenizers") or []:
        _silence(member)
