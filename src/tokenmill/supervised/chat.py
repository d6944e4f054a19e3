"""A conversation as text, with the special tokens that its template wrote and its loss mask.

In the mask is what the assistant said, its end token included. A template that marks it with
generation blocks is taken at its word. For the others the conversation is rendered up to each
answer, with the header of an answer after it, and again up to the end of that answer: what is
between is the answer. That holds only if both texts are beginnings of the whole, which is checked.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.engines.base import TokenizerInfo, TokenizerKind
from tokenmill.engines.load import CHAT_TEMPLATE, TokenizerFiles
from tokenmill.errors import TokenizerError, UsageError, importing
from tokenmill.files import PathInput, is_remote, shown
from tokenmill.options import CHAT_COMPLETION
from tokenmill.records import RejectReason
from tokenmill.supervised.pairs import read_chat_sides
from tokenmill.supervised.rows import (
    TOOL_ROLES,
    Conversation,
    RowError,
    RowText,
    read_completion,
    read_conversation,
)

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Collection, Iterator, Mapping

    from tokenmill.options import RowShape
    from tokenmill.supervised.rows import Range
    from tokenmill.supervised.sandbox import ChatTemplate


ALL, LAST = "all", "last"
# Of `--template-version`. A store of the first that has one names it after a colon.
TRAINING, OWN, PREFIX = "training", "own", "prefix"
# What the renderings may take together that look for the answers of a row, where a template looks
# ahead: there is one for each message, so that the time grows with the square of the messages.
STEPS_TOGETHER, STEPS_PER_CHARACTER = 16 << 20, 64

# Where a tokenizer's chat template is, and the names of special tokens that it may use.
#
# As transformers looks for it: `chat_template.jinja` beside the tokenizer goes before the member
# `chat_template` of tokenizer_config.json, which may be one template or several with names: of
# those `tool_use` is for conversations with tools, `default` for all others.

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


# Tokens that end a text in tokenizers that tell it from the end of a turn.
_ENDS_OF_TEXT = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<|end_of_document|>", "<|eos|>", "</s>", "<eos>"),
        *("<EOS_TOKEN>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)


# What tokens are called that end a turn, where there is no template to write them.
_ENDS_A_TURN = re.compile(
    r"im_end|eot_id|eom_id|end_of_turn|turn_end|<\|end\|>|<\|eot\|>", re.IGNORECASE
)


def ends_turns(files: TokenizerFiles, token: str) -> bool:
    """Whether a token ends turns of a chat, and no texts: the tokenizer's template writes it, or
    there is none and it is called so."""
    if token in _ENDS_OF_TEXT:
        return False
    try:
        sources = read_sources(with_template(files, None).files)
    except TokenizerError:  # it has no template
        return _ENDS_A_TURN.search(token) is not None
    return any(token in source for source in sources.values())


def ends_of_text(info: TokenizerInfo) -> list[str]:
    """The special tokens that end a text by their names."""
    return [token for token in info.special_tokens if token in _ENDS_OF_TEXT]


def digest(sources: Mapping[str, str]) -> str:
    """sha256 of templates, for a store's identity."""
    return hashlib.sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()


def version_used(sources: Mapping[str, str], shape: RowShape) -> str | None:
    """How templates are used that may write an answer in another way once more is said.

    None where there is no such template, or where such chats are to be rejected.
    """
    with _importing_jinja():
        from tokenmill.supervised.sandbox import looks_ahead
    if shape.train_on == ALL or shape.template_version == PREFIX or shape.format != "chat":
        return None
    if not any(map(looks_ahead, sources.values())):
        return None
    known = filter(None, (_known_version(source, shape) for source in sources.values()))
    return next((f"{TRAINING}:{name}" for name in known), OWN)


def _known_version(source: str, shape: RowShape) -> str | None:
    from tokenmill.supervised.sandbox import training_version

    is_wanted = shape.template_version == TRAINING and shape.format == "chat"
    # The last answer alone is what its own template makes of all that is said.
    return training_version(source) if is_wanted and shape.train_on not in (ALL, LAST) else None


