"""What a user asks of a build, checked and put into plain values.

`BuildConfig` is everything that decides the bytes of a store. What decides only how fast it is made
(workers, memory, progress) is in `BuildResources`: it may differ between a run and its resume.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""What a chat template is given by us, and so cannot be given by anyone else."""


def check_template_kwargs(values: object) -> dict[str, Any]:
    """Variables for a chat template; ValueError says why they are none."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    for name in values:
        if not name.isidentifier() or name in TEMPLATE_VARIABLES:
            raise ValueError(f"{name!r} is no name for a variable of a chat template")
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """What a row becomes, where it is more than the text of one field."""

    format: str = "text"
    """text, chat or prompt-completion."""
    template: str | None = None
    """Fields in braces and text around them; a prompt-completion has its completion in it."""
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    messages_field: str | None = None
    """Where a conversation is; None looks for `messages`, then for `conversations`."""
    train_on: str = "assistant"
    """assistant, all or last: which part of a chat counts for the loss."""
    chat_date: str | None = None
    """The day that a chat template writes where it asks for today."""
    chat_template_kwargs: str | None = None
    """More variables for a chat template: a JSON object."""
    max_length: int | None = None
    too_long: str = "split"
    """split, truncate or reject: what becomes of a row with more tokens."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("format", self.format, ("text", "chat", "prompt-completion")),
            ("train_on", self.train_on, ("assistant", "all", "last")),
            ("too_long", self.too_long, ("split", "truncate", "reject")),
        ):
            if value not in choices:
                raise UsageError(
                    f"{name}={value!r} is not known", hint=f"use one of: {', '.join(choices)}"
                )
        self._check_kwargs()
        if self.max_length is not None and self.max_length < 2:
            raise UsageError(
                f"max_length={self.max_length!r} leaves nothing to predict", hint="use 2 or more"
            )
        self._check_strays()

    def _check_kwargs(self) -> None:
        given = self.chat_template_kwargs
        if given is None:
            return
        try:
            check_template_kwargs(json.loads(given))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"chat_template_kwargs={given!r} cannot be used: {error}",
                hint="write a JSON object, such as: --chat-template-kwargs "
                "'{\"enable_thinking\": false}'",
            ) from error

    def _check_strays(self) -> None:
        """An option of another format is a mistake that would otherwise pass in silence."""
        for name, formats in _OPTION_FORMATS.items():
            given = getattr(self, name)
            if given != _SHAPE_DEFAULTS[name] and self.format not in formats:
                raise UsageError(
                    f"{name}={given!r} has no meaning for the format {self.format!r}",
                    hint=f"leave it out, or use --format {formats[0]}",
                )
        if self.too_long != "split" and self.max_length is None:
            raise UsageError(
                f"too_long={self.too_long!r} needs a length", hint="say how long: --max-length 2048"
            )

    @property
    def chat_fields(self) -> tuple[str, ...]:
        """Where a row may have its conversation and what belongs to it."""
        found = (self.messages_field,) if self.messages_field else ("messages", "conversations")
        return (*found, "tools", "system", "chat_template_kwargs")

    @property
    def has_fields(self) -> bool:
        """Whether a row is more than the text of one field."""
        return self.format != "text" or self.template is not None

    @property
    def piece_tokens(self) -> int | None:
        """The most tokens of a document, where longer rows become several."""
        return self.max_length if self.too_long == "split" else None

    @property
    def has_mask(self) -> bool:
        """Whether a store of it says of each token whether it counts."""
        return self.format != "text"

    def identity(self) -> dict[str, str | int | float | bool | None]:
        """What decides ids and masks, by the names of the options that matter to the format."""
        values = {
            name: getattr(self, name)
            for name, formats in _OPTION_FORMATS.items()
            if self.format in formats
        }
        if self.format == "text" and self.max_length is None:
            del values["max_length"], values["too_long"]
        if self.format == "chat" and self.chat_template_kwargs is None:
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
        return cls(format=str(config["format"]), **known)


