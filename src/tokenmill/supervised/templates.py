"""Chat templates, rendered as transformers renders them.

A template sees what transformers gives it, with one exception: today's date, since a store may not
depend on the day it was made. `strftime_now` exists only where a date is given, and tells that one.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.engines.locate import CHAT_TEMPLATE
from tokenmill.errors import BuildError, TokenizerError, UsageError
from tokenmill.files import is_remote, shown
from tokenmill.records import RejectReason
from tokenmill.supervised.rows import Conversation, RowError
from tokenmill.supervised.sandbox import TRACKED, TemplateLimit, environment, import_jinja

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.locate import TokenizerFiles
    from tokenmill.files import PathInput
    from tokenmill.options import RowShape


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROMPT = "add_generation_prompt"
MOST_CHARACTERS = 1 << 20
"""Of a template."""
PARTS_AT_ONCE = 1 << 16
_TWO_ANSWERS = ("\ue000", "\ue001")


@dataclass(slots=True)
class Rendering:
    """The text of a conversation, and the places of the template's generation blocks in it."""

    text: str
    generated: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MessagePlaces:
    """Where the messages of a conversation begin, and what is written behind the last one."""

    places: list[int | None]
    """One more than there are messages: the end of the last. None for those before the loop."""
    tails: tuple[str, str]
    """Without the header of an answer to come, and with it."""


