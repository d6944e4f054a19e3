"""Chat templates, rendered as transformers renders them.

A template sees what transformers gives it, with one exception: today's date, since a store may not
depend on the day it was made. `strftime_now` exists only where a date is given, and tells that one.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenmill.errors import BuildError, TokenizerError, UsageError
from tokenmill.records import RejectReason
from tokenmill.supervised.conversation import Conversation
from tokenmill.supervised.rows import RowError
from tokenmill.supervised.sandbox import TRACKED, TemplateLimit, environment, import_jinja

if TYPE_CHECKING:
    import datetime
    from collections.abc import Mapping

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
