"""tokenmill turns raw text into packed, checked, memory-mapped training tokens.

Names are loaded when they are first used: `import tokenmill` itself imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._version import __version__
from tokenmill.errors import TokenmillError

if TYPE_CHECKING:
    from tokenmill.builder.estimate import plan
    from tokenmill.builder.run import build, finish
    from tokenmill.builder.verify import verify
    from tokenmill.diagnosis.diagnose import diagnose
    from tokenmill.engines.load import load_tokenizer
    from tokenmill.interop.convert import convert
    from tokenmill.interop.export import export, export_store
    from tokenmill.interop.imports import import_, import_store
    from tokenmill.loader.loader import Loader
    from tokenmill.loader.mixture import Mixture, Stage
    from tokenmill.loader.packing import layout
    from tokenmill.stalls import StallMeter
    from tokenmill.store.reader import Store
    from tokenmill.trainer.options import train

__all__ = [
    "Loader",
    "Mixture",
    "Stage",
    "StallMeter",
    "Store",
    "TokenmillError",
    "__version__",
    "build",
    "convert",
    "diagnose",
    "export",
    "export_store",
    "finish",
    "import_",
    "import_store",
    "layout",
    "load_tokenizer",
    "plan",
    "train",
    "verify",
]

_HOMES = {
    "Loader": "tokenmill.loader.loader",
    "Mixture": "tokenmill.loader.mixture",
    "Stage": "tokenmill.loader.mixture",
    "StallMeter": "tokenmill.stalls",
    "Store": "tokenmill.store.reader",
    "build": "tokenmill.builder.run",
    "diagnose": "tokenmill.diagnosis.diagnose",
    "convert": "tokenmill.interop.convert",
    "export": "tokenmill.interop.export",
    "export_store": "tokenmill.interop.export",
    "import_": "tokenmill.interop.imports",
    "import_store": "tokenmill.interop.imports",
    "finish": "tokenmill.builder.run",
    "layout": "tokenmill.loader.packing",
    "load_tokenizer": "tokenmill.engines.load",
    "plan": "tokenmill.builder.estimate",
    "train": "tokenmill.trainer.options",
    "verify": "tokenmill.builder.verify",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
