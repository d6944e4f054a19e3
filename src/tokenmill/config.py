"""A file with the options of a build: read for `build -c FILE`, and written of a store.

    build.toml -> read_config -> values, by the names that the options have in Python
    a store    -> config_of   -> the text of such a file, of which a build makes the same store

Paths in it start where the command runs, as those on the command line do, and not where the file
is: a path is part of who a store is, as its shards are named after the paths of their sources.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from tokenmill.engines.load import CHAT_TEMPLATE
from tokenmill.errors import StoreError, UsageError
from tokenmill.files import local_path, refuse_secrets
from tokenmill.options import BuildOptions, RowShape, flags_of
from tokenmill.store.layout import unseal, visit_layout
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from tokenmill.files import PathInput

# How values of TOML are called, and one to paste.
_KINDS = {
    str: ("a text", '"..."'),
    bool: ("true or false", "true"),
    int: ("a whole number", "4"),
    float: ("a number", "0.01"),
    list: ("a list of texts", '["...", "..."]'),
    dict: ("a table", "{ name = true }"),
}
# What may be in no string of TOML, or would act on a terminal.
_ESCAPED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def _allowed() -> dict[str, tuple[type, ...]]:
    """The keys of a file, and the kinds of value that each takes."""
    names = {"PathInput": str, "Sequence": Sequence, "Mapping": Mapping}
    declared = {each.name: str(each.type) for each in dataclasses.fields(BuildOptions)}
    kept = ("unit_bytes", *flags_of(BuildOptions))
    return {"inputs": (str, list)} | {name: _kinds(eval(declared[name], names)) for name in kept}


def _kinds(annotation: Any) -> tuple[type, ...]:
    origin = get_origin(annotation)
    if origin in (types.UnionType, Union):
        return tuple(kind for each in get_args(annotation) for kind in _kinds(each))
    kind = {Sequence: list, Mapping: dict}.get(origin or annotation, annotation)
    return () if kind is type(None) else (kind,)


def read_config(path: PathInput) -> dict[str, Any]:
    """The options that a file has; UsageError where it has what no build takes."""
    name = repr(str(path))
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"--config {name}: there is no such file",
            hint="give a file with options, such as: tokenmill build -c build.toml; of a dataset "
            "on the hub name the files of the subset: 'hf://datasets/OWNER/NAME/SUBSET/*.parquet'",
        ) from None
    except OSError as error:
        raise UsageError(f"--config {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        hint = 'write lines such as: tokenizer = "tokenizer.json"'
        raise UsageError(f"{name} is no TOML: {error}", hint=hint) from error
    allowed = _allowed()
    for key, value in found.items():
        if key not in allowed:
            near = difflib.get_close_matches(key.replace("-", "_"), allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it may have: {', '.join(allowed)}"
            hint = (
                f"write the options without the header [{key}]" if isinstance(value, dict) else hint
            )
            raise UsageError(f"{name} has {key!r}, which is no option of a build", hint=hint)
        found[key] = _checked(f"{name}: {key}", value, allowed[key])
    return found


def _checked(what: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) is int and float in kinds:
        value = float(value)
    texts = value if isinstance(value, list) else [value]
    if type(value) not in kinds or (isinstance(value, list) and {*map(type, value)} - {str}):
        wanted = " or ".join(dict.fromkeys(_KINDS[kind][0] for kind in kinds))
        raise UsageError(
            f"{what} = {value!r} is not {wanted}",
            hint=f"write it as: {what.rpartition(' ')[2]} = {_KINDS[kinds[0]][1]}",
        )
    for text in texts:
        if isinstance(text, str) and ":/" in text:
            refuse_secrets(text)
    return value


# -------------------------------------------------------------------------------------------------
# The file of a store. What decides its bytes is in the manifest; how the input was named, and what
# cut it short or let it pass, is in the log of its builds, which stores of before do not say.


def config_of(path: PathInput) -> str:
    """The text of a file of which `build` makes the same store."""
    name, local = str(path).rstrip("/"), local_path(path)
    store = Store(path, split=None)
    if store.view is not None:
        base = str(store.base.path)
        raise UsageError(
            f"{name!r} is a view, and nothing was built for it",
            hint=f"name its store instead: {base}",
        )
    identity = store.manifest.identity
    if "import" in identity.config:
        raise UsageError(
            f"{name!r} was imported, not built: options of a build do not make it",
            hint="see what it was made of with: tokenmill inspect STORE",
        )
    files = {*identity.tokenizer.files}
    tokenizer = f"{name}/tokenizer" if local is not None else "tokenizer"
    given: dict[str, Any] = {
        "tokenizer": tokenizer if files - {CHAT_TEMPLATE} else "bytes",
        "chat_template": f"{tokenizer}/{CHAT_TEMPLATE}" if CHAT_TEMPLATE in files else None,
        "out": name,
        "allow_empty": not store.manifest.totals.documents,
    }
    notes = [f"# Of the store {json.dumps(name)}; see docs/guide.md, A file of options."]
    if local is None and files:
        notes.append("# Copy the store's folder tokenizer/ to this machine first.")
    inputs, kept = _logged(path)
    if kept is None:
        notes.append("# Its log does not say how the inputs were named: these are the files.")
        options = BuildOptions(inputs=_source_paths(store), **_kept_of(store), **given)
    else:
        options = BuildOptions.of_kept(kept, inputs=inputs, **given)
    return "\n".join((*notes, *_lines(options), ""))


def _logged(path: PathInput) -> tuple[list[str], dict[str, Any] | None]:
    """The inputs of all builds that made a store, and the options of the last."""
    layout = visit_layout(path)
    layout.upstream.download([layout.runs])
    inputs: dict[str, None] = {}
    kept: dict[str, Any] | None = None
    try:
        lines = layout.runs.read_bytes().splitlines(keepends=True)
        for run in (unseal(line, path=layout.runs) for line in lines):
            named, asked = run.get("inputs"), run.get("options")
            if not isinstance(named, list) or not isinstance(asked, dict):
                return [], None
            kept, inputs = asked, ({} if run.get("anew") else inputs)
            inputs |= dict.fromkeys(map(str, named))
    except (OSError, StoreError):
        return [], None
    finally:
        layout.upstream.close()
    return [*inputs], kept


def _source_paths(store: Store) -> list[str]:
    found: dict[str, None] = {}
    for unit in store.manifest.units:
        members = store.receipt(unit.name).unit.members
        found |= dict.fromkeys(members or (store.manifest.sources[unit.source].path,))
    return [*found]


def _kept_of(store: Store) -> dict[str, Any]:
    """The options that a manifest says."""
    identity, totals = store.manifest.identity, store.manifest.totals
    config: Mapping[str, Any] = identity.config
    shape = RowShape.of_identity(config)
    unit_bytes = config.get("unit_bytes")
    return {
        **({} if shape is None else dataclasses.asdict(shape)),
        "text_field": config["text_field"],
        "separator": config["separator"],
        "unit_bytes": unit_bytes if isinstance(unit_bytes, int) else None,
        "special_tokens": config["special_tokens"],
        "eos": config["eos"] if config["add_eos"] else False,
        "bos": (config["bos"] or True) if config["add_bos"] else False,
        "val": config["val_fraction"],
        "where": config.get("where"),
        "split_by_name": bool(config.get("split_by_name")),
        "limit": totals.rows - totals.skipped if totals.skipped else None,
    }


def _lines(options: BuildOptions) -> list[str]:
    """A line for each option that is not as by default."""
    declared = {each.name: each for each in dataclasses.fields(options)}
    lines = []
    for name in _allowed():
        value = getattr(options, name)
        if value != declared[name].default:
            lines.append(f"{name} = {_toml(value)}")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        items = "".join(f"    {_toml(each)},\n" for each in value)
        return f"[\n{items}]" if len(value) > 1 else f"[{', '.join(map(_toml, value))}]"
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
