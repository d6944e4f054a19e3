"""Chat templates, rendered as transformers renders them; the only home of Jinja.

A template is code of strangers: it runs in Jinja's sandbox, on plain values alone. It sees what
transformers gives it, with one exception: today's date, since a store may not depend on the day it
was made. `strftime_now` exists only where a date is given, and tells that one.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenmill.errors import MissingExtraError, TokenizerError, UsageError
from tokenmill.records import RejectReason
from tokenmill.supervised.conversation import Conversation
from tokenmill.supervised.rows import RowError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Mapping

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROMPT = "add_generation_prompt"
_TRACKED = "tokenmill_tracker"
_TWO_ANSWERS = ("\ue000", "\ue001")


@dataclass(slots=True)
class Rendering:
    """The text of a conversation, and the places of the template's generation blocks in it."""

    text: str
    generated: list[tuple[int, int]] = field(default_factory=list)


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
        self._environment = _environment(date)
        _check_date(source, date)
        jinja2 = _jinja2()
        try:
            self._tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
            # A chain of dicts otherwise, which is copied entry by entry for every conversation.
            self._template.globals = dict(self._template.globals)
            self._root = self._template.root_render_func
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template is no valid Jinja: {error.message} (line {error.lineno})",
                hint="correct it, or give another one: --chat-template FILE",
            ) from error

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
        nodes = _jinja2().nodes
        texts = [node.data for node in self._tree.find_all(nodes.TemplateData)]
        return [*texts, *self.literals()]

    def literals(self) -> list[str]:
        """The strings of its expressions: what it writes, and what it looks for."""
        found = self._tree.find_all(_jinja2().nodes.Const)
        return [node.value for node in found if isinstance(node.value, str)]

    def _run(self, conversation: Conversation, *, prompt: bool, tracker: _Tracker | None) -> str:
        parts: list[str] = []
        if tracker is not None:
            tracker.parts = parts
        setattr(self._environment, _TRACKED, tracker)
        values = self._values(conversation, prompt=prompt)
        try:
            parts.extend(self._root(self._template.new_context(values)))
        except RecursionError as error:
            raise RowError(RejectReason.TEMPLATE_ERROR, "the template recurses too deep") from error
        except Exception as error:  # whatever the template's own code can raise
            what = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            raise RowError(
                RejectReason.TEMPLATE_ERROR, what + _without_content(conversation)
            ) from error
        finally:
            setattr(self._environment, _TRACKED, None)
        return "".join(parts)

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


def _environment(date: datetime.date | None) -> Any:
    """Jinja as transformers sets it up."""
    jinja2 = _jinja2()
    environment = _sandbox()(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), jinja2.ext.loopcontrols],
    )
    setattr(environment, _TRACKED, None)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    if date is not None:
        environment.globals["strftime_now"] = date.strftime
    return environment


def _sandbox() -> Any:
    """Jinja's sandbox, with the two things that templates do most on a shorter way."""
    jinja2 = _jinja2()
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    methods = frozenset(dir(dict))
    note = _generation_extension()._note
    macro = jinja2.runtime.Macro

    class Sandbox(ImmutableSandboxedEnvironment):
        def getattr(self, obj: Any, attribute: str) -> Any:
            # A dict's attributes are looked at first, its members then: for most names at once.
            if type(obj) is dict and attribute in obj and attribute not in methods:
                return obj[attribute]
            return super().getattr(obj, attribute)

        def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            # A template's own macro is as safe as the template, and what notes blocks is ours.
            if type(__obj) is macro or getattr(__obj, "__func__", None) is note:
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                return __obj(*args, **kwargs)
            return super().call(__context, __obj, *args, **kwargs)

    return Sandbox


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would write < > & ' as escapes, for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _generation_extension() -> Any:
    """The tag that encloses what an assistant says, as transformers defines it."""
    jinja2 = _jinja2()
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_note")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _note(self, caller: Any) -> Any:
            said = caller()
            tracker = getattr(self.environment, _TRACKED)
            if tracker is not None:
                tracker.note(str(said))
            return said

    return GenerationBlocks


def _jinja2() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.runtime
    except ImportError as error:
        raise MissingExtraError(
            "jinja2", extra="chat", purpose="rendering chats with a chat template"
        ) from error
    return jinja2
