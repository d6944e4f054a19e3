"""What a user may ask for, declared once: name, type, default, flag, help and check of each option.

A verb has one class of options (`BuildOptions` here, `TrainOptions` beside the trainer). Python
takes its fields as keywords (`with_options`), the command line makes its flags of them
(`cli.options.with_flags`), and the same object travels to the code that uses a value. To add an
option, add a field, and read it where it matters.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import os
import re
import shlex
import sys
from dataclasses import MISSING, dataclass, field, fields
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

from tokenmill.engines import AUTO, engine_names
from tokenmill.errors import UsageError, abridged
from tokenmill.where import parse
from tokenmill.words import listed, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tokenmill.builder.progress import Progress
    from tokenmill.files import PathInput
    from tokenmill.store.reader import Store

Given = ParamSpec("Given")
Options = TypeVar("Options")
Result = TypeVar("Result")

# Headings of the help.
NEEDED = "Needed"
TEXT = "What is read"
SHAPE = "What a row is"
TOKENS = "What becomes a token"
SPEED = "What may be used"
MACHINES = "More than one machine"
RERUN = "Running again"
OUTPUT = "What is shown"
WRITTEN = "How files are written"
COMPARED = "What rows are compared with"
MODEL = "What they are for"
READ = "What is read of the loader"
# How documents share rows; each is a class in loader/packing.py. The first is the default.
PACKINGS = {
    "concat": "all documents end to end, cut where a row is full",
    "best-fit": "whole documents, least padding",
    "pad": "one document to a row",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """How the command line shows an option. The help is the string below the field."""

    panel: str
    metavar: str | None = None
    flag: str | None = None  # where it is not called as the option
    short: str | None = None
    choices: tuple[str, ...] = ()
    shown: str | bool = True  # what the help says of the default
    kind: object = None  # the type of the flag's value, where it is not the option's
    off: str | None = None  # another flag, which says False
    off_help: str = ""
    help: str | None = None  # where it is made of other things than words
    least: int | None = None  # the smallest value
    answer: Any = None  # a function that answers the flag before anything else is looked at
    like: type | None = None  # the class that has the field, where it is declared by `same`


def option(default: Any, panel: str, metavar: str | None = None, **how: Any) -> Any:
    """A field with a flag; a field without this is for Python alone."""
    return field(default=default, metadata={"flag": Flag(panel=panel, metavar=metavar, **how)})


def flags_of(options: type) -> dict[str, Flag]:
    """The options that have flags, by their names."""
    return {each.name: each.metadata["flag"] for each in fields(options) if "flag" in each.metadata}


@functools.cache
def _classes_of(module: str) -> dict[str, list[ast.stmt]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:  # installed without its source: flags, and no words for them
        return {}
    return {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}


def help_of(options: type) -> dict[str, str]:
    """What each option is for: the strings below the fields, which only the source has."""
    found: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        for above, below in itertools.pairwise(_classes_of(base.__module__).get(base.__name__, [])):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return {
        name: flag.help or (help_of(flag.like) if flag.like else found).get(name, "")
        for name, flag in flags_of(options).items()
    }


def check_choices(options: object) -> None:
    """UsageError where an option is none of its choices."""
    for name, flag in flags_of(type(options)).items():
        value = getattr(options, name)
        if flag.choices and value not in flag.choices:
            hint = f"use one of: {', '.join(flag.choices)}"
            raise UsageError(f"{name}={value!r} is not known", hint=hint)


LISTENERS = ("on_progress", "on_step")
"""What hears how far a work has come. Where none is given, a notebook or a terminal shows it."""


def unheard(*_: object) -> None:
    """A listener for who wants nothing shown."""


def is_watched() -> bool:
    """Whether somebody looks on: in a notebook, or at a terminal."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook: asked of IPython, if it is there already."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def with_options(
    kind: Callable[Given, Options],
) -> Callable[[Callable[[Options], Result]], Callable[Given, Result]]:
    """Let a function of a class of options be called with the options themselves."""

    def decorate(function: Callable[[Options], Result]) -> Callable[Given, Result]:
        signature = inspect.signature(kind)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        hears = next((name for name in LISTENERS if name in signature.parameters), None)

        @functools.wraps(function)
        def call(*args: Given.args, **given: Given.kwargs) -> Result:
            known = sorted(signature.parameters)
            for name in () if takes_any else sorted(set(given) - set(known)):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known)}"
                raise UsageError(f"{function.__name__} has no option {name}", hint=hint)
            try:
                signature.bind(*args, **given)
            except TypeError as error:  # it would be told of the class of options
                raise TypeError(f"{function.__name__}: {error}") from None
            with abridged:
                if hears is None or given.get(hears) is not None or not is_watched():
                    return function(kind(*args, **given))
                from tokenmill.notebook import watch

                with watch(function.__name__) as given[hears]:
                    return function(kind(*args, **given))

        call.__signature__ = signature  # type: ignore[attr-defined]
        _CLASSES.append(inspect.unwrap(kind))
        return call

    return decorate


def with_settings(
    kind: Callable[..., Options],
) -> Callable[[Callable[[Options], Result]], Callable[..., Result]]:
    """The same, where any other name is one of the `settings` of a format."""
    signature = inspect.signature(kind)
    known = {name: each for name, each in signature.parameters.items() if name != "settings"}

    def gather(*args: Any, **given: Any) -> Options:
        settings = {name: given.pop(name) for name in [*given] if name not in known}
        return kind(*args, **given, settings=settings)

    others = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)
    gather.__signature__ = signature.replace(parameters=[*known.values(), others])  # type: ignore[attr-defined]
    gather.__wrapped__ = kind  # type: ignore[attr-defined]
    return with_options(gather)


def globs_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Globs as a tuple, where one alone or none may be given."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def as_list(inputs: PathInput | Iterable[PathInput]) -> list[PathInput]:
    """Inputs as a list, where one alone may be given too."""
    return [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)


def same(options: type, name: str, *, panel: str | None = None) -> Any:
    """A field declared as another class has it: the same default, flag and help."""
    (found,) = (each for each in fields(options) if each.name == name)
    flag = dataclasses.replace(found.metadata["flag"], like=options)
    flag = dataclasses.replace(flag, panel=panel or flag.panel)
    return field(default=found.default, metadata={"flag": flag})


# -------------------------------------------------------------------------------------------------
# What errors say in the words of the command line, in those of Python: `--out` is `out=`,
# `--seq-len 2048` is `seq_len=2048`, and `tokenmill verify STORE` is `tokenmill.verify(STORE)`.
#
# A word after a flag is its value, unless it is one with which a sentence goes on. Strings of
# others stand in quotes, and stay; so do flags that no option has, which are other programs'.

