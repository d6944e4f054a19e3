"""One part of a build: its units alone, beside other parts, with no manifest at the end.

    plan the part's units  ->  say what was asked for  ->  workers  ->  say how it went

Parts share nothing but the folder of the store. They never remove what they did not write
themselves: leftovers of a part that was killed go when the build is finished.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.builder.outcome import Held, make_result, profile_of, run_record
from tokenmill.builder.run import BuildRun
from tokenmill.errors import StoreError, UsageError
from tokenmill.remote import shown
from tokenmill.store.assemble import tally_units
from tokenmill.store.commit import remove_manifest
from tokenmill.store.facts import bytes_per_token
from tokenmill.store.lock import PartLock
from tokenmill.store.manifest import read_manifest
from tokenmill.store.parts import PartRecord, read_records, write_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.builder.monitor import Monitor
    from tokenmill.builder.parts import Part
    from tokenmill.builder.progress import BuildResult
    from tokenmill.builder.run import Work
    from tokenmill.store.manifest import Manifest
    from tokenmill.store.sealed import Json


@dataclass(kw_only=True)
class PartRun(BuildRun):
    """One call of `build` with a part."""

    part: Part

    def __post_init__(self) -> None:
        if self.prune:
            raise UsageError(
                "a part of a build cannot prune: it does not see the units of the other parts",
                hint="give --prune to tokenmill finish, after all parts",
            )

    def run(self) -> BuildResult:
        """Build and commit the units of this part."""
        self.started = time.monotonic()
        self.profile: dict[str, object] = {}
        discovery = self.discover()
        self.check_folder()
        self.connect()
        corner = f"part-{self.part.number}-of-{self.part.of}-{secrets.token_hex(4)}"
        self.layout = dataclasses.replace(self.layout, corner=corner)
        with PartLock(self.layout) as lock:
            self.lock_token = lock.token
            work = self.prepare(discovery, part=self.part)
            self.refuse(work)
            if self._nothing_to_do(work):
                return self._result_of_part(work, monitor=None)
            return self._work(work)

    def refuse(self, work: Work) -> None:
        """Stop where this part, another one or the finished store has another configuration."""
        if not self.rebuild:
            self._refuse_mixtures(work.request.identity.fingerprint)
        super().refuse(work)

    def _refuse_mixtures(self, fingerprint: str) -> None:
        asked, store = self._config(), self.layout.name
        for record in read_records(self.layout):
            if (record.fingerprint, record.config) != (fingerprint, asked):
                other = _differences(asked, record.config)
                raise _mixture(f"part {record.part}/{record.parts} of {store!r} was started", other)
        manifest = self._manifest()
        if manifest is not None and manifest.identity.fingerprint != fingerprint:
            raise _mixture(f"the store {store!r} was built", [])

    def _work(self, work: Work) -> BuildResult:
        manifest = self._manifest()
        if manifest is None or manifest.identity != work.request.identity:
            remove_manifest(self.layout)  # of another configuration: to be replaced, as was asked
        record = self._record(work)
        self.settle(work)
        write_record(self.layout, record)
        with self.monitor(work) as monitor:
            if work.plan.tasks:
                self.run_tasks(work, monitor)
            monitor.tell("done")
        result = self._result_of_part(work, monitor=monitor)
        write_record(
            self.layout, dataclasses.replace(record, runs=(*record.runs, run_record(result)))
        )
        self.layout.remove_empty_tmp()
        self.profile = profile_of(result, monitor)
        return result

    def _record(self, work: Work) -> PartRecord:
        """What this part was asked for; what earlier runs of it said of themselves is kept."""
        inputs = tuple(map(str, self.inputs))
        record = PartRecord(
            part=self.part.number,
            parts=self.part.of,
            fingerprint=work.request.identity.fingerprint,
            config=self._config(),
            # A key in a URL is never kept; whoever finishes the build must name the inputs then.
            inputs=inputs if all(shown(each) == each for each in inputs) else None,
            max_document_bytes=work.options.max_document_bytes,
        )
        before = [old for old in read_records(self.layout) if old.name == record.name]
        runs = tuple(run for old in before for run in old.runs)
        return dataclasses.replace(record, runs=runs)

    def _config(self) -> Mapping[str, Json]:
        return dataclasses.asdict(self.config)

    def _manifest(self) -> Manifest | None:
        try:
            return read_manifest(self.layout.root)
        except StoreError:
            return None

    def _nothing_to_do(self, work: Work) -> bool:
        """Whether the store is finished and of the same files: then no record is left in it."""
        manifest = self._manifest()
        if manifest is None or work.plan.tasks or work.plan.touched:
            return False
        files = {(file.path, file.size, file.version) for file in work.plan.files}
        known = {(source.path, source.size, source.version) for source in manifest.sources}
        return manifest.identity == work.request.identity and files == known

    def _result_of_part(self, work: Work, *, monitor: Monitor | None) -> BuildResult:
        names = sorted({*work.plan.done, *(() if monitor is None else monitor.units)})
        tally = tally_units(self.layout, names)
        held = Held(
            totals=tally.totals,
            splits=tally.splits,
            engines=tally.engines,
            units=len(names),
            dtype=work.request.identity.dtype.name,
            bytes_per_token=bytes_per_token(tally.totals, work.request.identity.config),
        )
        return make_result(
            held,
            store=self.layout.name,
            discovery=work.discovery,
            plan=work.plan,
            memory=work.memory,
            monitor=monitor,
            seconds=time.monotonic() - self.started,
            part=str(self.part),
        )


def _differences(asked: Mapping[str, Json], before: Mapping[str, Json]) -> list[str]:
    """Names of the options that have other values."""
    found = []
    for name, value in asked.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            found += _differences(value, old)
        elif value != old:
            found.append(name)
    return found


def _mixture(who: str, other: list[str]) -> StoreError:
    what = f"other values of {', '.join(other)}" if other else "another tokenizer or other options"
    return StoreError(
        f"{who} with {what}; parts of two kinds do not make one store",
        hint="give every part the same tokenizer and options, choose another --out, or replace "
        "what is there with --rebuild",
    )
