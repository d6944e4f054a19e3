"""Where a tokenizer's chat template is, and the names of special tokens that it may use.

As transformers looks for it: `chat_template.jinja` beside the tokenizer goes before the member
`chat_template` of tokenizer_config.json, which may be one template or several with names: of those
`tool_use` is for conversations with tools, `default` for all others.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.engines.locate import CHAT_TEMPLATE
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.paths import is_remote
from tokenmill.remote import shown
from tokenmill.supervised.jinja import ChatTemplate, tells_answers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.config import RowShape
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.locate import TokenizerFiles
    from tokenmill.supervised.conversation import Conversation

CONFIG_FILE = "tokenizer_config.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A tokenizer's templates by name."""

    by_name: Mapping[str, ChatTemplate]

    def name_for(self, conversation: Conversation) -> str:
        """The template for a conversation."""
        if conversation.tools is not None and WITH_TOOLS in self.by_name:
            return WITH_TOOLS
        return DEFAULT


def with_template(files: TokenizerFiles, given: str | None) -> TokenizerFiles:
    """A tokenizer's files with the chat template that is to be used: the given one, or its own."""
    if given is not None:
        if is_remote(given):
            raise UsageError(
                f"chat_template={shown(given)!r} is an address; a template is a local file",
                hint="copy it to a local disk: --chat-template FILE",
            )
        path = Path(given).expanduser()
        _read_text(path)
    elif files.main is None:
        return files
    else:
        path = files.main.with_name(CHAT_TEMPLATE)
        if not path.is_file():
            return files
    return dataclasses.replace(files, chat_template=path)


def read_sources(files: Mapping[str, Path]) -> dict[str, str]:
    """Name -> text of the templates among a tokenizer's files."""
    alone = files.get(CHAT_TEMPLATE)
    if alone is not None:
        return {DEFAULT: _read_text(alone)}
    found = _config(files).get("chat_template")
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list):
        named = {
            entry["name"]: entry["template"]
            for entry in found
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
        if DEFAULT in named:
            return {name: named[name] for name in (DEFAULT, WITH_TOOLS) if name in named}
    raise TokenizerError(
        "this tokenizer has no chat template: there is neither a chat_template.jinja beside it nor "
        "a chat_template in its tokenizer_config.json",
        hint="give one: --chat-template FILE",
    )


def digest(sources: Mapping[str, str]) -> str:
    """sha256 of templates, for a store's identity."""
    return hashlib.sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()


def load_templates(
    info: TokenizerInfo, *, date: str | None, kwargs: str | None = None
) -> ChatTemplates:
    """Compile the templates that lie with a tokenizer; `kwargs` is JSON of more variables."""
    variables = {**_variables(info), **json.loads(kwargs or "{}")}
    day = parse_date(date)
    return ChatTemplates(
        {
            name: ChatTemplate(source, variables=variables, date=day)
            for name, source in read_sources(info.files).items()
        }
    )


def doubtful_header(info: TokenizerInfo, shape: RowShape) -> str | None:
    """A warning where a template does not say where an answer begins, and that is found by rule."""
    if all(map(tells_answers, read_sources(info.files).values())):
        return None
    templates = load_templates(info, date=shape.chat_date, kwargs=shape.chat_template_kwargs)
    header = next(
        template.answer_header
        for template in templates.by_name.values()
        if not tells_answers(template.source)
    )
    behind = f"{header!r}, with which all begin" if header else "the message before it"
    return (
        "the chat template has neither generation blocks nor add_generation_prompt, so an answer "
        f"is taken to begin right behind {behind}; see whether that is so with: "
        "tokenmill inspect STORE --doc 0"
    )


def parse_date(date: str | None) -> datetime.date | None:
    """A day as 2024-07-26."""
    if date is None:
        return None
    try:
        return datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(
            f"chat_date={date!r} is not a day", hint="write it as 2024-07-26"
        ) from error


def _variables(info: TokenizerInfo) -> dict[str, str]:
    """`eos_token` and the like, as the tokenizer's own files name them."""
    names: dict[str, str] = {}
    for content in (_config(info.files), _config(info.files, "special_tokens_map.json")):
        for name in _NAMED_TOKENS:
            token = content.get(f"{name}_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                names.setdefault(f"{name}_token", token)
    for name, token in (("eos_token", info.eos_token), ("bos_token", info.bos_token)):
        if token is not None:
            names.setdefault(name, token)
    return names


def _config(files: Mapping[str, Path], name: str = CONFIG_FILE) -> dict[str, Any]:
    path = files.get(name)
    try:
        content = {} if path is None else json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{str(path)!r} cannot be read: {error}",
            hint="restore it, or give a template by itself: --chat-template FILE",
        ) from error
    return content if isinstance(content, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the chat template {str(path)!r} cannot be read: {error}",
            hint="give a text file with a Jinja template: --chat-template FILE",
        ) from error