def _importing_jinja() -> contextlib.AbstractContextManager[None]:
    return importing("jinja2", extra="chat", purpose="rendering chats with a chat template")


def load_templates(
    info: TokenizerInfo, shape: RowShape, *, versions: bool = False
) -> dict[str, ChatTemplate]:
    """Compile a tokenizer's templates, by name; with `versions` the training versions of those
    that are to be used so."""
    with _importing_jinja():
        from tokenmill.supervised.sandbox import ChatTemplate
    # `eos_token` and the like, as the tokenizer's own files name them; then the row shape's own.
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
        **json.loads(shape.template_kwargs or "{}"),
    }
    date = shape.chat_date
    try:
        day = None if date is None else datetime.date.fromisoformat(date)
    except ValueError as error:
        what = f"chat_date={date!r} is not a day"
        raise UsageError(what, hint="write it as 2024-07-26") from error
    return {
        name: ChatTemplate(
            source,
            variables=variables,
            date=day,
            version=_known_version(source, shape) if versions else None,
        )
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
    header = load_templates(info, shape)[doubtful[0]].answer_header
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


# Conversations as texts, and the ranges of them that are in the loss mask.


class ChatMaker:
    """Makes texts of conversations."""

    def __init__(self, info: TokenizerInfo, shape: RowShape) -> None:
        self._specials = special_tokens_of(info)
        self._shape = shape
        self._train_on, self._field = shape.train_on, shape.messages_field
        self._finds = shape.template_version != PREFIX
        self._completion: tuple[str, str] | None = None
        if shape.format == CHAT_COMPLETION:
            self._completion = shape.prompt_field, shape.completion_field
        originals = load_templates(info, shape)
        # Those that are used in their own version are not compiled twice.
        templates = {
            name: template
            for name, template in load_templates(info, shape, versions=True).items()
            if template.version is not None
        }
        self._originals = {name: originals[name] for name in templates}
        self._templates = {
            name: (template, Provenance(template, self._specials.tokens))
            for name, template in (originals | templates).items()
        }

    def __call__(self, row: dict[str, Any]) -> RowText:
        """The text of a row's conversation."""
        if self._completion is not None:
            return self._completed(row, *self._completion)
        conversation = read_conversation(row, self._field)
        turns = conversation.assistant_turns
        if not turns:
            raise RowError(RejectReason.NO_ASSISTANT_TURN, "no message has the role assistant")
        name = self._name_of(conversation)
        template, provenance = self._templates[name]
        generated = None
        if template.has_generation and self._train_on != ALL:
            text, generated = template.render_tracked(conversation)
        elif template.version is not None:
            text, places = template.render_placed(conversation)
            _check_version(self._originals[name], conversation, text, places)
            generated = _found(template, conversation, text, places)
            if generated is None:
                what = "the template's training version writes an answer in an unknown way"
                raise RowError(RejectReason.NOT_A_PREFIX, f"{what}; use --template-version own")
        else:
            text = template.render(conversation)
        cut = self._specials.cut(text, provenance.without_doubt(conversation, text))
        if self._train_on == ALL:
            ranges = [(0, len(text))]
        elif generated is None:
            specials = self._specials.places(cut)
            try:
                ranges = self._answers(template, conversation, text, specials)
            except RowError as error:
                if error.reason is not RejectReason.NOT_A_PREFIX or not self._finds:
                    raise
                again, places = template.render_placed(conversation)
                found = _found(template, conversation, text, places) if again == text else None
                if found is None:
                    raise
                found = found[-1:] if self._train_on == LAST else found
                ranges = [_without_space(each, text, specials) for each in found]
        elif self._train_on == LAST and len(generated) == len(turns):
            ranges = generated[-1:]
        elif self._train_on == LAST and len(generated) > 1:
            before = template.render_tracked(_head(conversation, turns[-1]))[1]
            ranges = generated[len(before) :]
        else:
            ranges = generated
        return RowText(text, ranges, cut)

    def _name_of(self, conversation: Conversation) -> str:
        has_tools = conversation.tools is not None and WITH_TOOLS in self._templates
        return WITH_TOOLS if has_tools else DEFAULT

    def _completed(self, row: dict[str, Any], prompt_field: str, completion_field: str) -> RowText:
        """The text of a prompt and its completion; all that follows the prompt counts."""
        conversation, count = read_completion(row, prompt_field, completion_field)
        template, provenance = self._templates[self._name_of(conversation)]
        text = template.render(conversation)
        before = template.render(_head(conversation, count), prompt=True)
        if not text.startswith(before):
            what = "the template writes the prompt in another way once it is answered"
            raise RowError(RejectReason.NOT_A_PREFIX, what)
        start = len(before)
        if not template.has_prompt and text.startswith(template.answer_header, start):
            start += len(template.answer_header)
        cut = self._specials.cut(text, provenance.without_doubt(conversation, text))
        return RowText(text, [(start, len(text))] if start < len(text) else [], cut)

    def sides(self, row: dict[str, Any]) -> list[RowText]:
        """A pair: the prompt with the header of an answer, and both sides with it, whole."""
        pair, found = read_chat_sides(row, self._shape), list[RowText]()
        template, provenance = self._templates[self._name_of(pair.chosen)]
        before = template.render(_head(pair.chosen, pair.prompt), prompt=True)
        if not template.has_prompt:
            before += template.answer_header
        for conversation in (pair.chosen, pair.rejected):
            text = template.render(conversation)
            if not text.startswith(before):
                what = "the template writes the prompt in another way once it is answered"
                raise RowError(RejectReason.NOT_A_PREFIX, what)
            checked = provenance.without_doubt(conversation, text)
            if not found:
                size = len(before)
                found.append(RowText(before, (), self._specials.cut(before, checked[:size])))
            found.append(RowText(text, (), self._specials.cut(text, checked)))
        return found

    def _answers(
        self, template: ChatTemplate, conversation: Conversation, text: str, specials: list[Range]
    ) -> list[Range]:
        """Ranges of the answers, by rendering what comes before and up to each of them."""
        turns = conversation.assistant_turns
        turns = turns[-1:] if self._train_on == LAST else turns
        # For one answer it would save nothing.
        boundaries = template.boundaries(conversation, text) if len(turns) > 1 else None
        left = STEPS_TOGETHER + STEPS_PER_CHARACTER * len(text)

        def place(count: int, *, prompt: bool) -> int:
            """Where so many messages end in the text of the whole."""
            nonlocal left
            known = boundaries.places[count] if boundaries is not None and count else None
            if boundaries is not None and known is not None:
                tail = boundaries.tails[prompt]
                if text.startswith(tail, known):
                    return known + len(tail)
            else:
                beginning = template.render(_head(conversation, count), prompt=prompt)
                left -= template.steps
                if left < 0:
                    what = (
                        f"the template looks ahead, and to find {len(turns):,} answers takes over "
                        f"{STEPS_TOGETHER:,} steps and {STEPS_PER_CHARACTER} for each character; "
                        "use --train-on last"
                    )
                    raise RowError(RejectReason.TEMPLATE_ERROR, what)
                if text.startswith(beginning):
                    return len(beginning)
            what = (
                f"the template writes message {count if prompt else count - 1} in another way once "
                "more is said, as if it dropped reasoning: its answer is not found; use --train-on "
                "last"
            )
            if self._train_on == LAST:
                what = (
                    "what comes before the last answer is written in another way once it is there, "
                    "so it cannot be found; use a template with generation blocks"
                )
            raise RowError(RejectReason.NOT_A_PREFIX, what)

        ranges = []
        for turn in turns:
            start = place(turn, prompt=True)
            if not template.has_prompt and text.startswith(template.answer_header, start):
                start += len(template.answer_header)
            is_last = turn + 1 == len(conversation.messages)
            end = len(text) if is_last else place(turn + 1, prompt=False)
            if start < end:
                ranges.append(_without_space((start, end), text, specials))
        return ranges


def _without_space(answer: Range, text: str, specials: list[Range]) -> Range:
    """An answer without the white space that follows its end token."""
    start, end = answer
    last = bisect.bisect_right(specials, end, key=lambda one: one[1]) - 1
    if last < 0 or specials[last][0] < start:
        return answer
    own_end = specials[last][1]
    return (start, end) if text[own_end:end].strip() else (start, own_end)


def _found(
    template: ChatTemplate, conversation: Conversation, text: str, places: list[int | None]
) -> list[Range] | None:
    """Ranges of the answers by what the template wrote of each message: all but its marker.

    None where it does not begin with the marker, or has not what the message says.
    """
    marker = template.marker
    if not places or not marker:
        return None
    ranges = []
    for number, message in enumerate(conversation.messages):
        # Nor may what a tool says be in an answer: such a template writes it there ahead.
        if message["role"] in TOOL_ROLES:
            own = text[places[number] or 0 : places[number + 1] or 0]
            said = message.get("content")
            if not own or (isinstance(said, str) and said.strip() not in own):
                return None
    for turn in conversation.assistant_turns:
        start, end = places[turn], places[turn + 1]
        if start is None or end is None:
            return None
        if turn + 1 == len(conversation.messages) and template.version is None:
            end = len(text)
        start += end - start - len(text[start:end].lstrip())
        if not text.startswith(marker, start, end):
            return None
        start += len(marker)
        content = conversation.messages[turn].get("content")
        said = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
        if text.find(said, start, end) < 0:
            return None
        if start < end:
            ranges.append((start, end))
    return ranges


def _check_version(
    original: ChatTemplate, conversation: Conversation, text: str, places: list[int | None]
) -> None:
    """Raise unless a training version wrote what the template itself writes, and in answers one
    piece more that it leaves out."""
    whole, own = original.render_placed(conversation)
    parts, theirs = _parts(text, places), _parts(whole, own)
    is_same = bool(places) and len(parts) == len(theirs)
    turns = {turn + 1 for turn in conversation.assistant_turns}  # the first part is before them all
    for number, (part, other) in enumerate(zip(parts, theirs, strict=False)):
        if part == other or not is_same:
            continue
        before = common_start(part, other)
        after = common_start(part[before:][::-1], other[before:][::-1])
        is_same = number in turns and before > 0 and before + after == len(other)
    if not is_same:
        what = (
            "the template's training version writes more of this conversation in another way than "
            "the reasoning of answers; use --template-version own"
        )
        raise RowError(RejectReason.NOT_A_PREFIX, what)


def common_start(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _parts(text: str, places: list[int | None]) -> list[str]:
    """A text cut where messages begin, and at the end of the last."""
    bounds = [0, *(place or 0 for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def _head(conversation: Conversation, count: int) -> Conversation:
    return Conversation(conversation.messages[:count], conversation.tools, conversation.variables)


# The special tokens of a tokenizer as a chat needs them: where they are, and what they swallow.
#
# `tokenizers` looks for added tokens from the left and takes the longest one at each place, before
# anything else is done with a text; some of them take the white space beside them too. The text
# between two of them is then normalized, split and encoded by itself. That is why a text can be
# cut at its special tokens without a seam.

# Unicode's White_Space, which is not quite Python's \s.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LEFT = re.compile(f"[{_SPACE}]*\\Z")
_RIGHT = re.compile(f"[{_SPACE}]*")


# What a piece is if it is no special token: text, or white space that a token beside it takes.
PLAIN, SWALLOWED = -1, -2


class PieceCut(NamedTuple):
    """A row's text, cut at its special tokens."""

    strings: list[str]  # back to back they are the text
    kinds: list[int]  # of each: the id of a special token, PLAIN or SWALLOWED


class SpecialToken(NamedTuple):
    """A special token's id, and whether it takes the white space beside it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Found(NamedTuple):
    """A special token in a text: its own string, and all that it takes with it."""

    start: int
    end: int
    id: int
    own_start: int
    own_end: int


class ChatSpecials:
    """Finds special tokens in a text as the tokenizer itself would."""

    def __init__(
        self, tokens: Mapping[str, SpecialToken], others: Mapping[str, SpecialToken] | None = None
    ) -> None:
        """`others` are added tokens that are not special, and may be in the way of one that is."""
        self.tokens = dict(tokens)
        added = self.tokens | dict(others or {})
        self._pattern = re.compile(f"({_any_of(sorted(added)) or '(?!)'})")
        self._special_ids = {token.id for token in self.tokens.values()}
        self._ids = {name: token.id for name, token in added.items()}
        self._is_plain = not any(token.lstrip or token.rstrip for token in added.values())

    def cut(self, text: str, checked: str) -> PieceCut:
        """The text in pieces; `checked` is as long and has only the tokens that are meant."""
        if self._is_plain:
            # Added tokens that are not special are themselves wherever they are.
            strings = self._pattern.split(checked)
            kinds = [PLAIN] * len(strings)
            kinds[1::2] = [self._ids[name] for name in strings[1::2]]
            if text is checked:
                return PieceCut(strings, kinds)
            bounds = [0, *itertools.accumulate(map(len, strings))]
        else:
            bounds, kinds = [0], []
            for one in self.find(checked):
                bounds += (one.start, one.own_start, one.own_end, one.end)
                kinds += (PLAIN, SWALLOWED, one.id, SWALLOWED)
            bounds.append(len(text))
            kinds.append(PLAIN)
        return PieceCut([text[a:b] for a, b in itertools.pairwise(bounds)], kinds)

    def places(self, cut: PieceCut) -> list[Range]:
        """Where the special tokens of a text are, and no other added ones."""
        ends = [0, *itertools.accumulate(map(len, cut.strings))]
        special = [place for place, kind in enumerate(cut.kinds) if kind in self._special_ids]
        return [(ends[place], ends[place + 1]) for place in special]

    def find(self, text: str) -> list[Found]:
        """The special tokens of the text, from left to right."""
        found: list[Found] = []
        for match in self._pattern.finditer(text):
            token = self.tokens.get(match[0])
            if token is None:
                continue
            start, end = match.span()
            floor = found[-1].end if found else 0
            if token.lstrip and (space := _LEFT.search(text, floor, start)):
                start = space.start()
            if token.rstrip and (space := _RIGHT.match(text, end)):
                end = space.end()
            start = max(start, floor)
            if start < end:
                found.append(Found(start, end, token.id, *match.span()))
        return found


def _any_of(names: list[str]) -> str:
    """A pattern for any of the names, the longest that fits first: shared beginnings once.

    The names are sorted. One by one they would all be tried at every `<` of a text.
    """
    branches = []
    for first, group in itertools.groupby(filter(None, names), key=lambda name: name[0]):
        rest = [name[1:] for name in group]
        inner = _any_of(rest)
        if inner:
            # A name that ends here is taken only where none that goes on does.
            inner = f"(?:{inner})?" if "" in rest else f"(?:{inner})"
        branches.append(re.escape(first) + inner)
    return "|".join(branches)


def special_tokens_of(info: TokenizerInfo) -> ChatSpecials:
    """The special tokens of a tokenizer; refused where a text cannot be cut at them."""
    if info.kind is not TokenizerKind.HUGGINGFACE:
        return ChatSpecials({name: SpecialToken(id_) for name, id_ in info.special_tokens.items()})
    special: dict[str, SpecialToken] = {}
    others: dict[str, SpecialToken] = {}
    for token in info.added_tokens:
        content, is_word = token["content"], bool(token.get("single_word"))
        refused = "is matched as a single word only" if is_word else None
        if not is_word and token.get("normalized") and info.has_normalizer:
            refused = "is looked for in normalized text"
        if token.get("special") and refused:
            raise TokenizerError(
                f"the special token {content!r} of this tokenizer {refused}; a chat is cut at its "
                "special tokens before it is normalized",
                hint='set "normalized" and "single_word" to false for it in tokenizer.json',
            )
        # One that is only found as a word by itself is left to the engine, as one that strips.
        strips = [is_word or bool(token.get(side)) for side in ("lstrip", "rstrip")]
        if content and (token.get("special") or not token.get("normalized")):
            known = special if token.get("special") else others
            known[content] = SpecialToken(int(token["id"]), *strips)
    return ChatSpecials(special, others)


# Special tokens that a template wrote, and strings in messages that only look like them.

_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]+\Z")
# Words that templates compare with; alone they are part of no message.
KNOWN_WORDS = {"text", "function", "tool", "object", "string", "integer", "number", "boolean"}
KNOWN_WORDS |= {"array", "null", "image", "video", "audio"}
# Below these the names are the dataset's own, not the template's.
_FREE_KEYS = frozenset(("arguments", "properties"))
_Doubles = list[tuple[str, str]]


class Provenance:
    """Which special tokens of a rendered chat the template wrote, and which only look like it.

    A message may hold the string of a special token, or a part of one that the next piece of text
    would complete. Neither may become the token. So a chat in which that is possible is rendered
    twice: as it is, and with a double in the place of every character of its messages that a
    special token could be made of. A double is a private character of equal length that means
    nothing to anyone. If the two texts are equal but for the doubles, the template did the same
    both times, and whatever special tokens the second text still has are made of the template's own
    characters. If they are not equal, nobody can tell, and the row is rejected.

    Which characters get doubles: of every special token one that the template supplies in no other
    way than by the token itself, so that it must come from a message if any part of the token does;
    as rare a one as there is. Where the template has pieces with all of them, the first and the
    last character of the token; and where it has both ends as pieces, as `<|` and `|>` around a
    name, every character. Strings that a template looks for in messages, such as `</think>`, stay
    as they are, since it would not find them otherwise; none of them can share a character with a
    special token.
    """

    def __init__(self, template: ChatTemplate, specials: Collection[str]) -> None:
        self._template = template
        constants = {*template.constants, *_strings(list(template.variables.values()))}
        risky = {one: _risky_characters(one, constants) for one in specials}
        # Whether letters matter, and so the names that a dataset gives to things.
        self.composes = any(characters == set(one) for one, characters in risky.items())
        self._risky = {each for some in risky.values() for each in some if not each.isspace()}
        self._sought = _sought_strings(template.literals, specials, self._risky)
        letters = re.escape("".join(sorted(self._risky)))
        self._usual = [
            (character, chr(_FIRST_PRIVATE + number))
            for number, character in enumerate(sorted(self._risky))
        ]
        self._search = re.compile(f"[{letters}]" if letters else "(?!)").search

    def without_doubt(self, conversation: Conversation, text: str) -> str:
        """A text of equal length whose special tokens are all the template's: the text itself,
        if no message has a character for them, or else the text with doubles."""
        if not self._risky or not self._is_suspicious(conversation):
            return text
        table = self._doubles(conversation, text)
        disguised = Conversation(
            [self._disguise(each, table, kept="role") for each in conversation.messages],
            None if conversation.tools is None else self._disguise(conversation.tools, table),
            self._disguise(conversation.variables, table),
        )
        try:
            second = self._template.render(disguised)
        except RowError:
            second = None
        if second is None or _replaced(second, [(b, a) for a, b in table]) != text:
            raise RowError(
                RejectReason.SPECIAL_TOKEN,
                "the template makes another text of its messages when their special characters are "
                "replaced, so its own special tokens cannot be told from theirs",
            )
        return second

    def _is_suspicious(self, conversation: Conversation) -> bool:
        search = self._search
        nested: list[Any] = [] if conversation.tools is None else [conversation.tools]
        if conversation.variables:
            nested.append(conversation.variables)
        for message in conversation.messages:
            for key, value in message.items():
                if key == "role":
                    continue
                if type(value) is not str:
                    nested.append(value)
                elif search(value) is not None:
                    return True
                if key != "content" and not _IDENTIFIER.match(key):
                    nested.append(key)
        return any(search(text) is not None for text in _strings(nested))

    def _doubles(self, conversation: Conversation, text: str) -> _Doubles:
        """A private character for each risky one, none of which the row has already."""
        values = (conversation.messages, conversation.tools, conversation.variables)
        strings = [text, *_strings(values)]
        if all(one.isascii() or max(one) < chr(_FIRST_PRIVATE) for one in strings):
            return self._usual
        used = set().union(*strings)
        free = (
            chr(point) for point in range(_FIRST_PRIVATE, _LAST_PRIVATE) if chr(point) not in used
        )
        try:
            return [(character, next(free)) for character in sorted(self._risky)]
        except StopIteration:
            raise RowError(
                RejectReason.SPECIAL_TOKEN, "the row uses up the private characters of Unicode"
            ) from None

    def _disguise(
        self, value: Any, table: _Doubles, *, free: bool = False, kept: str | None = None
    ) -> Any:
        """The value with doubles; `kept` is the name of a member that stays as it is."""
        if isinstance(value, str):
            return value if value in KNOWN_WORDS else self._double(value, table)
        if isinstance(value, list):
            return [self._disguise(entry, table) for entry in value]
        if not isinstance(value, dict):
            return value
        names = free and self.composes
        return {
            (key if _IDENTIFIER.match(key) and not names else self._double(key, table)): (
                entry if key == kept else self._disguise(entry, table, free=key in _FREE_KEYS)
            )
            for key, entry in value.items()
        }

    def _double(self, text: str, table: _Doubles) -> str:
        if self._sought is None:
            return _replaced(text, table)
        # Every second part is a string that the template looks for.
        parts = self._sought.split(text)
        return "".join(
            part if number % 2 else _replaced(part, table) for number, part in enumerate(parts)
        )


def _replaced(text: str, pairs: _Doubles) -> str:
    # A search for one character is so fast that a table for all of them would be slower.
    for old, new in pairs:
        if old in text:
            text = text.replace(old, new)
    return text


def _strings(value: Any) -> Iterator[str]:
    """Every string of a row, the names of nested values too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if not _IDENTIFIER.match(key):
                yield key
            yield from _strings(entry)


def _sought_strings(
    literals: Collection[str], specials: Collection[str], risky: Collection[str]
) -> re.Pattern[str] | None:
    """Strings with risky characters that a template may look for, and that no token can share
    a character with."""
    heads = tuple(head for special in specials for head in _heads(special))
    tails = tuple(tail for special in specials for tail in _tails(special))
    sought = {
        text
        for text in literals
        if any(character in text for character in risky)
        and not (text.endswith(heads) or text.startswith(tails))
        and not any(text in special or special in text for special in specials)
    }
    longest_first = sorted(sought, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if sought else None


def _heads(special: str) -> tuple[str, ...]:
    return tuple(special[:i] for i in range(1, len(special)))


def _tails(special: str) -> tuple[str, ...]:
    return tuple(special[i:] for i in range(1, len(special)))


def _risky_characters(special: str, constants: Collection[str]) -> set[str]:
    """Characters without which no message can have a part in the special token."""
    pieces, heads, tails = set(), _heads(special), _tails(special)
    has_head = has_tail = False
    for text in constants:
        if text and text != special and text in special:
            pieces.add(text)
        if text.endswith(heads):
            has_head = True
            pieces |= {head for head in heads if text.endswith(head)}
        if text.startswith(tails):
            has_tail = True
            pieces |= {tail for tail in tails if text.startswith(tail)}
    # Letters and numbers can also come from roles and from numbers, which are no messages.
    candidates = [
        character
        for character in special
        if not (character.isalnum() or character.isspace() or character in "+-.")
        and not any(character in piece for piece in pieces)
    ]
    if candidates:
        # How much of a character is to be expected in messages: code has all of ASCII.
        order = "|[]<>{}()/_"
        return {min(candidates, key=lambda one: order.find(one) % 1000 if one.isascii() else -1)}
    return set(special) if has_head and has_tail else {special[0], special[-1]}
