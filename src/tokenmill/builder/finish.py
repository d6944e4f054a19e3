"""The verb `finish`: the parts of a build become a store.

It plans the units once more, as a build does, and builds none: a unit that is not there is named
with the part that has it. What the parts were asked for is in their records.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.builder.build import as_list
from tokenmill.builder.memory import MemoryPlan
from tokenmill.builder.outcome import held_by, make_result
from tokenmill.builder.parts import describe_missing
from tokenmill.builder.plan import WorkPlan
from tokenmill.builder.run import BuildRun
from tokenmill.config import BuildConfig, BuildResources, RowShape
from tokenmill.engines.locate import CHAT_TEMPLATE
from tokenmill.errors import BuildError, SourceError, StoreError, UsageError
from tokenmill.sources import Discovery
from tokenmill.store.manifest import read_manifest
from tokenmill.store.parts import read_records
from tokenmill.store.place import open_layout

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tokenmill.builder.progress import BuildResult, Progress
    from tokenmill.builder.run import Work
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.parts import PartRecord

    PathInput = str | os.PathLike[str]

_MOST_SHOWN = 8
_RUN_WHERE = (
    "run it in the folder where the parts ran, or name the inputs: tokenmill finish STORE INPUT..."
)


@dataclass(kw_only=True)
class FinishRun(BuildRun):
    """A build that may not build anything."""

    parts: int

    def refuse(self, work: Work) -> None:
        """Stop where a unit is missing, beside what stops every build."""
        super().refuse(work)
        if not work.plan.tasks:
            return
        missing, of_parts = describe_missing(work.plan.tasks, self.parts)
        again = ", ".join(f"{part}/{self.parts}" for part in of_parts[:_MOST_SHOWN])
        more = ", ..." if of_parts[_MOST_SHOWN:] else ""
        raise BuildError(
            f"{self.layout.name!r} lacks {missing}; a store without them would be read as if it "
            "were whole",
            hint=f"run these parts again, then finish: --part {again}{more}",
        )


def finish(
    store: PathInput,
    inputs: PathInput | Sequence[PathInput] = (),
    *,
    prune: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> BuildResult:
    """Check that every unit of a build in parts is there, and write the manifest.

    The inputs are taken from what the parts left in the store; name them only where they hold keys.
    `prune` drops what files left that are no longer among them.
    """
    layout = open_layout(store)
    try:
        layout.upstream.begin()
        records = read_records(layout)
        if not records:
            return _nothing_to_finish(layout, prune=prune)
        run = _run(layout, records, as_list(inputs), prune=prune, on_progress=on_progress)
        return run.run()
    except SourceError as error:
        raise SourceError(error.message, hint=_RUN_WHERE) from error
    finally:
        layout.upstream.close()


def _run(
    layout: StoreLayout,
    records: list[PartRecord],
    inputs: list[PathInput],
    *,
    prune: bool,
    on_progress: Callable[[Progress], None] | None,
) -> FinishRun:
    record = _agreed(records)
    names = inputs or [*(record.inputs or ())]
    if not names:
        raise UsageError(
            "the parts did not keep the names of their inputs, since those hold a key",
            hint="name them: tokenmill finish STORE INPUT...",
        )
    kept = (
        {path.name for path in layout.tokenizer.iterdir()} if layout.tokenizer.is_dir() else set()
    )
    chat_template = layout.tokenizer / CHAT_TEMPLATE
    return FinishRun(
        inputs=names,
        # The tokenizer `bytes` is the one that has no files.
        tokenizer=layout.tokenizer if kept - {CHAT_TEMPLATE} else "bytes",
        chat_template=str(chat_template) if CHAT_TEMPLATE in kept else None,
        layout=layout,
        config=_config(record),
        resources=BuildResources(workers=1),
        prune=prune,
        rebuild=False,
        on_progress=on_progress,
        # Parts on machines of other sizes may differ in it; a unit that it matters for is missing.
        document_bytes=max(each.max_document_bytes for each in records),
        parts=record.parts,
    )


def _agreed(records: list[PartRecord]) -> PartRecord:
    """What all parts were asked for; StoreError where they were not asked for the same."""
    first = records[0]
    for other in records[1:]:
        asked, also = ((each.fingerprint, each.config, each.inputs) for each in (first, other))
        if asked != also:
            raise StoreError(
                f"part {first.part}/{first.parts} and part {other.part}/{other.parts} were started "
                "with different inputs, options or tokenizers; together they would be neither",
                hint="run all parts with the same command, --part left out of the comparison",
            )
    # After a change of their number, most of the records are of the parts that were run last.
    return max(records, key=lambda each: (sum(r.parts == each.parts for r in records), each.parts))


def _config(record: PartRecord) -> BuildConfig:
    values: dict[str, Any] = dict(record.config)
    try:
        if (shape := values.get("shape")) is not None:
            values["shape"] = RowShape(**shape)
        return BuildConfig(**values)
    except TypeError as error:
        raise StoreError(
            f"the parts were built by another version of tokenmill: {error}",
            hint="finish with the version that built them",
        ) from error


def _nothing_to_finish(layout: StoreLayout, *, prune: bool) -> BuildResult:
    """The result for a store that is finished, whose inputs nobody knows any more.

    StoreError where no part was ever built.
    """
    if not layout.manifest.exists():
        if layout.shards.is_dir():
            raise StoreError(
                f"{layout.name!r} is not built in parts, and its build has not finished",
                hint="run that build again with the same command: it resumes",
            )
        raise StoreError(
            f"there is no store at {layout.name!r}, and no part of one",
            hint="check the name; parts are built with: tokenmill build ... -o "
            f"{shlex.quote(layout.name)} --part 1/64",
        )
    if prune:
        raise UsageError(
            f"{layout.name!r} is finished, and what its parts were asked for is kept no longer: "
            "finish cannot tell which files are gone",
            hint="run one of the parts again, which looks at the inputs, then finish --prune; or "
            "the build without --part, with --prune",
        )
    manifest = read_manifest(layout.root)
    return make_result(
        held_by(manifest),
        store=layout.name,
        discovery=Discovery(files=(), skipped=()),
        plan=WorkPlan(files=()),
        memory=MemoryPlan(budget=0, workers=0, worker_bytes=0, batch_bytes=0),
        monitor=None,
        seconds=0.0,
    )