_CLASSES: list[Any] = []  # of the verbs that were imported
_QUOTED = r"'[^']*'|\"[^\"]*\""
_WORD = re.compile(rf""" ((?:{_QUOTED}|[^\s;,`'"()]|,(?=\S))+)""")
_SAID = re.compile(
    rf"(?<![\w'\"-])(?:(?:{_QUOTED})(?!\w)|tokenmill (?P<verb>[a-z]+)\b|(?P<flag>--[a-z][\w-]*))"
)
_GOES_ON = frozenset(
    re.findall(
        r"\w+",
        "a and are asks both compares could for in is left names of on or out says then to when"
        " which with",
    )
)


class _Named(NamedTuple):
    """What a flag is to Python."""

    name: str
    bare: str | None  # its value where the flag has none: True or False


@functools.cache
def _named_flags(classes: int) -> dict[str, _Named]:
    """Of all options that are known when so many classes are."""
    known = [each for each in globals().values() if isinstance(each, type)]
    found = {"--link-or-copy": _Named("link", "'if-possible'"), "--set": _Named("", None)}
    for options in (*filter(dataclasses.is_dataclass, known), *_CLASSES[:classes]):
        for each in fields(options):
            if (flag := each.metadata.get("flag")) is None:
                continue
            kind = flag.kind or each.type
            bare = "True" if kind in (bool, bool | None, "bool", "bool | None") else None
            on, _, off = (flag.flag or f"--{each.name.replace('_', '-')}").partition("/")
            for name in filter(None, (on, flag.short)):
                if name not in found or name == f"--{each.name}":
                    found[name] = _Named(each.name, bare)
            for name in filter(None, (off, flag.off)):
                found.setdefault(name, _Named(each.name, "False"))
    return found


def in_python(text: str) -> str:
    """A sentence of an error in the words of Python."""
    public = sys.modules["tokenmill"].__all__
    known, said, at = _named_flags(len(_CLASSES)), [], 0
    while (found := _SAID.search(text, at)) is not None:
        before, at = text[at : found.start()], found.end()
        said.append(before)
        verb = found["verb"] and found["verb"] + "_" * iskeyword(found["verb"])
        if found["flag"] in known:
            leaves = before.endswith(("leave ", "leave out ", "without "))
            words, at = _as_keyword(text, found["flag"], at, known, leaves=leaves)
        elif verb in public:
            begins = not before.rstrip("`") or before.endswith((": ", "`", "\n    "))
            called, at = _as_call(text, at, known, begins=begins)
            words = found[0] if called is None else f"tokenmill.{verb}{called}"
        else:
            words = found[0]
        said.append(words)
    return "".join((*said, text[at:]))


def _as_keyword(
    text: str,
    flag: str,
    at: int,
    known: Mapping[str, _Named],
    *,
    leaves: bool = False,
    goes_on: frozenset[str] = _GOES_ON,
) -> tuple[str, int]:
    """`name=value` of a flag, or `name=` where it is only named; and where the text goes on."""
    name, bare = known[flag]
    word = _WORD.match(text, at)
    following = word[1].rstrip(".:") if word else ""
    if bare is not None:
        is_named = leaves or following == "out"
        return (f"{name}=" if is_named else f"{name}={bare}"), at
    if word is None or following in goes_on or following.startswith("-"):
        return f"{name}=", at
    if following.startswith("...") or not following:
        return f"{name}=...", word.end()
    end = word.start(1) + len(following)
    if flag == "--set":  # a setting of a format is a keyword of its own
        name, _, following = following.partition("=")
    return f"{name}={_literal(following)}", end


def _as_call(
    text: str, at: int, known: Mapping[str, _Named], *, begins: bool
) -> tuple[str | None, int]:
    """The arguments of a command that is to be typed, or nothing where it is only spoken of.

    None where the command can do what Python cannot.
    """
    given: list[str] = []
    start = at
    while (word := _WORD.match(text, at)) is not None:
        following = word[1].rstrip(":")
        if following in known:
            keyword, at = _as_keyword(text, following, word.end(), known, goes_on=frozenset())
            given.append(keyword)
            continue
        is_plain = re.fullmatch(r"[a-z]+[.:]?", following) is not None
        if following.startswith("-"):
            return None, start
        if following in _GOES_ON or (is_plain and not begins):
            break
        ends = "..." if following.endswith("...") else ""  # and more of the kind
        following = following.rstrip(".")
        given.append(_literal(following) if following else ends)
        at = word.start(1) + len(following + ends)
        if word[1].endswith(":"):
            break
    return (f"({', '.join(given)})" if given else ""), at


def _literal(word: str) -> str:
    """A word of the command line as Python writes it; what stands for a value stays."""
    if re.fullmatch(r"[A-Z]+|-?\d+(\.\d+)?(e\d+)?", word):
        return word
    try:
        return repr("".join(shlex.split(word)))
    except ValueError:  # a quote that is not closed
        return repr(word)


# -------------------------------------------------------------------------------------------------
# The options of `build`.

