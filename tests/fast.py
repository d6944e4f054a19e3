"""Which tests are fast: those that start no process, use no network and sync no file.

A test is fast unless its code, or that of the fixtures and helpers of tests/ it uses, has one of
the names below, which do such a thing or lead to it. Where fast tests are selected, they are
watched: one that does such a thing all the same fails, until the name that led to it is added.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAMES = frozenset(
    # processes
    {"subprocess", "Popen", "fork", "multiprocessing", "DataLoader", "LocalRunner", "run_way"}
    | {"NotebookClient"}
    # connections
    | {"socket", "ThreadingHTTPServer"}
    # files that are synced
    | {"fsync", "sync_folder", "write_synced", "replace_file", "HashedFile", "UnitWriter"}
    | {"write_manifest", "write_hollow", "PlanWriter", "Checkpoints", "make_run"}
    # what does some of these
    | {"WorkerStart", "ask", "import_ids", "import_bytes", "demo_steps", "measure", "measure_case"}
    | {"build", "export_store", "import_store", "convert", "diagnose", "train", "finish"}
)
EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "socket.connect", "socket.bind"}
)
HOME = str(Path(__file__).parent)


def is_fast(item: pytest.Item) -> bool:
    """Whether no name that this test uses, however far away, is one of the above."""
    if not isinstance(item, pytest.Function):
        return False
    roots: list[object] = [item.function]
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        roots += [fixture.func for fixture in fixtures]
    if hasattr(item, "callspec"):
        roots += item.callspec.params.values()
    return NAMES.isdisjoint(_names(roots))


def _names(roots: Iterable[object]) -> Iterator[str]:
    """The names in the code of these, and of functions and classes of tests/ that it names."""
    found, seen = list(roots), dict[int, object]()
    while found:
        it = found.pop()
        if id(it) in seen:
            continue
        seen[id(it)] = it
        if isinstance(it, types.FunctionType):
            found += _wrapped(it)
            if it.__code__.co_filename.startswith(HOME):
                names = _in_code(it.__code__)
                yield from names
                found += _named(names, it.__globals__)
        elif isinstance(it, type):
            yield it.__name__
            if _is_ours(sys.modules.get(it.__module__)):
                found += [*vars(it).values(), *it.__bases__]
        elif isinstance(it, property):
            found.append(it.fget)
        elif isinstance(it, classmethod | staticmethod):
            found.append(it.__func__)
        elif isinstance(it, dict):
            found += it.values()
        elif isinstance(it, list | tuple):
            found += it[:100]
        elif not isinstance(it, types.ModuleType):
            found.append(type(it))


def _wrapped(function: types.FunctionType) -> Iterator[object]:
    """What decorators keep, `given` of hypothesis among them."""
    yield getattr(function, "__wrapped__", None)
    yield getattr(getattr(function, "hypothesis", None), "inner_test", None)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is not filled yet
            yield cell.cell_contents


@functools.cache
def _in_code(code: types.CodeType) -> frozenset[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_in_code, inner))


def _named(names: frozenset[str], space: dict[str, object]) -> Iterator[object]:
    """What the names are, in a module or in modules of tests/ that are imported there or here."""
    for name in names:
        it = importlib.import_module(name) if name.startswith("tests.") else space.get(name)
        if not isinstance(it, types.ModuleType):
            yield it
        elif _is_ours(it):
            yield from (vars(it)[each] for each in names & vars(it).keys())


def _is_ours(module: types.ModuleType | None) -> bool:
    return str(getattr(module, "__file__", None)).startswith(HOME)


# ---- The watch: the hook of a process cannot be taken back, so it is there once.

_is_watching = False
_events: list[str] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _is_watching and event in EVENTS:
        _events.append(f"{event} {str(arguments)[:200]}")


sys.addaudithook(_note)


@contextlib.contextmanager
def watched(item: pytest.Item) -> Iterator[None]:
    """Fail if a fast test starts, connects or syncs something meanwhile, in whichever thread."""
    global _is_watching
    if item.get_closest_marker("fast") is None or "fast" not in item.config.option.markexpr:
        yield
        return
    sync = os.fsync

    def noted(fd: Any) -> None:
        _events.append("os.fsync")
        sync(fd)

    _events.clear()
    os.fsync, _is_watching = noted, True
    try:
        yield
    finally:
        os.fsync, _is_watching = sync, False
    if _events:
        pytest.fail(
            f"a fast test starts no process, uses no network and syncs no file, but this did:"
            f" {_events[0]}; add the name that led to it to NAMES in tests/fast.py",
            pytrace=False,
        )
