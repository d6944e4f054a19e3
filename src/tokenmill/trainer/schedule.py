"""The learning rate of every step, as one array: it is put on the device once.

cosine   warmup, then half a cosine down to a tenth
wsd      warmup, then flat, then straight down to a tenth over the last fifth: a run can be made
         longer from any checkpoint before that
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAST_SHARE = 0.1
"""Of the learning rate, at the end."""
DECAY_SHARE = 0.2
"""Of the steps, at the end of wsd."""


def learning_rates(kind: str, *, peak: float, steps: int, warmup: int) -> NDArray[np.float32]:
    """One rate for each step."""
    step = np.arange(steps, dtype=np.float64)
    rising = (step + 1) / max(warmup, 1)
    # The last step has the last rate, not the one after it.
    after = np.clip((step - warmup) / max(steps - 1 - warmup, 1), 0, 1)
    if kind == "cosine":
        falling = LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + np.cos(np.pi * after))
    else:
        falling = 1 - (1 - LAST_SHARE) * np.clip((after - 1) / DECAY_SHARE + 1, 0, 1)
    return (peak * np.where(step < warmup, rising, falling)).astype(np.float32)
