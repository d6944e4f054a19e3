"""Who a store is: its tokenizer, its boundary tokens and its configuration, with one fingerprint.

Units carry the fingerprint in their receipts. Two units with different fingerprints must never
stand in one store, since nothing in the ids would show it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill._version import __version__
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.describe import describe
from tokenmill.engines.locate import find_tokenizer, resolve_bos, resolve_eos
from tokenmill.errors import StoreError
from tokenmill.store.durable import replace_file
from tokenmill.store.facts import (
    FORMAT_VERSION,
    BoundaryToken,
    StoreIdentity,
    TokenizerFacts,
    facts_of,
)
from tokenmill.store.receipts import read_manifest
from tokenmill.supervised.templates import digest, read_sources, with_template

if TYPE_CHECKING:
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.locate import TokenizerFiles
    from tokenmill.options import BuildOptions
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.receipts import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The tokenizer and configuration that a build asks for."""

    files: TokenizerFiles
    identity: StoreIdentity
    info: TokenizerInfo | None
    """None where the store's own word was taken for it; `describe_kept` has it then."""


def request_identity(options: BuildOptions, layout: StoreLayout) -> Request:
    """Resolve tokenizer and configuration; cheap if the store was built with the same ones."""
    files = find_tokenizer(options.tokenizer)
    settings = options.identity()
    shape = options.shape
    is_chat = shape is not None and shape.format == "chat"
    if is_chat:
        files = with_template(files, options.chat_template)
        settings["chat_template"] = digest(read_sources(files.files))
    facts = {name: facts_of(path.read_bytes()) for name, path in files.files.items()}
    manifest = known_manifest(layout)
    known = None if manifest is None else manifest.identity
    if (
        known is not None
        and known.tokenizer.files == facts
        and known.tokenizer.kind == str(files.kind)
        and dict(known.config) == settings
    ):
        return Request(files=files, identity=known, info=None)
    info = describe(files, policy=SpecialTokens(options.special_tokens))
    # A chat has the tokens that its template writes, and no others.
    eos = None if options.eos is False or is_chat else resolve_eos(info, _name(options.eos))
    bos = None if options.bos is False else resolve_bos(info, _name(options.bos))
    content = {
        "format_version": FORMAT_VERSION,
        "tokenizer": info.fingerprint,
        "eos": eos,
        "bos": bos,
        "config": settings,
    }
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True).encode()
    identity = StoreIdentity(
        created_by=f"tokenmill {__version__}",
        tokenizer=TokenizerFacts(
            kind=str(info.kind),
            fingerprint=info.fingerprint,
            vocab_size=info.vocab_size,
            files=facts,
        ),
        eos=None if eos is None else BoundaryToken(token=eos[0], id=eos[1], position="end"),
        bos=None if bos is None else BoundaryToken(token=bos[0], id=bos[1], position="start"),
        special_tokens=options.special_tokens,
        config=settings,
        fingerprint=hashlib.sha256(canonical).hexdigest(),
        mask=shape is not None and shape.has_mask,
    )
    return Request(files=files, identity=identity, info=info)


def _name(token: str | bool | None) -> str | None:
    return token if isinstance(token, str) else None


def describe_kept(layout: StoreLayout, request: Request) -> TokenizerInfo:
    """The tokenizer as the workers load it: from the copy in the store."""
    policy = SpecialTokens(request.identity.special_tokens)
    info = request.info or describe(request.files, policy=policy)
    return dataclasses.replace(info, files={name: layout.tokenizer / name for name in info.files})


def known_manifest(layout: StoreLayout) -> Manifest | None:
    """The manifest of a store that is complete."""
    if not layout.manifest.exists():
        return None
    try:
        return read_manifest(layout.root)
    except StoreError:
        return None


def describe_difference(layout: StoreLayout, asked: StoreIdentity) -> str:
    """What is different about a store's own configuration, in words."""
    manifest = known_manifest(layout)
    if manifest is None:
        return "its units carry another fingerprint"
    known = manifest.identity
    changes = []
    if known.tokenizer.fingerprint != asked.tokenizer.fingerprint:
        changes.append(
            f"tokenizer {known.tokenizer.fingerprint[:12]} -> {asked.tokenizer.fingerprint[:12]}"
        )
    for name, before, after in (("eos", known.eos, asked.eos), ("bos", known.bos, asked.bos)):
        if before != after:
            old, new = (repr(token.token) if token else "none" for token in (before, after))
            changes.append(f"{name} {old} -> {new}")
    for name, value in asked.config.items():
        if name not in {"eos", "bos"} and known.config.get(name) != value:
            changes.append(f"{name} {known.config.get(name)!r} -> {value!r}")
    return ", ".join(changes) or "its units carry another fingerprint"


def keep_tokenizer(layout: StoreLayout, request: Request) -> None:
    """Copy the tokenizer's files into the store, so that it needs nothing else to be read."""
    layout.tokenizer.mkdir(parents=True, exist_ok=True)
    wanted = request.identity.tokenizer.files
    for stray in {path.name for path in layout.tokenizer.iterdir()} - set(wanted):
        path = layout.tokenizer / stray
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        layout.upstream.remove([path])
    for name, source in request.files.files.items():
        target = layout.tokenizer / name
        if target.exists() and facts_of(target.read_bytes()) == wanted[name]:
            continue
        data = source.read_bytes()
        if facts_of(data) != wanted[name]:
            raise StoreError(
                f"the tokenizer file {str(source)!r} changed while it was read",
                hint="run the same command again",
            )
        replace_file(layout, target, data)