_OPTION_FORMATS = {
    "template": ("text", "prompt-completion"),
    "prompt_field": ("prompt-completion",),
    "completion_field": ("prompt-completion",),
    "messages_field": ("chat",),
    "train_on": ("chat",),
    "chat_date": ("chat",),
    "chat_template_kwargs": ("chat",),
    "max_length": ("text", "chat", "prompt-completion"),
    "too_long": ("text", "chat", "prompt-completion"),
}
_SHAPE_DEFAULTS: dict[str, object] = {
    each.name: each.default for each in fields(RowShape) if each.name in _OPTION_FORMATS
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """Everything, beside the input and the tokenizer, that decides the bytes of a store."""

    text_field: str = "text"
    separator: str | None = None
    """Splits text files into documents; None makes each text file one document."""
    unit_bytes: int | None = None
    """Bytes of text in a unit; None follows from each file's size."""
    special_tokens: str = "text"
    """text, parse or reject: what the string of a special token inside a document becomes."""
    eos: str | None = None
    """Token behind each document; None takes the tokenizer's own."""
    add_eos: bool = True
    add_bos: bool = False
    bos: str | None = None
    """Token in front of each document if `add_bos`; None takes the tokenizer's own."""
    val_fraction: float = 0.0
    """Share of documents that go to the split `val`, chosen by a hash of their text."""
    limit: int | None = None
    """Use only the first rows of the input, in order."""
    max_reject_fraction: float = 0.01
    """A unit that rejects a larger share of its rows fails the build."""
    shape: RowShape | None = None
    """None: a row is the text of `text_field`, whatever its length."""

    def __post_init__(self) -> None:
        if self.special_tokens not in ("text", "parse", "reject"):
            raise UsageError(
                f"special_tokens={self.special_tokens!r} is not a policy",
                hint="use text, parse or reject",
            )
        if not 0 <= self.val_fraction < 1:
            raise UsageError(
                f"val={self.val_fraction!r} is not a share of the documents",
                hint="use a number from 0 up to, but without, 1, such as 0.01",
            )
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit={self.limit!r} leaves no row", hint="use 1 or more")
        if self.unit_bytes is not None and self.unit_bytes < 1:
            raise UsageError(f"unit_bytes={self.unit_bytes!r} is no size", hint="use 1 or more")
        if not 0 <= self.max_reject_fraction <= 1:
            raise UsageError(
                f"max_rejects={self.max_reject_fraction!r} is not a share of the rows",
                hint="use a number from 0 to 1, such as 0.01",
            )
        if self.eos is not None and not self.add_eos:
            raise UsageError(
                f"eos={self.eos!r} and no end token at all exclude each other",
                hint="give --eos TOKEN or --no-eos, not both",
            )
        if self.shape is not None:
            self._check_shape(self.shape)

    def _check_shape(self, shape: RowShape) -> None:
        if shape.has_fields and self.text_field != "text":
            raise UsageError(
                f"text_field={self.text_field!r} has no meaning where a row has several fields",
                hint="name the fields in --template, or with the options of the format",
            )
        if shape.format == "chat" and (self.eos is not None or self.add_bos):
            raise UsageError(
                "a chat has the special tokens of its template and no others",
                hint="leave --eos and --bos out",
            )
        if shape.format == "chat" and self.special_tokens != "text":
            raise UsageError(
                f"special_tokens={self.special_tokens!r} has no meaning for chats: their special "
                "tokens come from the template alone",
                hint="leave --special-tokens out",
            )

    def identity(self) -> dict[str, str | int | float | bool | None]:
        """The part that every unit depends on.

        The limit is left out: it cuts one unit short and leaves the others as they are, and that
        unit's receipt tells how many rows it used. The threshold only decides whether a build
        fails.
        """
        values = asdict(self)
        for name in ("limit", "max_reject_fraction", "shape"):
            del values[name]
        if self.shape is not None:
            values |= self.shape.identity()
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildResources:
    """What a build may use. Never changes the bytes of the store."""

    workers: int | None = None
    """Processes; None takes the physical cores, or fewer if the memory allows no more."""
    memory: int | None = None
    """Bytes for the whole process tree; None takes a quarter of the machine."""
    engine: str = "auto"
    pin: bool = False
    """Bind each worker to a core, NUMA node by node (Linux)."""
    serial: bool = False
    """Work in this process instead of a pool: for debuggers and profilers."""
    runner: str = "local"
    """local: processes of this machine; ray: a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster; None starts one on this machine."""

    def __post_init__(self) -> None:
        if self.runner not in ("local", "ray"):
            raise UsageError(f"runner={self.runner!r} is not known", hint="use local or ray")
        if self.address is not None and self.runner != "ray":
            raise UsageError(
                f"address={self.address!r} is that of a Ray cluster, and the runner is not Ray",
                hint="add --runner ray",
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers={self.workers!r} does no work", hint="use 1 or more")
