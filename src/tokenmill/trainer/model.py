"""The model: GPT-2's shape with what has become usual since, in one file.

    ids -> embedding -> (norm, attention, +, norm, feed-forward, +) * layers -> norm -> logits, loss

Like GPT-2: widths, heads, GELU feed-forward of four times the width, the embedding shared with the
output. Unlike it: rotary positions instead of learned ones (they reach any length, and restart in
every document), RMSNorm instead of LayerNorm, and no biases. Each costs no speed once compiled.

Weights are kept in float32 and cast where they are used, so that everything in between, the
residual stream too, has the compute dtype; norms and the loss are computed in float32.

Shapes in names: b rows, t tokens of a row, d width, h heads, k width of a head, v vocabulary.
"""

from __future__ import annotations

import inspect
import math
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tokenmill.errors import MissingExtraError
from tokenmill.loader.batch import IGNORED
from tokenmill.trainer.options import padded_vocab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tokenmill.trainer.options import ModelConfig

    Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]

INIT_STD = 0.02
NORM_EPS = 1e-6


def find_varlen() -> Kernel | None:
    """Causal attention within documents, by their starts; None before torch 2.10.

    Importing it takes a second, so it is done where it is needed.
    """
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    attention: Any = varlen.varlen_attn
    # The first release has a word for it, later ones a window.
    is_first = "is_causal" in inspect.signature(attention).parameters
    causal: dict[str, Any] = {"is_causal": True} if is_first else {"window_size": (-1, 0)}

    def attend_varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, most: int
    ) -> torch.Tensor:
        found: torch.Tensor = attention(q, k, v, cu_seqlens, cu_seqlens, most, most, **causal)
        return found

    return attend_varlen


class DocumentBoundaries(NamedTuple):
    """Where documents are in the flattened rows, for attention that stays within them."""

    cu_seqlens: torch.Tensor  # starts of documents, filled up with the number of tokens
    # A constant, not the longest of this batch: a changed number would compile again.
    max_seqlen: int
    # What may look at what, where there is no kernel.
    mask_b1tt: torch.Tensor | None
    kernel: Kernel | None  # attention that takes `cu_seqlens`


class Linear(nn.Linear):
    """Without bias; its weight is cast to what comes in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, over the whole row or within documents."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(
        self, x_btd: torch.Tensor, rotation: torch.Tensor, documents: DocumentBoundaries | None
    ) -> torch.Tensor:
        rows, length, width = x_btd.shape
        shape = (rows, length, 3, self.num_heads, width // self.num_heads)
        q_bthk, k_bthk, v_bthk = self.qkv(x_btd).view(shape).unbind(2)
        q_bthk, k_bthk = rotated(q_bthk, rotation), rotated(k_bthk, rotation)
        mixed = attend(q_bthk, k_bthk, v_bthk, documents)
        return self.out(mixed.reshape(rows, length, width))  # type: ignore[no-any-return]


def attend(
    q_bthk: torch.Tensor,
    k_bthk: torch.Tensor,
    v_bthk: torch.Tensor,
    documents: DocumentBoundaries | None,
) -> torch.Tensor:
    """Softmax attention, by the fastest kernel there is for what is asked."""
    if documents is None or documents.kernel is None:
        q, k, v = (each.transpose(1, 2) for each in (q_bthk, k_bthk, v_bthk))
        mask = None if documents is None else documents.mask_b1tt
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return mixed.transpose(1, 2)
    q, k, v = (each.flatten(0, 1) for each in (q_bthk, k_bthk, v_bthk))
    mixed = documents.kernel(q, k, v, documents.cu_seqlens, documents.max_seqlen)
    return mixed.view_as(q_bthk)


def rotated(x_bthk: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Each pair (first half, second half) of a head turned by the angle of its position."""
    cos, sin = rotation.unbind(-1)
    first, second = x_bthk.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x_bthk.dtype)


