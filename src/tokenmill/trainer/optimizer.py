"""AdamW, with decay on matrices alone, and clipping: all of it on the device.

The learning rate is a tensor that lies there too. Changing it costs a copy within the device; a
number would be sent again at every step, or be compiled in. Why 8-bit AdamW is torchao's is told in
docs/decisions/0009-eight-bit-adamw.md.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from tokenmill.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

BETAS = (0.9, 0.95)
NORM_EPS = 1e-6


def make_optimizer(
    model: nn.Module, *, kind: str, learning_rate: torch.Tensor, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer whose parameter groups share one learning rate, a tensor on the device."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        # Fused also on the CPU: the other ways read numbers back from tensors.
        return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)
    require_eight_bit()
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=learning_rate, betas=BETAS)
    return optimizer


def require_eight_bit() -> None:
    """Say at once, not after the model is made, that the package for 8-bit AdamW is missing."""
    if sys.modules.get("torchao") is None and find_spec("torchao") is None:
        raise MissingExtraError("torchao", extra="torchao", purpose="8-bit AdamW")


def scale_and_clip(
    parameters: Sequence[nn.Parameter], *, factor: torch.Tensor, most: float
) -> torch.Tensor:
    """Multiply all gradients by `factor`, then bring their norm down to `most`; gives that norm.

    Both are one pass over the gradients, and no number leaves the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) * factor
    torch._foreach_mul_(gradients, factor * (most / (norm + NORM_EPS)).clamp(max=1.0))
    return norm