# What a chat template is given by us, and so cannot be given by anyone else.
TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def check_template_kwargs(values: object) -> dict[str, Any]:
    """Variables for a chat template; ValueError says why they are none."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    for name in values:
        if not name.isidentifier() or name in TEMPLATE_VARIABLES:
            raise ValueError(f"{name!r} is no name for a variable of a chat template")
    return values


# A prompt and its completion that are lists of messages.
CHAT_COMPLETION = "chat-completion"
# A prompt with a chosen and a rejected answer: texts, and lists of messages.
PREFERENCE, CHAT_PREFERENCE = "preference", "chat-preference"
# What a format becomes where rows are lists of messages.
MESSAGE_FORMATS = {"prompt-completion": CHAT_COMPLETION, PREFERENCE: CHAT_PREFERENCE}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """What a row becomes, where it is more than the text of one field."""

    format: str = option(
        "text",
        SHAPE,
        choices=("text", "chat", "prompt-completion", CHAT_COMPLETION, PREFERENCE, CHAT_PREFERENCE),
    )
    """What a row is: a text, a conversation, a prompt with its completion, or one with a chosen and
    a rejected answer. The last two are texts or lists of messages, which the first row tells or the
    chat- formats say. All but the first make a store with masks, which say what counts for the
    loss."""
    template: str | None = option(None, SHAPE, "TEXT")
    """Text made of fields in braces, such as '{title}\\n\\n{body}'; \\n and \\t are understood, {{
    and }} are braces."""
    prompt_field: str = option("prompt", SHAPE, "NAME")
    """The prompt."""
    completion_field: str = option("completion", SHAPE, "NAME")
    """The completion; in a --template everything from it on counts for the loss."""
    chosen_field: str = option("chosen", SHAPE, "NAME")
    """The answer that was chosen; without a prompt, both sides whole, which begin alike."""
    rejected_field: str = option("rejected", SHAPE, "NAME")
    """The answer that was rejected."""
    messages_field: str | None = option(None, SHAPE, "NAME", shown="messages or conversations")
    """The conversation: a list of messages with role and content, or from and value."""
    chat_date: str | None = option(None, SHAPE, "DAY")
    """What a chat template that writes today's date shall write, such as 2024-07-26."""
    chat_template_kwargs: str | Mapping[str, object] | None = option(
        None, SHAPE, "JSON", kind=str | None
    )
    """More variables for the chat template, such as '{"enable_thinking": false}'. A field of this
    name in a row goes before them."""
    template_version: str = option("training", SHAPE, choices=("training", "own", "prefix"))
    """A chat template that writes earlier answers in another way once more is said, without their
    reasoning: in its training version, which keeps it, where one is known (Qwen3); or as it is,
    with answers found where it writes them; or such chats are rejected, as in stores of before."""
    train_on: str = option("assistant", SHAPE, choices=("assistant", "all", "last"))
    """What counts of a conversation: all that the assistant says, everything, or the assistant's
    last message."""
    fim: float = option(0.0, SHAPE, "SHARE")
    """Fill-in-the-middle for code: this share of the documents is cut in three and reordered, with
    the tokenizer's own tokens for it."""
    fim_spm: float = option(0.5, SHAPE, "SHARE")
    """The share of those that have the suffix before the prefix."""
    fim_seed: int = option(0, SHAPE, "N")
    """Which documents these are, and where they are cut, follows from this and their text."""
    max_length: int | None = option(None, SHAPE, "TOKENS", shown="any")
    """Most tokens of a document, end token counted."""
    too_long: str = option("split", SHAPE, choices=("split", "truncate", "reject"))
    """A longer row becomes several documents, is cut off, or is rejected."""

    def __post_init__(self) -> None:
        check_choices(self)
        self._check_kwargs()
        if self.max_length is not None and self.max_length < 2:
            hint = "use 2 or more"
            raise UsageError(f"max_length={self.max_length!r} leaves nothing to predict", hint=hint)
        # An option of another format is a mistake that would otherwise pass in silence.
        defaults = {each.name: each.default for each in fields(RowShape)}
        for name, formats in _OPTION_FORMATS.items():
            given = getattr(self, name)
            if given != defaults[name] and self.format not in formats:
                problem = f"{name}={given!r} has no meaning for the format {self.format!r}"
                other = MESSAGE_FORMATS.get(self.format, formats[0])
                other = other if other in formats else formats[0]
                raise UsageError(problem, hint=f"leave it out, or use --format {other}")
        for name in ("fim", "fim_spm"):
            if not 0 <= getattr(self, name) <= 1:
                hint = f"use a share from 0 to 1: --{name.replace('_', '-')} 0.5"
                raise UsageError(f"{name}={getattr(self, name)!r} is no share", hint=hint)
        for name in ("fim_spm", "fim_seed"):
            if not self.fim and getattr(self, name) != defaults[name]:
                problem = f"{name}={getattr(self, name)!r} has no meaning without fim"
                raise UsageError(problem, hint="say how many documents: --fim 0.5")
        if not 0 <= self.fim_seed < 1 << 63:
            problem = f"fim_seed={self.fim_seed!r} is no number from 0 to 2**63 - 1"
            raise UsageError(problem, hint="use a small number: --fim-seed 1")
        if self.has_pairs and self.max_length is not None and self.too_long == "split":
            problem = "max_length is that of each side of a pair, and a side cannot be split"
            raise UsageError(problem, hint="say what to do: --too-long truncate, or reject")
        if self.too_long != "split" and self.max_length is None:
            hint = "say how long: --max-length 2048"
            raise UsageError(f"too_long={self.too_long!r} needs a length", hint=hint)

    def _check_kwargs(self) -> None:
        given = self.chat_template_kwargs
        if given is None:
            return
        try:
            values = check_template_kwargs(json.loads(given) if isinstance(given, str) else given)
            # Written in one way: it is part of who a store is.
            object.__setattr__(self, "chat_template_kwargs", json.dumps(values, sort_keys=True))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"chat_template_kwargs={given!r} cannot be used: {error}",
                hint="write a JSON object, such as: --chat-template-kwargs "
                "'{\"enable_thinking\": false}'",
            ) from error

    @property
    def is_chat(self) -> bool:
        """Whether rows are rendered by a chat template."""
        return self.format in ("chat", CHAT_COMPLETION, CHAT_PREFERENCE)

    @property
    def has_pairs(self) -> bool:
        """Whether a row is two documents: with a chosen and with a rejected answer."""
        return self.format in (PREFERENCE, CHAT_PREFERENCE)

    @property
    def chat_fields(self) -> tuple[str, ...]:
        """Where a row may have its conversation and what belongs to it."""
        if self.format == CHAT_COMPLETION:
            return (self.prompt_field, self.completion_field, "tools", "chat_template_kwargs")
        if self.has_pairs:
            sides = (self.chosen_field, self.rejected_field)
            more = ("tools", "chat_template_kwargs") if self.is_chat else ()
            return (self.prompt_field, *sides, *more)
        found = (self.messages_field,) if self.messages_field else ("messages", "conversations")
        return (*found, "tools", "system", "chat_template_kwargs")

    @property
    def template_kwargs(self) -> str | None:
        """More variables for a chat template, as canonical JSON."""
        return cast("str | None", self.chat_template_kwargs)

    @property
    def has_fields(self) -> bool:
        """Whether a row is more than the text of one field."""
        return self.format != "text" or self.template is not None

    @property
    def piece_tokens(self) -> int | None:
        """The most tokens of a document, where longer rows become several."""
        return self.max_length if self.too_long == "split" and not self.has_pairs else None

    @property
    def has_mask(self) -> bool:
        """Whether a store of it has a loss mask."""
        return self.format != "text"

    def shape_identity(self) -> dict[str, str | int | float | bool | None]:
        """What decides ids and masks, by the names of the options that matter to the format."""
        values = {
            name: getattr(self, name)
            for name, formats in _OPTION_FORMATS.items()
            if self.format in formats
        }
        if not self.fim:
            # A store without it is what it was before there was any.
            values = {name: each for name, each in values.items() if not name.startswith("fim")}
        if self.format == "text" and self.max_length is None:
            del values["max_length"], values["too_long"]
        if self.format == "chat":
            # Which one is used follows from the template too, so that the build says it.
            del values["template_version"]
        if self.is_chat and self.chat_template_kwargs is None:
            del values["chat_template_kwargs"]
        if self.piece_tokens is not None:
            # Once, such rows were left whole; a store of that kind is another one.
            values["pieces"] = True
        return {"format": self.format, **values}

    @classmethod
    def of_identity(cls, config: Mapping[str, object]) -> RowShape | None:
        """The shape that a store's configuration tells of; None for plain text of one field."""
        if "format" not in config:
            return None
        known: dict[str, Any] = {name: config[name] for name in _OPTION_FORMATS if name in config}
        if known.get("too_long") == "split" and "pieces" not in config:
            known["max_length"] = None
        if config["format"] == "chat":
            version = str(config.get("template_version", "prefix"))
            known["template_version"] = version.partition(":")[0]
        return RowShape(format=str(config["format"]), **known)


