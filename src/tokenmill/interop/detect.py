"""Which format foreign files are in, as far as their names and first bytes say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import reading
from tokenmill.interop.registry import NAMES, get_format

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.interop.base import Detection, Format


def detect_format(path: Path) -> Format:
    """The one format that the files can be in; UsageError lists the candidates otherwise."""
    found = candidates(path)
    if not found:
        if not path.exists():
            raise SourceError(f"there is nothing at {str(path)!r}", hint="check the path")
        raise UsageError(
            f"{str(path)!r} does not look like any format that tokenmill reads",
            hint=f"check the path, or name the format with --from: {', '.join(NAMES)}",
        )
    best = max(detection.sure for detection in found.values())
    names = [name for name, detection in found.items() if detection.sure == best]
    if len(names) == 1 and (best > 1 or len(found) == 1):
        return get_format(names[0])
    listed = "; ".join(f"{name} ({found[name].why})" for name in names)
    raise UsageError(
        f"{str(path)!r} may be of several formats: {listed}",
        hint=f"say which with --from {names[0]}",
    )


def candidates(path: Path) -> dict[str, Detection]:
    """Every format that the files may be in, and why."""
    found = {}
    for name in NAMES:
        try:
            with reading(path):
                detection = get_format(name).detect(path)
        except (ImportError, OSError):
            # A format whose packages are not there can still be named, and says so then.
            continue
        if detection is not None:
            found[name] = detection
    return found
