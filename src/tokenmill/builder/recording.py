"""A build with its time line written beside it: `build(monitor=FILE)`.

The time line is no part of the store: it may not lie in it, nor among the input, where the next run
would take it for text. It has no names of input files or tokenizers, which may be URLs with keys.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.monitor import record

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tokenmill.builder.progress import BuildResult, Progress
    from tokenmill.builder.run import BuildRun

    PathInput = str | os.PathLike[str]


def run_recorded(run: BuildRun, path: PathInput) -> BuildResult:
    """Carry out the build and record it; a time line that breaks off becomes a warning."""
    refuse_bad_place(Path(path), store=run.layout.root, inputs=run.inputs)
    recorder = record(path, facts=_facts(run))
    on_progress = run.on_progress

    def tell(progress: Progress) -> None:
        recorder.note(phase=progress.phase, input_bytes=progress.bytes_done, tokens=progress.tokens)
        if on_progress is not None:
            on_progress(progress)

    run.on_progress = tell
    with recorder:
        result = run.run()
    if recorder.problem is None:
        return result
    warning = f"the time line {str(path)!r} ends early: {recorder.problem}"
    return dataclasses.replace(result, warnings=(*result.warnings, warning))


def refuse_bad_place(path: Path, *, store: Path, inputs: Sequence[PathInput]) -> None:
    """UsageError where a time line would get into the store or among the input."""
    place = path.absolute().resolve()
    if store.absolute().resolve() in (place, *place.parents):
        raise UsageError(
            f"the time line {str(path)!r} would lie in the store; a store holds nothing else",
            hint=f"put it beside the store: --monitor {shlex.quote(store.name)}-timeline.jsonl",
        )
    for each in inputs:
        source = Path(each).absolute()
        if source.resolve() in (place, *place.parents) or fnmatch.fnmatch(str(place), str(source)):
            raise UsageError(
                f"the time line {str(path)!r} would lie among the input {str(each)!r}; the next "
                "run would take it for text",
                hint="put it in another folder, such as that of --out",
            )


def _facts(run: BuildRun) -> dict[str, object]:
    return {
        "store": run.layout.name.rpartition("/")[2],
        "inputs": len(run.inputs),
        "resources": dataclasses.asdict(run.resources),
        "config": dataclasses.asdict(run.config),
    }
