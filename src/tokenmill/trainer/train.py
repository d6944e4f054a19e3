"""`tokenmill.train`: opens the store, then brings in torch and the rest."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING, Unpack

from tokenmill import remote
from tokenmill.errors import MissingExtraError, StoreError, UsageError
from tokenmill.paths import is_remote
from tokenmill.store.reader import Store
from tokenmill.trainer.options import TrainOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.trainer.options import TrainKeywords
    from tokenmill.trainer.progress import TrainProgress, TrainResult

HOW_TO_BUILD = (
    "build one with: tokenmill build FILES --tokenizer TOKENIZER --out {store} --val 0.01"
)


def train(
    store: str | os.PathLike[str] | Store,
    *,
    on_progress: Callable[[TrainProgress], None] | None = None,
    **options: Unpack[TrainKeywords],
) -> TrainResult:
    """Train the reference model on a store; all options are fields of `TrainOptions`.

    >>> tokenmill.train("store", model="small", steps=1000, batch_tokens=524_288, out="run")

    Ctrl-C ends the step, writes a checkpoint, and raises KeyboardInterrupt; `resume=True` goes on.
    """
    known = set(TrainOptions.__dataclass_fields__)
    if unknown := sorted(set(options) - known):
        raise UsageError(
            f"train has no option {', '.join(unknown)}", hint=f"it has: {', '.join(sorted(known))}"
        )
    settled = TrainOptions(**options)
    if is_remote(settled.out):
        raise UsageError(
            f"out={remote.shown(os.fspath(settled.out))!r} is an address; a run is kept on a local"
            " disk",
            hint="use a local folder, and copy it from there: --out run",
        )
    train_split, val_split = open_splits(store)
    if find_spec("torch") is None:
        raise MissingExtraError("torch", extra="torch", purpose="training")
    from tokenmill.trainer.run import run_training

    return run_training(train_split, val_split, settled, on_progress=on_progress)


def open_splits(store: str | os.PathLike[str] | Store) -> tuple[Store, Store | None]:
    """The split train, and val where there is one; an error that says how to make a store."""
    path = store.path if isinstance(store, Store) else store
    shown = remote.shown(os.fspath(path))
    hint = HOW_TO_BUILD.format(store=shlex.quote(shown))
    try:
        found = store if isinstance(store, Store) else Store(path)
    except StoreError as error:
        raise StoreError(error.message, hint=hint) from error
    if not found.num_tokens:
        raise StoreError(f"{shown!r} has no tokens to train on", hint=hint)
    has_val = "val" in found.manifest.splits
    return found, Store(path, split="val") if has_val else None