class Block(nn.Module):
    """Attention and feed-forward, each added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = RMSNorm(config.width)
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width)

    def forward(
        self, x_btd: torch.Tensor, rotation: torch.Tensor, documents: DocumentBoundaries | None
    ) -> torch.Tensor:
        x_btd = x_btd + self.attention(self.norm_1(x_btd), rotation, documents)
        hidden = functional.gelu(self.up(self.norm_2(x_btd)), approximate="tanh")
        return x_btd + self.down(hidden)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Ids and labels in; the summed loss and the number of labels that counted out.

    `checkpointing` keeps only the inputs of each block for the backward pass, and computes the rest
    again: a third more work for a fraction of the memory. `has_documents` finds the kernel for
    attention within documents.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        seq_len: int,
        dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
        has_documents: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.dtype = dtype
        self.checkpointing = checkpointing
        # Flash attention computes in half precision, on a GPU.
        is_wide = dtype == torch.float32
        self.varlen = find_varlen() if has_documents and not is_wide else None
        self.tokens = nn.Embedding(padded_vocab(vocab_size), config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width)
        # (positions, half a head, 2): cosine and sine of each position's angles.
        half = config.width // config.num_heads // 2
        speeds = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), speeds)
        rotation = torch.stack((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("rotation_tk2", rotation, persistent=False)
        # What is added to the residual stream is made smaller the more often it happens.
        into_stream = INIT_STD / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=into_stream if is_last else INIT_STD)

    def forward(
        self,
        ids_bt: torch.Tensor,
        labels_bt: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_btd = self.hidden(ids_bt, position_ids, cu_seqlens)
        flat = x_btd.flatten(0, 1), self.tokens.weight, labels_bt.flatten()
        is_compiling = torch.compiler.is_compiling()
        if makes_loss_in_parts(x_btd.device, x_btd.dtype) and not is_compiling:
            loss = loss_in_parts(*flat)
        else:
            logits = functional.linear(flat[0], flat[1].to(self.dtype)).float()
            loss = functional.cross_entropy(logits, flat[2], ignore_index=IGNORED, reduction="sum")
        return loss, (labels_bt != IGNORED).sum()

    def logits(
        self,
        ids_bt: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(b, t, v) in the compute dtype."""
        x_btd = self.hidden(ids_bt, position_ids, cu_seqlens)
        return functional.linear(x_btd, self.tokens.weight.to(self.dtype))

    def hidden(
        self,
        ids_bt: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What logits are made of. With `cu_seqlens`, attention stays within documents."""
        table: torch.Tensor = self.rotation_tk2  # type: ignore[assignment]
        rotation = table[: ids_bt.shape[1]] if position_ids is None else table[position_ids]
        rotation = rotation.unsqueeze(-3)  # the same for all heads
        documents: DocumentBoundaries | None = None
        if cu_seqlens is not None:
            kernel = self.varlen if ids_bt.is_cuda else None
            mask = document_mask(cu_seqlens, ids_bt) if kernel is None else None
            documents = DocumentBoundaries(cu_seqlens, self.seq_len, mask, kernel)
        x_btd = self.tokens(ids_bt).to(self.dtype)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x_btd = checkpoint(
                    block, x_btd, rotation, documents, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_btd = block(x_btd, rotation, documents)
        return self.norm(x_btd)  # type: ignore[no-any-return]


PART_BYTES = 64 << 20


def makes_loss_in_parts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the logits of a step are never there all at once (if nothing is compiled)."""
    return device.type == "cpu" and dtype == torch.float32


def loss_in_parts(
    x_nd: torch.Tensor, weight_vd: torch.Tensor, labels_n: torch.Tensor
) -> torch.Tensor:
    """Summed cross entropy of some tokens at a time, and its gradients with it: for the CPU.

    All logits of a step are hundreds of megabytes, which the system would have to give and clear
    three times over: with a vocabulary of 50,000 that took longer than all else of a small model.
    """
    is_wanted = torch.is_grad_enabled()
    return LossInParts.apply(x_nd, weight_vd, labels_n, is_wanted)  # type: ignore[no-any-return, no-untyped-call]


class LossInParts(torch.autograd.Function):
    """What `loss_in_parts` does."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nd: torch.Tensor,
        weight_vd: torch.Tensor,
        labels_n: torch.Tensor,
        has_gradients: bool,
    ) -> torch.Tensor:
        rows = max(1, PART_BYTES // (weight_vd.shape[0] * weight_vd.itemsize))
        room = x_nd.new_empty(min(rows, len(x_nd)), weight_vd.shape[0])
        loss = x_nd.new_zeros(())
        x_grad = torch.empty_like(x_nd) if has_gradients else x_nd
        weight_grad = torch.zeros_like(weight_vd) if has_gradients else weight_vd
        for first in range(0, len(x_nd), rows):
            part = slice(first, first + rows)
            x, labels = x_nd[part], labels_n[part, None]
            counts = (labels != IGNORED).to(x.dtype)
            places = labels.clamp(min=0)
            logits = torch.mm(x, weight_vd.t(), out=room[: len(x)])
            most = logits.amax(1, keepdim=True)
            said = logits.gather(1, places) - most
            sums = logits.sub_(most).exp_().sum(1, keepdim=True)
            loss += ((sums.log() - said) * counts).sum()
            if has_gradients:
                # In place of the logits, their gradient.
                logits.mul_(counts / sums).scatter_add_(1, places, -counts)
                torch.mm(logits, weight_vd, out=x_grad[part])
                weight_grad.addmm_(logits.t(), x)
        ctx.save_for_backward(x_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad * grad, None, None


def document_mask(cu_seqlens: torch.Tensor, ids_bt: torch.Tensor) -> torch.Tensor:
    """(b, 1, t, t): True where a token may look at another, in its own document and before it."""
    places = torch.arange(ids_bt.numel(), device=ids_bt.device, dtype=cu_seqlens.dtype)
    documents = torch.searchsorted(cu_seqlens, places, right=True).view(ids_bt.shape)
    is_same = documents[:, :, None] == documents[:, None, :]
    return is_same.tril().unsqueeze(1)


# -------------------------------------------------------------------------------------------------
# AdamW, with decay on matrices alone, and clipping: all of it on the device.
#
# The learning rate is a tensor on it too. Changing it costs a copy within the device; a
# number would be sent again at every step, or be compiled in. Why 8-bit AdamW is torchao's is told
# in docs/decisions/0009-eight-bit-adamw.md.

BETAS = (0.9, 0.95)
CLIP_EPS = 1e-6


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
    """Multiply all gradients by `factor`, then scale them to a norm of `most` where it is more.

    Gives the norm before that. It is one pass over the gradients, and no number leaves the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) * factor
    torch._foreach_mul_(gradients, factor * (most / (norm + CLIP_EPS)).clamp(max=1.0))
    return norm


# -------------------------------------------------------------------------------------------------
# The learning rate of every step, as one array: it is put on the device once.
#
# cosine   warmup, then half a cosine down to a tenth
# wsd      warmup, then flat, then straight down to a tenth over the last fifth: a run can be made
#   |      longer from any checkpoint before that

LAST_SHARE = 0.1  # of the learning rate, at the end
DECAY_SHARE = 0.2  # of the steps, at the end of wsd


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
