"""What is audited, and its batches: of whatever kind they are, they become rows.

    AuditedLoader --make--> loader --read_batches, read_ranks--> RankRows of AuditRow

A loader is a function, named or itself, that gives batches (dicts, pairs or arrays of ids), or an
iterable of them. A row comes without its padding, which is told from ids only where an attention
mask does not say it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import pickle
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tokenmill.auditing.lookup import WINDOW
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.loader.batch import IGNORED
from tokenmill.words import listed

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from tokenmill.auditing.lookup import Bools, Ids
    from tokenmill.options import AuditOptions


NAMES = {
    "ids": "input_ids inputs input tokens x",
    "labels": "labels targets target label y",
    "positions": "position_ids positions input_pos",
    "counts": "loss_mask loss_masks assistant_masks completion_mask",
    "documents": "doc_ids document_ids seq_idx segment_ids sequence_ids",
    "ends": "cu_seqlens cu_seq_lens_q cu_seqlens_q",
    "attention": "attention_mask",
}
# What a batch is in a list of arrays without names.
PLACES = ("ids", "labels", "counts")
# Of the same id at the end of a row, from which on they are padding.
LEAST_RUN = 3


class AuditRow(NamedTuple):
    """A row without its padding."""

    rank: int
    batch: int
    number: int  # in its batch
    ids: Ids
    labels: Ids | None
    counts: Bools | None  # as a loss mask says, at the places of labels
    restarts: Bools | None  # where positions begin again; None where there are none
    marks: Bools | None  # where documents begin by all else that a batch says
    has_attention: bool  # a mask of two dimensions came along
    padding: int
    trained_padding: int  # of which a label is not ignored

    @property
    def name(self) -> str:
        rank = f"rank {self.rank}, " if self.rank else ""
        return f"{rank}batch {self.batch}, row {self.number}"

    @property
    def is_divided(self) -> bool:
        """Whether the batch says where documents begin inside of the row."""
        return any(
            each is not None and bool(each[1:].any()) for each in (self.restarts, self.marks)
        )


def to_array(value: Any) -> NDArray[Any] | None:
    """Numbers of a batch on the CPU; None where it is none."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "iub" else None
    if isinstance(value, list | tuple) and len(value):
        with contextlib.suppress(ValueError, TypeError):
            found = np.asarray(value)
            return found if found.dtype.kind in "iub" else None
    return None


