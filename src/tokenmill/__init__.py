"""tokenmill turns raw text into packed, checked, memory-mapped training tokens.

Names are loaded when they are first used: `import tokenmill` itself imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._version import __version__ as __version__
from tokenmill.errors import TokenmillError as TokenmillError

if TYPE_CHECKING:
    from tokenmill.annotating import AnnotateResult as AnnotateResult
    from tokenmill.annotating import annotate as annotate
    from tokenmill.auditing.checks import AuditReport as AuditReport
    from tokenmill.auditing.checks import audit as audit
    from tokenmill.builder.progress import BuildResult as BuildResult
    from tokenmill.builder.progress import Progress as Progress
    from tokenmill.builder.run import BuildPlan as BuildPlan
    from tokenmill.builder.run import build as build
    from tokenmill.builder.run import finish as finish
    from tokenmill.builder.run import plan as plan
    from tokenmill.builder.verify import VerifyReport as VerifyReport
    from tokenmill.builder.verify import verify as verify
    from tokenmill.diagnosis.diagnose import diagnose as diagnose
    from tokenmill.diagnosis.values import Diagnosis as Diagnosis
    from tokenmill.engines.load import Tokenizer as Tokenizer
    from tokenmill.engines.load import load_tokenizer as load_tokenizer
    from tokenmill.forgetting import ForgetResult as ForgetResult
    from tokenmill.forgetting import forget as forget
    from tokenmill.history import LedgerResult as LedgerResult
    from tokenmill.history import TraceResult as TraceResult
    from tokenmill.history import ledger as ledger
    from tokenmill.history import trace as trace
    from tokenmill.inspection import Inspection as Inspection
    from tokenmill.inspection import inspect as inspect
    from tokenmill.interop.export import ExportResult as ExportResult
    from tokenmill.interop.export import export as export
    from tokenmill.interop.export import export_store as export_store
    from tokenmill.interop.imports import ImportResult as ImportResult
    from tokenmill.interop.imports import import_ as import_
    from tokenmill.interop.imports import import_store as import_store
    from tokenmill.interop.in_place import convert as convert
    from tokenmill.loader.batch import Batch as Batch
    from tokenmill.loader.batch import RowOrigin as RowOrigin
    from tokenmill.loader.loader import Loader as Loader
    from tokenmill.loader.mixture import Mixture as Mixture
    from tokenmill.loader.mixture import Stage as Stage
    from tokenmill.loader.packing import LayoutReport as LayoutReport
    from tokenmill.loader.packing import layout as layout
    from tokenmill.loader.pairs import PairBatch as PairBatch
    from tokenmill.loader.pairs import PairLoader as PairLoader
    from tokenmill.search import GrepResult as GrepResult
    from tokenmill.search import grep as grep
    from tokenmill.selection import DedupResult as DedupResult
    from tokenmill.selection import ViewResult as ViewResult
    from tokenmill.selection import ban as ban
    from tokenmill.selection import dedup as dedup
    from tokenmill.selection import select as select
    from tokenmill.stalls import StallMeter as StallMeter
    from tokenmill.stalls import StallReport as StallReport
    from tokenmill.store.reader import RejectedRow as RejectedRow
    from tokenmill.store.reader import SourceRow as SourceRow
    from tokenmill.store.reader import Store as Store
    from tokenmill.store.snapshots import PruneResult as PruneResult
    from tokenmill.store.snapshots import prune as prune
    from tokenmill.trainer.options import TrainResult as TrainResult
    from tokenmill.trainer.options import train as train
    from tokenmill.viewer.server import view as view

# The list above once more, for programs that run: a test compares them.
_HOMES = {
    "annotating": ["AnnotateResult", "annotate"],
    "auditing.checks": ["AuditReport", "audit"],
    "builder.progress": ["BuildResult", "Progress"],
    "builder.run": ["BuildPlan", "build", "finish", "plan"],
    "builder.verify": ["VerifyReport", "verify"],
    "diagnosis.diagnose": ["diagnose"],
    "diagnosis.values": ["Diagnosis"],
    "engines.load": ["Tokenizer", "load_tokenizer"],
    "forgetting": ["ForgetResult", "forget"],
    "history": ["LedgerResult", "TraceResult", "ledger", "trace"],
    "inspection": ["Inspection", "inspect"],
    "interop.in_place": ["convert"],
    "interop.export": ["ExportResult", "export", "export_store"],
    "interop.imports": ["ImportResult", "import_", "import_store"],
    "loader.batch": ["Batch", "RowOrigin"],
    "loader.loader": ["Loader"],
    "loader.mixture": ["Mixture", "Stage"],
    "loader.packing": ["LayoutReport", "layout"],
    "loader.pairs": ["PairBatch", "PairLoader"],
    "search": ["GrepResult", "grep"],
    "selection": ["DedupResult", "ViewResult", "ban", "dedup", "select"],
    "stalls": ["StallMeter", "StallReport"],
    "store.reader": ["RejectedRow", "SourceRow", "Store"],
    "store.snapshots": ["PruneResult", "prune"],
    "trainer.options": ["TrainResult", "train"],
    "viewer.server": ["view"],
}
_HOME_OF = {name: f"tokenmill.{home}" for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "TokenmillError", "__version__"])


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOME_OF:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
