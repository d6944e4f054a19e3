"""The worker of an export: makes the files of one part after the other, on several threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.interop.parts import PartFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenmill.interop.base import ExportOptions, Format, Part
    from tokenmill.interop.parts import ExportFolder
    from tokenmill.interop.pool import Report
    from tokenmill.store.reader import Store

REPORT_BYTES = 4 << 20
WIDE_ID = 4
"""Bytes of an id where a format does not hold the store's own bytes, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportWorker:
    """What all parts of an export have in common."""

    stores: Mapping[str, Store]
    format: Format
    options: ExportOptions
    folder: ExportFolder
    export: str
    """Which export the receipts are of."""

    def work(self, part: Part, report: Report) -> None:
        """Make and commit the files of a part."""
        store = self.stores[part.split]
        on_bytes = self._meter(part, store, report)
        with PartFiles(self.folder, part, self.options.link, on_bytes=on_bytes) as out:
            out.commit(self.export, self.format.write(store, part, self.options, out))

    def _meter(self, part: Part, store: Store, report: Report) -> Callable[[int], None]:
        """Turns bytes that are written into reports of tokens, as far as bytes tell it."""
        width = store.dtype.itemsize if self.format.about.linkable else WIDE_ID
        written = reported = 0

        def on_bytes(count: int) -> None:
            nonlocal written, reported
            written += count
            if written - reported >= REPORT_BYTES:
                reported = written
                report(min(part.tokens, written // width))

        return on_bytes
