"""An engine for text that does not open its row, where that makes a difference.

Some tokenizers put a space in front of a text, but only where it is the beginning of everything
(`Metaspace` with the scheme `first`). A chat is cut at its special tokens, so all stretches but the
first must be encoded by the same tokenizer without that space.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenmill.engines.base import SpecialTokens, TokenizerKind
from tokenmill.engines.huggingface import HuggingFaceEngine

if TYPE_CHECKING:
    from tokenmill.engines.base import Engine, TokenizerInfo


def load_inner(info: TokenizerInfo) -> Engine | None:
    """The engine for later stretches; None where the tokenizer treats all of them alike."""
    if info.kind is not TokenizerKind.HUGGINGFACE:
        return None
    path = info.files["tokenizer.json"]
    text = path.read_text(encoding="utf-8-sig")
    if '"prepend_scheme"' not in text:  # most have none, and parsing takes its time
        return None
    content = json.loads(text)
    if not _silence(content.get("pre_tokenizer")):
        return None
    return HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT, content=json.dumps(content))


def _silence(step: dict[str, Any] | None) -> bool:
    """Take the space away; whether there was one."""
    if step is None:
        return False
    found = False
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        step["prepend_scheme"] = "never"
        found = True
    for member in step.get("pretokenizers") or []:
        found = _silence(member) or found
    return found