# What a store keeps for `unit_bytes` where none are given: small inputs are cut smaller. Stores of
# before, which have None there, are cut by each file alone.
UNITS_BY_INPUT = "by input"
# What a store keeps for `groups`: they are of small files of all formats, in the order of paths.
# Stores of before have nothing there, groups of text files alone, and those in another order.
GROUPS_IN_ORDER = "in order"
# What a store keeps for `files`: text that merely comes with data files is not read. Stores of
# before have nothing there, and read it.
FILES_OF_DATA = "data"
# Members of a configuration that say how an input is found and cut, and are not options.
WAYS_OF_READING = ("groups", "files")

_FORMATS = ("text", "chat", "prompt-completion", CHAT_COMPLETION, PREFERENCE, CHAT_PREFERENCE)
_OPTION_FORMATS = {
    "template": ("text", "prompt-completion"),
    "prompt_field": ("prompt-completion", CHAT_COMPLETION, PREFERENCE, CHAT_PREFERENCE),
    "completion_field": ("prompt-completion", CHAT_COMPLETION),
    "chosen_field": (PREFERENCE, CHAT_PREFERENCE),
    "rejected_field": (PREFERENCE, CHAT_PREFERENCE),
    "fim": ("text",),
    "fim_spm": ("text",),
    "fim_seed": ("text",),
    "messages_field": ("chat",),
    "template_version": ("chat",),
    "train_on": ("chat",),
    "chat_date": ("chat", CHAT_COMPLETION, CHAT_PREFERENCE),
    "chat_template_kwargs": ("chat", CHAT_COMPLETION, CHAT_PREFERENCE),
    "max_length": _FORMATS,
    "too_long": _FORMATS,
}


