"""Where a tokenizer's chat template is, and the names of special tokens that it may use.

As transformers looks for it: `chat_template.jinja` beside the tokenizer goes before the member
`chat_template` of tokenizer_config.json, which may be one template or several with names: of
those `tool_use` is for conversations with tools, `default` for all others.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.engines.locate import CHAT_TEMPLATE
from tokenmill.errors import MissingExtraError, TokenizerError, UsageError
from tokenmill.files import is_remote, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.locate import TokenizerFiles
    from tokenmill.files import PathInput
    from tokenmill.options import RowShape
    from tokenmill.supervised.sandbox import ChatTemplate

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROMPT = "add_generation_prompt"
DEFAULT, WITH_TOOLS = "default", "tool_use"
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def with_template(files: TokenizerFiles, given: PathInput | None) -> TokenizerFiles:
    """A tokenizer's files with the chat template that is to be used: the given one, or its own."""
    if given is not None:
        if is_remote(given):
            raise UsageError(
                f"chat_template={shown(str(given))!r} is an address; a template is a local file",
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
    found = _config(files, "tokenizer_config.json").get("chat_template")
    if isinstance(found, str):
        return {DEFAULT: found}
    entries = [entry for entry in found if isinstance(entry, dict)] if type(found) is list else []
    named = {
        name: entry["template"]
        for name in (DEFAULT, WITH_TOOLS)
        for entry in entries
        if entry.get("name") == name and isinstance(entry.get("template"), str)
    }
    if DEFAULT in named:
        return named
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
) -> dict[str, ChatTemplate]:
    """Compile a tokenizer's templates, by name; `kwargs` is JSON of more variables."""
    try:
        from tokenmill.supervised.sandbox import ChatTemplate
    except ImportError as error:
        raise MissingExtraError(
            "jinja2", extra="chat", purpose="rendering chats with a chat template"
        ) from error
    # `eos_token` and the like, as the tokenizer's own files name them.
    names: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        content = _config(info.files, file)
        for name in _NAMED_TOKENS:
            token = content.get(f"{name}_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                names.setdefault(f"{name}_token", token)
    described = {"eos_token": info.eos_token, "bos_token": info.bos_token}
    variables = {
        **{name: token for name, token in described.items() if token is not None},
        **names,
        **json.loads(kwargs or "{}"),
    }
    try:
        day = None if date is None else datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(
            f"chat_date={date!r} is not a day", hint="write it as 2024-07-26"
        ) from error
    return {
        name: ChatTemplate(source, variables=variables, date=day)
        for name, source in read_sources(info.files).items()
    }


def doubtful_header(info: TokenizerInfo, shape: RowShape) -> str | None:
    """A warning where a template does not say where an answer begins, and that is found by rule."""
    doubtful = [
        name
        for name, source in read_sources(info.files).items()
        if PROMPT not in source and GENERATION.search(source) is None
    ]
    if not doubtful:
        return None
    templates = load_templates(info, date=shape.chat_date, kwargs=shape.template_kwargs)
    header = templates[doubtful[0]].answer_header
    before = f"{header!r}, with which all begin" if header else "the message before it"
    return (
        "the chat template has neither generation blocks nor add_generation_prompt, so an answer "
        f"is taken to begin right after {before}; see whether that is so with: "
        "tokenmill inspect STORE --doc 0"
    )


def _config(files: Mapping[str, Path], name: str) -> dict[str, Any]:
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
