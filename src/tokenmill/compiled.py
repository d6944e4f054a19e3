"""The parts in C: `engines/kernel.c` and `sources/fields.c`.

Each does what Python code beside it does too, with the same result, several times as fast. Which of
the two was there is seen in nothing but the time.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any


def find_compiled(module: str, interface: int) -> Any:
    """A part that has this number; None where it is not compiled, or is another version's.

    TOKENMILL_KERNEL=0 turns all of them off.
    """
    if os.environ.get("TOKENMILL_KERNEL") == "0":
        return None
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    return found if interface == found.INTERFACE else None