def fields_of(batch: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a batch by what they are for."""
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[0], Mapping):
        # A mapping of inputs, and the labels.
        return fields_of(batch[0]) | {"labels": cast("NDArray[Any]", to_array(batch[1]))}
    found: dict[str, NDArray[Any] | None] = {}
    if isinstance(batch, Mapping):
        named: Mapping[str, Any] = batch
    elif hasattr(batch, "input_ids"):
        names = " ".join(NAMES.values()).split()
        named = {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    elif isinstance(batch, tuple | list) and any(np.ndim(to_array(e)) for e in batch):  # type: ignore[arg-type]
        named = {}
        found = dict(zip(PLACES, map(to_array, batch), strict=False))
    else:
        named, found = {}, {"ids": to_array(batch)}
    for kind, names_of in NAMES.items():
        for name in names_of.split():
            if kind not in found and name in named:
                found[kind] = to_array(named[name])
    arrays = {kind: array for kind, array in found.items() if array is not None}
    if "ids" not in arrays or arrays["ids"].ndim not in (1, 2):
        what = f"a {type(batch).__name__}"
        if named:
            what += f" with {listed(sorted(map(str, named)))}"
        raise UsageError(
            f"the loader gave {what}, in which no ids of rows were found; nothing can be said"
            " of it",
            hint="give dicts with input_ids (rows, tokens) and labels, or pairs of such arrays",
        )
    return arrays


def rows_of(batch: Any, *, rank: int, number: int, pads: Collection[int]) -> Iterator[AuditRow]:
    """The rows of a batch."""
    arrays = fields_of(batch)
    ids = np.atleast_2d(arrays["ids"])
    shape = ids.shape

    def like(kind: str) -> NDArray[Any] | None:
        found = arrays.get(kind)
        return None if found is None or found.size != ids.size else found.reshape(shape)

    labels, positions, counts = like("labels"), like("positions"), like("counts")
    documents, attention = like("documents"), like("attention")
    starts: Bools | None = None
    for named in (documents, attention if attention is not None and attention.max() > 1 else None):
        if named is not None:
            starts = np.zeros(shape, bool)
            starts[:, 1:] = named[:, 1:] != named[:, :-1]
    if starts is None and "ends" in arrays:
        # Over all rows, one after the other; the last one may be repeated.
        ends = arrays["ends"].ravel()
        starts = np.zeros(shape, bool)
        starts.reshape(-1)[ends[(ends > 0) & (ends < ids.size)]] = True
    square = arrays.get("attention")
    if starts is None and square is not None and square.ndim > 2 and square.shape[-1] == shape[1]:
        seen = square.reshape(len(square), -1, shape[1], shape[1])[:, 0]
        before = np.diagonal(seen, offset=-1, axis1=1, axis2=2)
        starts = np.zeros(shape, bool)
        starts[: len(before), 1:] = ~before if before.dtype == bool else before == 0
    for row in range(len(ids)):
        own = None if labels is None else labels[row]
        begin, end = kept_range(
            ids[row], own, None if attention is None else attention[row], pads=pads
        )
        kept = slice(begin, end)
        outside = np.ones(shape[1], bool)
        outside[kept] = False
        restarts = None
        if positions is not None:
            restarts = positions[row, kept] == 0
        yield AuditRow(
            rank=rank,
            batch=number,
            number=row,
            ids=ids[row, kept].astype(np.int32),
            labels=None if own is None else own[kept].astype(np.int32),
            counts=None if counts is None else counts[row, kept].astype(bool),
            restarts=restarts,
            marks=None if starts is None else starts[row, kept],
            has_attention=attention is not None and attention.max() <= 1,
            padding=shape[1] - (end - begin),
            trained_padding=0 if own is None else int((own[outside] != IGNORED).sum()),
        )


def kept_range(
    ids: NDArray[Any],
    labels: NDArray[Any] | None,
    attention: NDArray[Any] | None,
    *,
    pads: Collection[int],
) -> tuple[int, int]:
    """Where a row begins and ends without padding."""
    if attention is not None and not attention.all():
        kept = np.flatnonzero(attention)
        return (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
    others = np.flatnonzero(ids != ids[-1])
    end = int(others[-1]) + 1 if len(others) else 0
    run = len(ids) - end
    is_pad = int(ids[-1]) in pads
    ignored = labels is not None and bool((labels[end + 1 :] == IGNORED).all())
    if run >= (2 if is_pad and ignored else LEAST_RUN if is_pad else WINDOW) and (
        is_pad or ignored
    ):
        # Its first may be the end of the last document.
        return 0, end + is_pad
    return 0, len(ids)


@dataclass(kw_only=True, slots=True)
class RankRows:
    """What one rank read."""

    rows: list[AuditRow] = field(default_factory=list)
    batches: int = 0
    is_whole: bool = False  # the loader ended by itself


def read_batches(
    loader: Any, *, batches: int, rank: int, pads: Collection[int], first: int = 0
) -> RankRows:
    """Up to so many batches."""
    found = RankRows()
    with naming("the loader"):
        iterator = iter(loader)
        for batch in itertools.islice(iterator, batches):
            found.rows += rows_of(batch, rank=rank, number=first + found.batches, pads=pads)
            found.batches += 1
        found.is_whole = found.batches < batches or next(iterator, None) is None
    return found


# -------------------------------------------------------------------------------------------------
# What is audited: a function, by its name or itself, or an iterable.

ASKED = ("rank", "world_size", "epoch", "skip")


class AuditedLoader:
    """Something that gives loaders."""

    def __init__(self, target: Any) -> None:
        self.target = target
        found: Any = load_function(target) if isinstance(target, str) else target
        is_class = inspect.isclass(found)
        self.is_function = is_class or (callable(found) and not hasattr(found, "__iter__"))
        if not self.is_function and not hasattr(found, "__iter__"):
            raise UsageError(
                f"{found!r} is neither a function nor an iterable, so it gives no batches",
                hint="name a function that gives a loader: tokenmill audit my_data:train_loader",
            )
        self.function: Callable[..., Any] = found if self.is_function else lambda: found
        self.takes = self._parameters() if self.is_function else ()

    @property
    def name(self) -> str:
        if isinstance(self.target, str):
            return self.target
        return str(getattr(self.target, "__name__", type(self.target).__name__))

    def _parameters(self) -> tuple[str, ...]:
        try:
            own = inspect.signature(self.function).parameters
        except ValueError:  # a type of C does not say
            return ()
        needed = [
            name
            for name, each in own.items()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            and name not in ASKED
        ]
        if needed:
            raise UsageError(
                f"{self.name} needs {listed(needed)}, which the audit does not know",
                hint=f"give defaults to all of its arguments but {listed(ASKED)}",
            )
        return tuple(name for name in ASKED if name in own)

    def make(self, **values: int) -> Any:
        """A loader, told of these what it takes."""
        with naming(self.name):
            return self.function(**{name: values[name] for name in self.takes if name in values})


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Say of an error that it is the loader's own."""
    try:
        yield
    except TokenmillError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name} failed: {type(error).__name__}: {error}",
            hint="it is an error of the loader itself; on the command line --debug shows where",
        ) from error