class ChatTemplate:
    """A compiled template with the strings that it is given besides the conversation."""

    def __init__(
        self, source: str, *, variables: Mapping[str, Any], date: datetime.date | None = None
    ) -> None:
        self.source = source
        self.variables = dict(variables)
        self.has_generation = GENERATION.search(source) is not None
        self.has_prompt = PROMPT in source
        """Whether it can write the header of an answer alone."""
        _check_date(source, date)
        if len(source) > MOST_CHARACTERS:
            raise self._refused(f"has {len(source):,} characters, more than {MOST_CHARACTERS:,}")
        self._environment = environment(date)
        try:
            tree = self._environment.parse(source)
            nodes = import_jinja().nodes
            self._texts = [node.data for node in tree.find_all(nodes.TemplateData)]
            constants = [node.value for node in tree.find_all(nodes.Const)]
            self._literals = [each for each in constants if isinstance(each, str)]
            self._template = self._environment.from_string(source)
            # A chain of dicts otherwise, which is copied entry by entry for every conversation.
            self._template.globals = dict(self._template.globals)
            self._root = self._template.root_render_func
        except import_jinja().TemplateSyntaxError as error:
            raise self._refused(
                f"is no valid Jinja: {error.message} (line {error.lineno})"
            ) from error
        except Exception as error:  # what Jinja and Python say to code that is too large or deep
            what = f"{type(error).__name__}: {error}"[:200]
            raise self._refused(f"is nested too deep, or too large ({what})") from error

    def _refused(self, why: str) -> TokenizerError:
        return TokenizerError(
            f"the chat template {why}", hint="correct it, or give another one: --chat-template FILE"
        )

    def render(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """The conversation's text; `prompt` adds the header of an answer to come."""
        return self._run(conversation, prompt=prompt, tracker=None)

    def render_tracked(self, conversation: Conversation) -> Rendering:
        """The conversation's text with the places of its generation blocks."""
        tracker = _Tracker()
        rendering = Rendering(self._run(conversation, prompt=False, tracker=tracker))
        for start, said in tracker.blocks:
            if not rendering.text.startswith(said, start):
                raise RowError(
                    RejectReason.TEMPLATE_ERROR,
                    "a generation block stands inside a macro or a variable, so its place in "
                    "the text is not known",
                )
            if said:
                rendering.generated.append((start, start + len(said)))
        return rendering

    def borders(self, conversation: Conversation, text: str) -> MessagePlaces | None:
        """Where each message begins in the text of the whole, by one rendering for all of them.

        That is where a rendering up to it would end, but for what is written behind all messages.
        None for templates of which that is not known: those that look ahead.
        """
        sandbox = self._environment
        if not sandbox.is_forward:
            return None
        tracker = _Tracker()
        seen: list[Any] = []

        def on_message(values: list[Any]) -> None:
            seen[:] = [values]
            tracker.note("")

        sandbox.on_message = on_message
        try:
            asked = self._run(conversation, prompt=True, tracker=tracker)
        finally:
            sandbox.on_message = None
        places = [place for place, _ in tracker.blocks]
        [values] = seen or [[]]
        skipped = len(conversation.messages) - len(values)
        if len(places) != len(values) + 1 or skipped < 0:
            return None
        # Whatever the loop is over, it must be these very messages, from one of them on.
        if not all(map(operator.is_, values, conversation.messages[skipped:])):
            return None
        if not text.startswith(asked[: places[-1]]):
            return None
        tails = text[places[-1] :], asked[places[-1] :]
        return MessagePlaces(places=[None] * skipped + places, tails=tails)

    @functools.cached_property
    def answer_header(self) -> str:
        """What an answer begins with whatever it says; an empty string where that is nothing.

        For templates that have no other way to tell: it is what two answers have in common.
        """
        question = {"role": "user", "content": "?"}
        talks = [
            Conversation([question, {"role": "assistant", "content": one}], None)
            for one in _TWO_ANSWERS
        ]
        try:
            before = self.render(Conversation([question], None))
            one, other = (self.render(talk) for talk in talks)
        except RowError:
            return ""
        pairs = enumerate(zip(one, other, strict=False))
        header = one[len(before) : next((place for place, (a, b) in pairs if a != b), len(one))]
        return header if one.startswith(before) and header.strip() else ""

    def constants(self) -> list[str]:
        """Every string that the template itself can write, but for its variables."""
        return [*self._texts, *self._literals]

    def literals(self) -> list[str]:
        """The strings of its expressions: what it writes, and what it looks for."""
        return self._literals

    def _run(self, conversation: Conversation, *, prompt: bool, tracker: _Tracker | None) -> str:
        parts: list[str] = []
        if tracker is not None:
            tracker.parts = parts
        sandbox = self._environment
        setattr(sandbox, TRACKED, tracker)
        sandbox.begin(conversation)
        values = self._values(conversation, prompt=prompt)
        try:
            written = self._root(self._template.new_context(values))
            seen = 0
            while True:
                parts.extend(itertools.islice(written, PARTS_AT_ONCE))
                sandbox.make(sum(map(len, parts[seen:] if seen else parts)))
                if len(parts) < seen + PARTS_AT_ONCE:
                    return "".join(parts)
                seen = len(parts)
        except TemplateLimit as error:
            raise RowError(RejectReason.TEMPLATE_ERROR, str(error)) from error
        except RecursionError as error:
            raise RowError(RejectReason.TEMPLATE_ERROR, "the template recurses too deep") from error
        except BuildError:
            raise
        except MemoryError as error:
            # Another machine has more, and would make another store.
            raise BuildError(
                "there is not enough memory to run the chat template on a row",
                hint="use fewer --workers, or a machine with more memory",
            ) from error
        except Exception as error:  # whatever the template's own code can raise
            what = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            raise RowError(
                RejectReason.TEMPLATE_ERROR, what + _without_content(conversation)
            ) from error
        finally:
            setattr(sandbox, TRACKED, None)

    def _values(self, conversation: Conversation, *, prompt: bool) -> dict[str, Any]:
        return {
            **self.variables,
            **conversation.variables,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,
            PROMPT: prompt,
        }


def _without_content(conversation: Conversation) -> str:
    """A likely reason why a template failed, as OpenAI's form has nulls beside calls of tools."""
    for place, message in enumerate(conversation.messages):
        if message.get("content") is None:
            return (
                f"; message {place} has no content (null), which the template may not expect: "
                "put an empty string there"
            )
    return ""


def tells_answers(source: str) -> bool:
    """Whether a template has a way to say where an answer begins."""
    return PROMPT in source or GENERATION.search(source) is not None


@dataclass(slots=True)
class _Tracker:
    """Where generation blocks begin: behind all that was written before."""

    parts: list[str] = field(default_factory=list)
    blocks: list[tuple[int, str]] = field(default_factory=list)
    _counted: int = 0
    _length: int = 0

    def note(self, said: str) -> None:
        self._length += sum(map(len, self.parts[self._counted :]))
        self._counted = len(self.parts)
        self.blocks.append((self._length, said))


def _check_date(source: str, date: datetime.date | None) -> None:
    used = "strftime_now" in source
    if used and date is None and not re.search(r"strftime_now\s+is\s+(not\s+)?defined", source):
        raise UsageError(
            "the chat template writes today's date, so the same command would make another store "
            "every day",
            hint="say which day it shall write: --chat-date 2024-07-26",
        )


# -------------------------------------------------------------------------------------------------
# Where a tokenizer's chat template is, and the names of special tokens that it may use.
#
# As transformers looks for it: `chat_template.jinja` beside the tokenizer goes before the member
# `chat_template` of tokenizer_config.json, which may be one template or several with names: of
# those `tool_use` is for conversations with tools, `default` for all others.

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
    templates = load_templates(info, date=shape.chat_date, kwargs=shape.template_kwargs)
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