_MAX_UNKNOWN = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions(RowShape):
    """Everything a build is told.

    `eos` and `bos` take a token, True for the tokenizer's own, or False for none. `identity` is
    what decides the bytes of a store; the rest may differ between a run and its resume.
    """

    PANELS = (NEEDED, TEXT, SHAPE, TOKENS, SPEED, MACHINES, RERUN)

    # Files; or, from Python, rows: a table, a dataset, an iterable of dicts or texts, or names of
    # these.
    inputs: PathInput | Iterable[Any] | Mapping[str, Any] = field(kw_only=False)
    tokenizer: PathInput = option(MISSING, NEEDED, "PATH|ID", short="-t")
    """A tokenizer.json or a folder with one, a SentencePiece .model, a tiktoken rank file, a
    Hugging Face hub id, or the word bytes (256 ids, needs no file)."""
    out: PathInput = option(MISSING, NEEDED, "FOLDER|URL", short="-o")
    """Where the store is written: a folder, or a URL such as s3://bucket/store."""
    text_field: str = option("text", TEXT, "NAME")
    """JSON key or column that holds the text; dots reach into nested objects (data.text)."""
    separator: str | None = option(None, TEXT, "TEXT", shown="one document per text file")
    """Cut text files into documents here; \\n and \\t are understood, so '\\n\\n' cuts at blank
    lines."""
    include: str | Sequence[str] | None = option(
        None, TEXT, "GLOB", kind=list[str] | None, shown="all"
    )
    """Read only files whose name matches, such as '*.parquet'; with a / in it the path below the
    input has to match, and ** crosses folders. May be given repeatedly."""
    exclude: str | Sequence[str] | None = option(
        None, TEXT, "GLOB", kind=list[str] | None, shown="none"
    )
    """Leave out files whose name matches, such as 'test_*', or whose path does, such as 'raw/'. May
    be given repeatedly."""
    chat_template: PathInput | None = option(None, SHAPE, "FILE", shown="the tokenizer's own")
    """Jinja template that makes text of a conversation."""
    where: str | None = option(None, TEXT, "CONDITION", shown="all rows")
    """Use only rows for which this holds, such as "lang == 'en' and score > 0.5": == != < <= > >=,
    in, like, is null, and, or, not. Rows left out are counted; a null, or a field that is missing,
    compares with nothing."""
    limit: int | None = option(None, TEXT, "ROWS", shown="all")
    """Use only the first rows of the input. A later run without it adds the rest."""
    val: float = option(0.0, TEXT, "SHARE")
    """Share of the documents for the split val: 0.01 is one in a hundred. A document's split
    follows from its text, so it never moves."""
    split_by_name: bool | None = option(
        None,
        TEXT,
        kind=bool | None,
        shown="where the names tell more than one split",
        off="--no-split-by-name",
        off_help="Whatever files are called, all of them are for training.",
    )
    """Rows of files or folders that are called validation, valid, dev or val go to the split val,
    and of test, testing, eval or evaluation to test, as datasets has them."""
    max_rejects: float = option(0.01, TEXT, "SHARE")
    """Fail if more than this share of a unit's rows cannot be used; of all rows, where the input is
    under 256 MiB. Fewer are listed in rejects/ with file, row and reason."""
    allow_empty: bool = option(False, TEXT)
    """Make a store without documents where no row of the input becomes one; else that is an error,
    since most often it is a wrong path or option."""
    max_unknown: float = option(_MAX_UNKNOWN, TOKENS, "SHARE")
    """Fail if the tokenizer does not know more than this share of a unit's text, counted in bytes
    of the text and not in ids (one <unk> may stand for a page); of all text, where the input is
    under 256 MiB."""
    eos: str | bool | None = option(
        None,
        TOKENS,
        "TOKEN",
        kind=str | None,
        shown="the tokenizer's own",
        off="--no-eos",
        off_help="Put no token after a document.",
    )
    """Token after every document."""
    bos: str | bool = option(False, TOKENS, kind=bool)
    """Put the tokenizer's begin-of-text token in front of every document."""
    special_tokens: str = option("text", TOKENS, choices=("text", "parse", "reject"))
    """What a string like <|endoftext|> inside a document becomes: ordinary characters, the special
    token itself, or a rejected row."""
    engine: str = option(
        "auto",
        TOKENS,
        "NAME",
        choices=(AUTO, *engine_names()),
        help=f"{', '.join((AUTO, *engine_names()[:-1]))} or {engine_names()[-1]}. auto takes the "
        "fastest one whose ids equal the reference tokenizer's, and checks that while it runs.",
    )
    workers: int | None = option(
        None, SPEED, "N", shown="physical cores, as far as the memory allows"
    )
    """Processes. Never changes a byte of the store."""
    memory: int | str | None = option(
        None, SPEED, "SIZE", kind=str | None, shown="a quarter of the machine"
    )
    """Most memory the whole build may take, such as 4GB or 1500MiB."""
    pin: bool = option(False, SPEED)
    """Bind each worker to a core, NUMA node by node (Linux)."""
    profile: PathInput | None = option(None, SPEED, "FILE")
    """Write where each worker's time went (read, parse, encode, check, write, wait) as JSON."""
    monitor: PathInput | None = option(None, SPEED, "FILE")
    """Write what cores, memory and disks did while the build ran, as JSON Lines; a later run of the
    same build adds to it."""
    runner: str = option("local", MACHINES, choices=("local", "ray"))
    """Where units are worked on: processes of this machine, or a Ray cluster. Never changes a byte
    of the store."""
    address: str | None = option(None, MACHINES, "ADDRESS", shown="a cluster on this machine")
    """The Ray cluster to work on: HOST:PORT, or auto for the one that runs here."""
    part: str | None = option(None, MACHINES, "I/N")
    """Build one of N independent parts (1/64 to 64/64), on any machine and in any order; then run
    tokenmill finish."""
    followed: bool = option(False, SPEED)
    """Build in the order of the store, for a reader that follows: all workers are at one compressed
    file after the other, whose text takes room on the disk meanwhile."""
    prune: bool = option(False, RERUN)
    """Drop the shards of files that are no longer among the inputs."""
    rebuild: bool = option(False, RERUN)
    """Discard what was built with another tokenizer or other options, and build anew."""
    forgotten: str = option("leave-out", RERUN, choices=("leave-out", "removed"))
    """Rows that were forgotten are left out. Where a file has changed since, nobody can tell which
    they are, and a build refuses; removed says that they are in such files no more."""
    verify_sources: bool = option(False, RERUN)
    """Read all files of units that are complete, and build those again whose bytes are not the ones
    that were read then."""
    unit_bytes: int | str | None = None
    """Bytes of text in a unit; None follows from the sizes of the files."""
    serial: bool = False
    """Work in this process instead of a pool: for debuggers and profilers."""
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        super(BuildOptions, self).__post_init__()
        if not 0 <= self.val < 1:
            hint = "use a number from 0 up to, but without, 1, such as 0.01"
            raise UsageError(f"val={self.val!r} is not a share of the documents", hint=hint)
        if not 0 <= self.max_rejects <= 1:
            problem = f"max_rejects={self.max_rejects!r} is not a share of the rows"
            raise UsageError(problem, hint="use a number from 0 to 1, such as 0.01")
        if not 0 <= self.max_unknown <= 1:
            problem = f"max_unknown={self.max_unknown!r} is not a share of the text"
            raise UsageError(problem, hint="use a number from 0 to 1, such as 0.05")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit={self.limit!r} leaves no row", hint="use 1 or more")
        if self.unit_size is not None and self.unit_size < 1:
            raise UsageError(f"unit_bytes={self.unit_bytes!r} is no size", hint="use 1 or more")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers={self.workers!r} does no work", hint="use 1 or more")
        if self.where is not None:
            parse(self.where)  # refuses what is none
        for name in ("include", "exclude"):
            if "" in globs_of(getattr(self, name)):
                raise UsageError(f"{name}='' matches no file", hint="use a glob, such as '*.jsonl'")
        if self.address is not None and self.runner != "ray":
            raise UsageError(
                f"address={self.address!r} is that of a Ray cluster, and the runner is not Ray",
                hint="add --runner ray",
            )
        self._check_shape()

    def _check_shape(self) -> None:
        if self.has_fields and self.text_field != "text":
            raise UsageError(
                f"text_field={self.text_field!r} has no meaning where a row has several fields",
                hint="name the fields in --template, or with the options of the format",
            )
        if not self.is_chat:
            if self.chat_template is not None:
                other = MESSAGE_FORMATS.get(self.format, "chat")
                raise UsageError(
                    f"chat_template={str(self.chat_template)!r} has no meaning for the format "
                    f"{self.format!r}",
                    hint=f"leave it out, or use --format {other}",
                )
            return
        if isinstance(self.eos, str) or self.bos is not False:
            problem = "a chat has the special tokens of its template and no others"
            raise UsageError(problem, hint="leave --eos and --bos out")
        if self.special_tokens != "text":
            raise UsageError(
                f"special_tokens={self.special_tokens!r} has no meaning for chats: their special "
                "tokens come from the template alone",
                hint="leave --special-tokens out",
            )

    @property
    def memory_bytes(self) -> int | None:
        """The budget; None where none was given."""
        return None if self.memory is None else parse_size(self.memory)

    @property
    def unit_size(self) -> int | None:
        """Bytes of text in a unit; None where it follows from the sizes of the files."""
        return None if self.unit_bytes is None else parse_size(self.unit_bytes)

    @property
    def shape(self) -> RowShape | None:
        """How rows become documents; None where they are the text of one field."""
        shape = RowShape(**{each.name: getattr(self, each.name) for each in fields(RowShape)})
        return None if shape == RowShape() else shape

    def identity(self, *, by_name: bool = False) -> dict[str, str | int | float | bool | None]:
        """What every unit depends on, by the names that stores keep.

        `by_name`: whether the names of the files tell splits, where the options do not say.

        The limit is left out: it cuts one unit short and leaves the others as they are, and that
        unit's receipt tells how many rows it used. The thresholds only decide whether a build
        fails.
        """
        cut = {"unit_bytes": self.unit_size or UNITS_BY_INPUT, "groups": GROUPS_IN_ORDER}
        names: dict[str, str | bool] = {"files": FILES_OF_DATA}
        if self.where is not None:
            names["where"] = str(parse(self.where))
        if by_name if self.split_by_name is None else self.split_by_name:
            names["split_by_name"] = True
        shape = {} if self.shape is None else self.shape.shape_identity()
        return self._plain_identity() | cut | names | shape

    def _plain_identity(self) -> dict[str, str | int | float | bool | None]:
        return {
            "text_field": self.text_field,
            "separator": self.separator,
            "unit_bytes": self.unit_size,
            "special_tokens": self.special_tokens,
            "eos": self.eos if isinstance(self.eos, str) else None,
            "add_eos": self.eos is not False,
            "add_bos": self.bos is not False,
            "bos": self.bos if isinstance(self.bos, str) else None,
            "val_fraction": self.val,
        }

    def as_kept(self) -> dict[str, Any]:
        """What decides a build, as parts of it keep it for each other and for `finish`."""
        shape = None if self.shape is None else dataclasses.asdict(self.shape)
        more = {"limit": self.limit, "max_reject_fraction": self.max_rejects, "shape": shape}
        # Not there where they are as by default: an older record has none of them.
        files: dict[str, Any] = {
            name: list(globs)
            for name in ("include", "exclude")
            if (globs := globs_of(getattr(self, name)))
        }
        if self.split_by_name is not None:
            files["split_by_name"] = self.split_by_name
        if self.max_unknown != _MAX_UNKNOWN:
            more["max_unknown"] = self.max_unknown
        if self.where is not None:
            files["where"] = str(parse(self.where))
        return self._plain_identity() | more | files

    @classmethod
    def of_kept(cls, kept: Mapping[str, Any], **more: Any) -> BuildOptions:
        """The options that `as_kept` wrote down; TypeError where another version wrote it."""
        values = dict(kept)
        eos, bos = values.pop("eos"), values.pop("bos")
        return cls(
            eos=eos if values.pop("add_eos") else False,
            bos=(bos or True) if values.pop("add_bos") else False,
            val=values.pop("val_fraction"),
            max_rejects=values.pop("max_reject_fraction"),
            **(values.pop("shape") or {}),
            **values,
            **more,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(BuildOptions):
    """The options of `plan`: those of `build`, and a store only if there is one."""

    out: PathInput = option("", NEEDED, "FOLDER", short="-o", shown=False)
    """Optional: the store that is planned for; what it holds already is taken off."""


# -------------------------------------------------------------------------------------------------
# The options of commands that have few.

WHERE = "Where to look"
WHAT = "What is looked for"
MATCHES = "What is shown of matches"
ROWS = "What is laid out"
SERVED = "How it is shown"


@dataclass(kw_only=True)
class FinishOptions:
    store: PathInput = field(kw_only=False)
    inputs: PathInput | Sequence[PathInput] = field(default=(), kw_only=False)
    prune: bool = same(BuildOptions, "prune")
    allow_empty: bool = same(BuildOptions, "allow_empty")
    on_progress: Callable[[Progress], None] | None = None


@dataclass(kw_only=True)
class VerifyOptions:
    store: PathInput = field(kw_only=False)
    sample: int = option(100, "What is checked", "N", least=0)
    """Documents, chosen at random, whose text is read from its source again and encoded by the
    reference tokenizer."""
    seed: int | None = None
    on_progress: Callable[[int, int], None] | None = None


@dataclass(kw_only=True)
class PruneOptions:
    store: PathInput = field(kw_only=False)
    dry_run: bool = option(False, RERUN)
    """Remove nothing; say what would go, and how many bytes."""


@dataclass(kw_only=True)
class InspectOptions:
    path: PathInput = field(kw_only=False)
    snapshot: int | str | None = option(None, WHERE, "SNAPSHOT", kind=str | None, shown="as it is")
    """Look at the store as it was before it grew: a number, or the first digits of the fingerprint,
    as listed."""
    doc: int | None = option(None, WHERE, "K")
    """Show document K of the split, counted from 0, with the boundaries of its tokens."""
    by: str | None = option(None, WHERE, "COLUMN")
    """Show documents, tokens and share of each source, folder or split, or of each value of an
    annotation."""
    split: str | None = option(None, WHERE, "NAME", shown="all")
    """Look at one split: train or val."""
    sample: int = option(32, WHERE, "N", least=0)
    """Documents that are decoded and compared with their source, where it is a local file."""


@dataclass(kw_only=True)
class GrepOptions:
    store: PathInput | Store = field(kw_only=False)
    text: str = field(kw_only=False)
    split: str | None = option(None, WHERE, "NAME", shown="all")
    """Look into one split: train or val."""
    limit: int = option(100, MATCHES, "N", least=0)
    """Matches that are shown; all are counted."""
    context: int = option(40, MATCHES, "N", least=0)
    """Characters that are shown before and after each."""
    on_progress: Callable[[int, int], None] | None = None


OF_RUN = "What the state does not say"


@dataclass(kw_only=True)
class TraceOptions:
    store: PathInput | Store = field(kw_only=False)
    state: PathInput = option(MISSING, NEEDED, "PATH", kind=str)
    """The folder of a run or of one of its checkpoints, or a file that a loader's state was saved
    to: JSON, or what torch.save wrote."""
    doc: int | None = option(None, WHAT, "K")
    """Document K of the split that the run reads, counted from 0."""
    row: str | None = option(None, WHAT, "FILE:ROW")
    """What a row of an input file became; rows are counted from 0."""
    text: str | None = option(None, WHAT, "TEXT")
    """The documents that hold a text, as grep finds them."""
    limit: int = option(10, WHAT, "N", least=0)
    """Showings of each document: the last ones, and as many to come. All that were are counted."""
    split: str = option("train", OF_RUN, "NAME")
    """The split that the run reads."""
    batch_size: int | None = option(None, OF_RUN, "ROWS", shown=False)
    """Rows of a step on one rank. `tokenmill train` writes it down; so does loader.recipe()."""
    ranks: int | None = option(None, OF_RUN, "N", shown=False)
    """Ranks of the run, where --batch-size is given."""


@dataclass(kw_only=True)
class LedgerOptions:
    run: PathInput = field(kw_only=False)
    by: str | Sequence[str] | None = option(
        None, WHAT, "COLUMN,...", kind=str | None, shown="source, and annotations of few values"
    )
    """What tokens are counted by beside the stores: source, folder, or annotations."""
    store: PathInput | Sequence[PathInput] = option(
        (), OF_RUN, "STORE", kind=list[str], shown=False
    )
    """A store of the run, where it is at another place now or the state does not say which it is.
    May be given repeatedly."""
    split: str = same(TraceOptions, "split")
    batch_size: int | None = same(TraceOptions, "batch_size")
    ranks: int | None = same(TraceOptions, "ranks")


@dataclass(kw_only=True)
class LayoutOptions:
    store: PathInput | Store = field(kw_only=False)
    seq_len: int = option(MISSING, NEEDED, "TOKENS")
    """Inputs of a row. A row holds one token more, the label of its last input."""
    split: str | None = option("train", ROWS, "NAME", kind=str)
    """The split to lay out."""
    packings: Sequence[str] | None = option(
        None,
        ROWS,
        "NAME",
        flag="--packing",
        choices=tuple(PACKINGS),
        shown="all",
        help=listed([f"{name} ({what})" for name, what in PACKINGS.items()], "or")
        + ". May be given repeatedly.",
    )
    batch_size: int | None = option(None, ROWS, "ROWS")
    """Rows of a step, those of all ranks together: shows the steps of an epoch."""
    ranks: int | None = option(None, ROWS, "N")
    """Data-parallel ranks: shows how much longer than the mean the slowest takes, with
    balance="attention" of the Loader and without."""
    width: int = option(2048, ROWS, "N")
    """Of the model, for --ranks: the wider, the less of the time is attention."""
    on_progress: Callable[[int, int], None] | None = None


@dataclass(kw_only=True)
class ViewOptions:
    paths: PathInput | Sequence[PathInput] = field(kw_only=False)
    port: int = option(0, SERVED, "N", least=0, shown="one that is free")
    """Port of this machine to listen on."""
    no_open: bool = option(False, SERVED)
    """Print the address, and open no browser."""
    export: PathInput | None = option(None, SERVED, "FILE")
    """Write an HTML page instead, with the overview and some documents of each store: one file that
    needs no network and no server."""
    on_ready: Callable[[str], None] | None = None


CHOSEN = "Which documents"


@dataclass(kw_only=True)
class SelectOptions:
    store: PathInput = field(kw_only=False)
    out: PathInput = option(MISSING, NEEDED, "FILE", short="-o")
    """Where the view is written, such as code.view."""
    where: str | None = option(None, CHOSEN, "CONDITION", shown="all")
    """Keep the documents for which this holds, such as "source like '%code%' and tokens < 8192". It
    may ask for source, folder, row, tokens, counted, split, document, and what `tokenmill annotate`
    gave the documents."""
    repeat: str | None = option(None, CHOSEN, "COLUMN", shown="each document once")
    """Have each document as often as this annotation says, a whole number. The second copies come
    after all first ones."""

    def __post_init__(self) -> None:
        if self.where is None and self.repeat is None:
            raise UsageError(
                "nothing says which documents are meant",
                hint="give --where \"source like '%code%'\", or --repeat COLUMN",
            )


@dataclass(kw_only=True)
class ListedOptions:
    """How documents that go are named."""

    store: PathInput = field(kw_only=False)
    ids: PathInput | Sequence[int | str] | None = option(
        None, CHOSEN, "FILE", shown=False, kind=str | None
    )
    """A list of what identifies documents, one to a line; --key says what that is."""
    match: PathInput | None = option(None, CHOSEN, "FILE", shown=False)
    """A list of texts, one to a line: documents that hold one of them go."""
    regex: bool = option(False, CHOSEN)
    """Lines of --match are Python's regular expressions; every document is decoded for them."""
    key: str = option("document", CHOSEN, "NAME")
    """What --ids lists: document (numbers, counted from 0), source (paths of files), source,row (as
    in data/a.jsonl:17, counted from 0), or a column that `tokenmill annotate` made, such as id."""
    split: str = option("train", CHOSEN, "NAME")
    """The split whose documents the numbers of --key document are of."""
    missing: str = option("error", CHOSEN, choices=("error", "count"))
    """What becomes of lines that no document has: an error, or they are passed over."""

    @property
    def names_nothing(self) -> bool:
        return self.ids is None and self.match is None

    def __post_init__(self) -> None:
        check_choices(self)
        if self.ids is not None and self.match is not None:
            raise UsageError(
                "documents are named by a list of ids or by one of texts, and both are given",
                hint="give one of them, then the other: --ids optout.txt, --match patterns.txt",
            )
        if self.regex and self.match is None:
            raise UsageError("regex has no meaning for ids", hint="leave --regex out")


@dataclass(kw_only=True)
class BanOptions(ListedOptions):
    out: PathInput = option(MISSING, NEEDED, "FILE", short="-o")
    """Where the view is written, such as kept.view."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names_nothing:
            raise UsageError(
                "documents are banned by a list of ids or by one of texts, and none is given",
                hint="give --ids optout.txt or --match patterns.txt; a view can be cut further",
            )


@dataclass(kw_only=True)
class ForgetOptions(ListedOptions):
    reason: str | None = option(None, CHOSEN, "TEXT", shown=False)
    """Why they go, such as 'erasure request 2026-114': the manifest keeps it. It should name
    nobody."""
    dry_run: bool = option(False, RERUN)
    """Change nothing; say what would go, and what would be written anew."""


@dataclass(kw_only=True)
class DedupOptions:
    stores: PathInput | Sequence[PathInput] = field(kw_only=False)
    out: PathInput = option(MISSING, NEEDED, "FILE|FOLDER", short="-o")
    """Where the view is written, such as unique.view; of several stores a folder, with a view of
    each."""


@dataclass(kw_only=True)
class AnnotateOptions:
    store: PathInput = field(kw_only=False)
    table: PathInput | None = field(default=None, kw_only=False)
    key: str | None = option(None, CHOSEN, "NAME", shown=False)
    """The column of the table that says which document a row is of: a field of the rows that the
    store was built of (they are read again), source,row (a file and a row in it, counted from 0),
    document (its number), or a column that documents have already."""
    columns: str | Sequence[str] | None = option(
        None, CHOSEN, "NAME,...", kind=str | None, shown="all but the key"
    )
    """Columns to take; new=old gives one another name. Without a table: fields of the rows that the
    store was built of."""
    missing: str = option("error", CHOSEN, choices=("error", "null"))
    """What becomes of documents for which the table has no row: an error, or no value."""
    split: str = option("train", CHOSEN, "NAME")
    """The split whose documents the numbers of --key document are of."""

    def __post_init__(self) -> None:
        check_choices(self)


LABELS = ("next", "same")


@dataclass(kw_only=True)
class AuditOptions:
    loader: Any = field(kw_only=False)
    store: PathInput | Store | None = option(None, COMPARED, "STORE", kind=str)
    """The store that the loader reads, or one of the same text and tokenizer."""
    split: str | None = option("train", COMPARED, "NAME", kind=str)
    """Its split that the loader reads."""
    text: PathInput | Sequence[PathInput] = option(
        (), COMPARED, "FILE", kind=list[str], shown=False
    )
    """Text instead of a store: any input that `tokenmill build` reads. May be given repeatedly."""
    tokenizer: PathInput | None = option(None, COMPARED, "PATH|ID", short="-t", kind=str)
    """The tokenizer of the ids, as for `tokenmill build`; a store has its own."""
    text_field: str = same(BuildOptions, "text_field")
    separator: str | None = same(BuildOptions, "separator")
    labels: str | None = option(None, MODEL, "|".join(LABELS), kind=str, shown=False)
    """What the model expects of labels: the `same` as input_ids, as it shifts them itself, like all
    models of transformers do, or the `next` tokens."""
    model: Any = None
    batches: int = option(200, READ, "N", least=1)
    """Batches that are read of each rank, if the epoch does not end before."""
    ranks: int = option(1, READ, "N", least=1)
    """Ranks to read as: each tells the function its `rank` and `world_size`, or is a process with
    the environment variables of torchrun where the function takes no `rank`."""

    def __post_init__(self) -> None:
        for name in ("batches", "ranks"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} reads nothing", hint="use 1 or more"
                )
        if self.labels is not None and self.labels not in LABELS:
            hint = f"use one of: {', '.join(LABELS)}"
            raise UsageError(f"labels={self.labels!r} is not known", hint=hint)
        if self.store is not None and self.text:
            problem = f"store={str(self.store)!r} and text={self.text!r} both say what is read"
            raise UsageError(problem, hint="give one of them")

    @property
    def expected(self) -> str | None:
        """What the model makes of labels; None where that is not known."""
        kinds = {each.__name__ for each in type(self.model).__mro__}
        return self.labels or ("same" if "PreTrainedModel" in kinds else None)


@dataclass
class DemoOptions:
    out: str = option("demo-store", "Other options", "FOLDER", short="-o")
    """Where the demo's store is written."""


# -------------------------------------------------------------------------------------------------
# The options of `diagnose`.

GPU = "What the GPU takes"
CLOCK = "How it is measured"
BESIDE = "What is drawn beside it"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnoseOptions(RowShape):
    """What is to be measured, and what is known of the training it is measured for."""

    PANELS = (NEEDED, GPU, TEXT, SHAPE, CLOCK, BESIDE, OUTPUT)

    inputs: PathInput | Sequence[PathInput] = field(default=(), kw_only=False)
    tokenizer: PathInput | None = option(None, NEEDED, "PATH|ID", short="-t")
    """The tokenizer of your training, as for `tokenmill build`."""
    tokens_per_second: float | None = option(None, GPU, "N")
    """What one GPU takes, from your own run: better than any estimate."""
    model: str | None = option(None, GPU, "NAME", shown="each of them")
    """Estimate it for a model: mini (10M parameters), small (124M), medium (850M), large (1.8B) or
    tiny."""
    gpu: str = option("H200", GPU, "NAME")
    """The GPU of the estimate, such as H100, A100 or RTX4090."""
    gpus: int = option(1, GPU, "N")
    """GPUs that this machine has to feed."""
    mfu: float = option(0.4, GPU, "SHARE")
    """Share of its peak that the GPU reaches, for the estimate."""
    seq_len: int = option(1024, GPU, "TOKENS")
    """Tokens of a training row."""
    text_field: str = same(BuildOptions, "text_field")
    separator: str | None = same(BuildOptions, "separator")
    chat_template: PathInput | None = same(BuildOptions, "chat_template")
    seconds: float = option(1.0, CLOCK, "S")
    """How long each way is timed, start-up not counted."""
    sample_mb: float = option(32.0, CLOCK, "MB")
    """How much of the text is used, taken from up to 8 of its files."""
    workers: int | None = option(None, CLOCK, "N", shown="the cores")
    """Processes of the ways that have any."""
    sweep: bool = option(False, CLOCK)
    """Also try other worker counts and batch sizes, and recommend workers, batch and memory for
    this machine."""
    stalls: PathInput | None = option(None, BESIDE, "FILE")
    """A report of tokenmill.StallMeter, or what `python -m tokenmill.stalls --json FILE` wrote."""
    run: PathInput | None = option(None, BESIDE, "FOLDER")
    """A training run with its metrics.jsonl."""
    timeline: PathInput | None = option(None, BESIDE, "FILE")
    """The time line that `tokenmill build --monitor FILE` wrote."""
    report: PathInput | None = option(None, OUTPUT, "FILE")
    """Write an HTML page with plots: one file that needs no network."""
    scripts: PathInput | None = option(None, OUTPUT, "FOLDER")
    """Write the programs that were timed, and the sample that they read, so that you can run and
    change them."""
    on_step: Callable[[int, int, str], None] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The inputs as strings."""
        return tuple(map(str, as_list(self.inputs)))

    @property
    def build(self) -> BuildOptions:
        """The build of the same text, with no token that is not the text's."""
        shape = {each.name: getattr(self, each.name) for each in fields(RowShape)}
        read = {name: getattr(self, name) for name in ("text_field", "separator", "chat_template")}
        return BuildOptions((), tokenizer=self.tokenizer or "", out="", eos=False, **shape, **read)

    def changed(self, *names: str) -> dict[str, Any]:
        """Of these options, and those of what a row is, the ones that are not as by default."""
        taken = [each for each in fields(self) if each.name in names or each in fields(RowShape)]
        found = {each.name: getattr(self, each.name) for each in taken}
        return {each.name: found[each.name] for each in taken if found[each.name] != each.default}

    def __post_init__(self) -> None:
        super(DiagnoseOptions, self).__post_init__()
        if self.fim:
            problem = f"fim={self.fim!r} has no meaning for a measurement"
            raise UsageError(problem, hint="leave --fim out: it takes next to no time")
        _ = self.build  # which refuses what does not go together
        if not 0 < self.seconds <= 60:
            problem = f"seconds={self.seconds!r} is no time to measure each way for"
            raise UsageError(problem, hint="use more than 0 and at most 60, such as --seconds 2")
        if not 0 < self.sample_mb <= 4096:
            hint = "use more than 0 and at most 4096, such as --sample-mb 32"
            raise UsageError(f"sample_mb={self.sample_mb!r} is no size of a sample", hint=hint)
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers={self.workers!r} does no work", hint="use 1 or more")
        rate = self.tokens_per_second
        if rate is not None and self.model is not None:
            raise UsageError(
                f"--tokens-per-second {rate:g} and --model {self.model} both say what the GPU"
                " takes",
                hint="leave one of them out; a rate that you measured is better than an estimate",
            )
        if rate is not None and not 0 < rate < math.inf:
            hint = "use a number above 0, such as --tokens-per-second 500000"
            raise UsageError(f"{rate:g} tokens a second is no rate of a GPU", hint=hint)
        if self.gpus < 1:
            raise UsageError(f"{self.gpus} GPUs take nothing", hint="use --gpus 1 or more")
        if not 0 < self.mfu <= 1:
            hint = "use a number above 0 and up to 1, such as --mfu 0.4"
            raise UsageError(f"mfu={self.mfu!r} is not a share of the GPU's peak", hint=hint)
        if self.seq_len < 1:
            hint = "use a number such as 1024"
            raise UsageError(f"seq_len={self.seq_len!r} has no token", hint=hint)