def load_function(target: str) -> Any:
    """What a name such as `my_data:train_loader` or `my_data.py:train_loader` stands for."""
    module, colon, name = target.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise UsageError(
            f"{target!r} does not name a function",
            hint="write it as MODULE:FUNCTION, such as my_data:train_loader or data.py:loader",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        if module.endswith(".py"):
            path = Path(module)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if not path.is_file() or spec is None or spec.loader is None:
                raise UsageError(f"there is no file {module!r}", hint="give the path of a .py file")
            made = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = made
            spec.loader.exec_module(made)
        else:
            try:
                made = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise
                file = f"{module.replace('.', '/')}.py"
                hint = f"start it in the folder of {error.name}, or name the file: {file}:{name}"
                raise UsageError(f"there is no module {error.name!r}", hint=hint) from error
        if not hasattr(made, name):
            raise UsageError(f"{module!r} has no {name!r}", hint=f"define it: def {name}(): ...")
        return getattr(made, name)
    finally:
        sys.path.pop(0)


def read_ranks(source: AuditedLoader, asked: AuditOptions, pads: Collection[int]) -> list[RankRows]:
    """What each rank reads in one epoch."""
    alike: dict[str, Any] = {"batches": asked.batches, "pads": pads}
    if "rank" in source.takes:
        return [
            read_batches(
                source.make(rank=rank, world_size=asked.ranks, epoch=0, skip=0), rank=rank, **alike
            )
            for rank in range(asked.ranks)
        ]
    if not isinstance(source.target, str):
        raise UsageError(
            f"ranks={asked.ranks}, but {source.name} takes no argument rank; it would give every"
            " rank the same rows here, whatever it does under torchrun",
            hint="let it take rank and world_size, or name it as a string: 'module:function', which"
            " is called in a process for each rank with torchrun's environment variables",
        )
    # As torchrun starts them: the loader asks the environment, or torch.distributed, who it is.
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        paths = [Path(folder) / f"{rank}" for rank in range(asked.ranks)]
        processes = [
            context.Process(
                target=_read_one_rank,
                args=(source.target, rank, asked.ranks, port, str(path), alike),
                daemon=False,
            )
            for rank, path in enumerate(paths)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        if lost := [str(rank) for rank, path in enumerate(paths) if not path.exists()]:
            raise UsageError(
                f"{source.name} failed on rank {listed(lost)} of {asked.ranks}; its error is above",
                hint="run it alone: tokenmill audit " + shlex.quote(source.target),
            )
        return [pickle.loads(path.read_bytes()) for path in paths]


def _read_one_rank(
    target: str, rank: int, world_size: int, port: int, path: str, alike: dict[str, Any]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    found = read_batches(AuditedLoader(target).make(epoch=0, skip=0), rank=rank, **alike)
    partial = Path(path + ".part")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(path)
