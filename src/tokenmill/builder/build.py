"""The verb `build`: raw text in, a checked store out. The same call again resumes.

Here the arguments are checked and put together; `run` carries them out.
"""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from tokenmill import corpora
from tokenmill.builder.part_run import PartRun
from tokenmill.builder.parts import parse_part
from tokenmill.builder.recording import run_recorded
from tokenmill.builder.run import BuildRun
from tokenmill.config import BuildConfig, BuildResources, RowShape, parse_size
from tokenmill.errors import UsageError
from tokenmill.store.place import open_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Unpack

    from tokenmill.builder.progress import BuildResult, Progress

    PathInput = str | os.PathLike[str]


_SHAPE_OPTIONS = tuple(each.name for each in dataclasses.fields(RowShape))


def build(
    inputs: PathInput | Sequence[PathInput],
    *,
    tokenizer: PathInput,
    out: PathInput,
    text_field: str = "text",
    separator: str | None = None,
    workers: int | None = None,
    memory: int | str | None = None,
    limit: int | None = None,
    val: float = 0.0,
    eos: str | bool | None = None,
    bos: str | bool = False,
    special_tokens: str = "text",
    format: str = "text",  # noqa: A002 (the option's name)
    template: str | None = None,
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    messages_field: str | None = None,
    chat_template: PathInput | None = None,
    chat_date: str | None = None,
    chat_template_kwargs: str | Mapping[str, object] | None = None,
    train_on: str = "assistant",
    max_length: int | None = None,
    too_long: str = "split",
    engine: str = "auto",
    max_rejects: float = 0.01,
    unit_bytes: int | str | None = None,
    prune: bool = False,
    rebuild: bool = False,
    verify_sources: bool = False,
    pin: bool = False,
    serial: bool = False,
    runner: str = "local",
    address: str | None = None,
    part: str | None = None,
    profile: PathInput | None = None,
    monitor: PathInput | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildResult:
    """Turn text into a store of tokens, or bring an existing one up to date.

    `eos` and `bos` take a token, True for the tokenizer's own, or False for none. `prune` drops
    what files no longer among the inputs left in the store; `rebuild` drops what was built with
    another tokenizer or configuration. Without them such a store is refused. `verify_sources` reads
    all files of units that are complete, and builds those again whose bytes are others. `monitor`
    names a file for the time line of the run (see `tokenmill.monitor`).

    `template` makes a text of several fields. `format="chat"` and `format="prompt-completion"` make
    stores with masks, which say what counts for the loss; docs/supervised.md tells all of it.

    `runner="ray"` works on a Ray cluster: the one at `address` ("auto" for the one that runs here),
    or one on this machine. `part="3/64"` builds the units of one of 64 independent parts, anywhere,
    and writes no manifest; `tokenmill.finish` does, when all parts are done.
    """
    run = make_run(
        inputs,
        tokenizer=tokenizer,
        out=out,
        on_progress=on_progress,
        text_field=text_field,
        separator=separator,
        workers=workers,
        memory=memory,
        limit=limit,
        val=val,
        eos=eos,
        bos=bos,
        special_tokens=special_tokens,
        format=format,
        template=template,
        prompt_field=prompt_field,
        completion_field=completion_field,
        messages_field=messages_field,
        chat_template=chat_template,
        chat_date=chat_date,
        chat_template_kwargs=chat_template_kwargs,
        train_on=train_on,
        max_length=max_length,
        too_long=too_long,
        engine=engine,
        max_rejects=max_rejects,
        unit_bytes=unit_bytes,
        prune=prune,
        rebuild=rebuild,
        verify_sources=verify_sources,
        pin=pin,
        serial=serial,
        runner=runner,
        address=address,
        part=part,
    )
    run.keeps_reports = profile is not None
    try:
        result = run.run() if monitor is None else run_recorded(run, monitor)
    finally:
        run.close()
    if profile is not None:
        Path(profile).write_text(json.dumps(run.profile, indent=1) + "\n")
    return result


class BuildOptions(TypedDict, total=False):
    """The options of `build`, for functions that pass them on."""

    text_field: str
    separator: str | None
    workers: int | None
    memory: int | str | None
    limit: int | None
    val: float
    eos: str | bool | None
    bos: str | bool
    special_tokens: str
    format: str
    template: str | None
    prompt_field: str
    completion_field: str
    messages_field: str | None
    chat_template: PathInput | None
    chat_date: str | None
    chat_template_kwargs: str | Mapping[str, object] | None
    train_on: str
    max_length: int | None
    too_long: str
    engine: str
    max_rejects: float
    unit_bytes: int | str | None
    prune: bool
    rebuild: bool
    verify_sources: bool
    pin: bool
    serial: bool
    runner: str
    address: str | None
    part: str | None


def make_run(
    inputs: PathInput | Sequence[PathInput],
    *,
    tokenizer: PathInput,
    out: PathInput,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[BuildOptions],
) -> BuildRun:
    """Check the options and put them into a run that can be carried out or estimated."""
    given = as_list(inputs)
    eos, bos = options.get("eos"), options.get("bos", False)
    unit_bytes, memory = options.get("unit_bytes"), options.get("memory")
    config = BuildConfig(
        text_field=corpora.text_field(given, asked=options.get("text_field", "text")),
        separator=options.get("separator"),
        unit_bytes=None if unit_bytes is None else parse_size(unit_bytes),
        special_tokens=options.get("special_tokens", "text"),
        eos=eos if isinstance(eos, str) else None,
        add_eos=eos is not False,
        add_bos=bos is not False,
        bos=bos if isinstance(bos, str) else None,
        val_fraction=options.get("val", 0.0),
        limit=options.get("limit"),
        max_reject_fraction=options.get("max_rejects", 0.01),
        shape=_shape(options),
    )
    resources = BuildResources(
        workers=options.get("workers"),
        memory=None if memory is None else parse_size(memory),
        engine=options.get("engine", "auto"),
        pin=options.get("pin", False),
        serial=options.get("serial", False),
        runner=options.get("runner", "local"),
        address=options.get("address"),
    )
    part = options.get("part")
    make = BuildRun if part is None else partial(PartRun, part=parse_part(part))
    return make(
        inputs=[corpora.resolve(each) for each in given],
        tokenizer=tokenizer,
        layout=open_layout(out),
        config=config,
        resources=resources,
        prune=options.get("prune", False),
        rebuild=options.get("rebuild", False),
        verify_sources=options.get("verify_sources", False),
        on_progress=on_progress,
        chat_template=_chat_template(options),
    )


def _shape(options: BuildOptions) -> RowShape | None:
    """How rows become documents; None where they are the text of one field."""
    given = {name: options[name] for name in _SHAPE_OPTIONS if name in options}  # type: ignore[literal-required]
    given["chat_template_kwargs"] = _kwargs(options.get("chat_template_kwargs"))
    shape = RowShape(**given)
    return None if shape == RowShape() else shape


def _kwargs(given: str | Mapping[str, object] | None) -> str | None:
    """More variables for a chat template, written in one way: they are part of who a store is."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return str(given)  # which is refused, and why, with the other options
    return None if given is None else json.dumps(given, sort_keys=True)


def _chat_template(options: BuildOptions) -> str | None:
    given = options.get("chat_template")
    if given is not None and options.get("format") != "chat":
        raise UsageError(
            f"chat_template={str(given)!r} has no meaning for the format "
            f"{options.get('format', 'text')!r}",
            hint="leave it out, or use --format chat",
        )
    return None if given is None else str(given)


def as_list(inputs: PathInput | Sequence[PathInput]) -> list[PathInput]:
    """Inputs as a list, where one alone may be given too."""
    if isinstance(inputs, str | os.PathLike):
        return [inputs]
    return list(inputs)
