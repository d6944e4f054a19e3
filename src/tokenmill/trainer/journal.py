"""What a run writes down: `metrics.jsonl`, one object per line, and TensorBoard files if asked.

A run that is resumed from step k has first the lines after k taken out: they are made again.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tokenmill.errors import MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Journal:
    """Writes lines of numbers; on other ranks than the first it writes nothing."""

    def __init__(
        self, out: Path, *, resumed_at: int, tensorboard: bool = False, is_writer: bool = True
    ) -> None:
        self._file = None
        self._board: Any = None
        if not is_writer:
            return
        out.mkdir(parents=True, exist_ok=True)
        path = out / METRICS
        _cut_after(path, resumed_at)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._board = _open_board(out / TENSORBOARD, resumed_at)

    def write(self, step: int, numbers: dict[str, float | int | None]) -> None:
        """One line, and one point of every curve."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines up to a step; a last line that a crash cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    staged = path.with_suffix(".jsonl.new")
    staged.write_text("".join(kept), encoding="utf-8")
    staged.replace(path)


def require_tensorboard() -> None:
    """Say before the run, not after its first steps, that the package is missing."""
    if find_spec("tensorboard") is None:
        raise MissingExtraError(
            "tensorboard", extra="tensorboard", purpose="writing TensorBoard files"
        )


def _open_board(folder: Path, step: int) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)
