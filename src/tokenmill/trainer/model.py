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

import importlib
import math
import sys
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tokenmill.errors import MissingExtraError
from tokenmill.loader.batch import IGNORED, rounded_up
from tokenmill.trainer.options import padded_vocab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tokenmill.trainer.options import ModelConfig

INIT_STD = 0.02
NORM_EPS = 1e-6
TRIALS = 7  # of a kernel, before the first step
MOST_DIFFERENCE = 0.05  # between kernels, of the norm: bf16 differs by less than a hundredth

Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values


# -------------------------------------------------------------------------------------------------
# Attention within documents, by a kernel.
#
# cudnn    on a GPU with the package nvidia-cudnn-frontend
# varlen   on a GPU with torch 2.10 or newer: torch's own flash attention
# each     on a CPU: one document after the other
# (none)   elsewhere, by a mask
#
# An empty document costs blocks for the longest: filled up to a constant, `cu_seqlens` would take
# many times what its documents do. So the operator is told how many there are, and how long they
# get, in a tensor on the CPU, `extent`, which it reads when it runs: the compiler never sees the
# numbers and compiles once for all of them, and nothing waits for the device. cuDNN makes a plan
# for each size, so there the two are rounded up, to few sizes.


class DocumentBoundaries(NamedTuple):
    """Where documents are in the flattened rows, for attention that stays within them."""

    cu_seqlens: torch.Tensor  # their starts, filled up with the number of tokens
    offsets: torch.Tensor  # the same in numbers of queries
    sum_offsets: torch.Tensor  # and in numbers of sums
    lengths: torch.Tensor  # of the documents, then zeros
    extent: torch.Tensor  # on the CPU: how many there are, and tokens of the longest or more
    kernel: str


# Where they are, a mask (b, 1, t, t) where there is no kernel, or None: the whole row.
Documents: TypeAlias = DocumentBoundaries | torch.Tensor | None


class Kernel(NamedTuple):
    """One way to compute it."""

    forward: Callable[[Heads, Places], tuple[torch.Tensor, torch.Tensor]]
    """Of queries, keys and values: what comes out, and the logarithm of each token's sum."""
    backward: Callable[[torch.Tensor, Heads, torch.Tensor, torch.Tensor, Places], Heads]
    sums_first: bool
    """Whether those are (heads, tokens), not (tokens, heads)."""


class Places(NamedTuple):
    """The documents of one batch, as kernels need them: without what they were filled up with."""

    cu_seqlens: torch.Tensor
    offsets: torch.Tensor
    sum_offsets: torch.Tensor
    lengths: torch.Tensor
    longest: int


def find_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Those there are for a device and what it computes in, the likely fastest first."""
    if device.type == "cpu":
        return ["each"]
    if device.type != "cuda" or dtype != torch.bfloat16:
        return []
    found = ["cudnn"] if find_spec("cudnn") is not None else []
    try:  # importing it takes a second, so it is done where it is needed
        importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return found
    return [*found, "varlen"]


def document_boundaries(
    cu_seqlens: torch.Tensor, extent: torch.Tensor, *, kernel: str, heads: int, width: int
) -> DocumentBoundaries:
    """What all layers of a step need, made once."""
    lengths = functional.pad(cu_seqlens.diff(), (0, 1))
    sum_offsets = cu_seqlens * heads
    return DocumentBoundaries(cu_seqlens, sum_offsets * width, sum_offsets, lengths, extent, kernel)


def _forward_varlen(heads: Heads, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    starts, most = places.cu_seqlens, places.longest
    found = torch.ops.aten._flash_attention_forward(
        *heads, starts, starts, most, most, 0.0, True, False
    )
    return found[0], found[1]


def _backward_varlen(
    grad: torch.Tensor, heads: Heads, out: torch.Tensor, sums: torch.Tensor, places: Places
) -> Heads:
    starts, most = places.cu_seqlens, places.longest
    nothing = starts.new_zeros(2, dtype=torch.uint64)  # no dropout, no random numbers
    found: Heads = torch.ops.aten._flash_attention_backward(
        grad, *heads, out, sums, starts, starts, most, most, 0.0, True, nothing, nothing
    )
    return found


def _forward_each(heads: Heads, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(heads[0], memory_format=torch.contiguous_format)
    sums = out.new_empty(out.shape[:2], dtype=torch.float32)
    for part in _parts(places):
        found, found_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_alone(each, part) for each in heads), 0.0, True
        )
        out[part], sums[part] = found[0].transpose(0, 1), found_sums[0].T
    return out, sums


def _backward_each(
    grad: torch.Tensor, heads: Heads, out: torch.Tensor, sums: torch.Tensor, places: Places
) -> Heads:
    q, k, v = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in heads)
    for part in _parts(places):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_alone(each, part) for each in (grad, *heads, out)), sums[part].T[None], 0.0, True
        )
        for whole, each in zip((q, k, v), found, strict=True):
            whole[part] = each[0].transpose(0, 1)
    return q, k, v


def _parts(places: Places) -> list[slice]:
    starts = places.cu_seqlens.tolist()
    return [slice(start, end) for start, end in pairwise(starts) if end > start]


def _alone(x_thk: torch.Tensor, part: slice) -> torch.Tensor:
    """One document, as (1, h, t, k)."""
    return x_thk[part].transpose(0, 1)[None]


@lru_cache
def _cudnn_handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


_NAMES = (
    "q",
    "k",
    "v",
    "out",
    "grad",
    "sums",
    "dq",
    "dk",
    "dv",
    "offsets",
    "sum_offsets",
    "lengths",
)
_UIDS = {name: number for number, name in enumerate(_NAMES, start=1)}


@lru_cache(maxsize=256)
def _cudnn_plan(
    device: int, tokens: int, heads: int, width: int, documents: int, longest: int, backward: bool
) -> tuple[Any, int]:
    """A plan of cuDNN's for so many documents, and the bytes it needs to work in."""
    import cudnn

    half, single, whole = (getattr(cudnn.data_type, n) for n in ("BFLOAT16", "FLOAT", "INT32"))
    graph = cudnn.pygraph(
        io_data_type=half,
        intermediate_data_type=single,
        compute_data_type=single,
        handle=_cudnn_handle(device),
    )

    def flat(name: str, size: int) -> Any:
        dim, stride = (size, 1, 1, 1), (1, 1, 1, 1)
        return graph.tensor(name=name, uid=_UIDS[name], dim=dim, stride=stride, data_type=whole)

    # As if every document were a row of its own; where each one begins is told apart.
    offsets, sum_offsets = flat("offsets", documents + 1), flat("sum_offsets", documents + 1)
    lengths = flat("lengths", documents)
    shape = (documents, heads, longest, width)
    stride = (longest * heads * width, width, heads * width, 1)
    sums = {"dim": (documents, heads, longest, 1), "stride": (longest * heads, 1, heads, 1)}

    def ragged(name: str) -> Any:
        found = graph.tensor(name=name, uid=_UIDS[name], dim=shape, stride=stride, data_type=half)
        found.set_ragged_offset(offsets)
        return found

    def give(found: Any, name: str) -> None:
        found.set_output(True).set_uid(_UIDS[name]).set_dim(shape).set_stride(stride)
        found.set_data_type(half).set_ragged_offset(offsets)

    common = {
        "attn_scale": width**-0.5,
        "use_padding_mask": True,
        "seq_len_q": lengths,
        "seq_len_kv": lengths,
        "use_causal_mask": True,
    }
    inputs = {name: ragged(name) for name in ("q", "k", "v")}
    if backward:
        said = graph.tensor(name="sums", uid=_UIDS["sums"], data_type=single, **sums)
        said.set_ragged_offset(sum_offsets)
        gradients = graph.sdpa_backward(
            name="backward",
            **inputs,
            o=ragged("out"),
            dO=ragged("grad"),
            stats=said,
            max_total_seq_len_q=tokens,
            max_total_seq_len_kv=tokens,
            **common,
        )
        for found, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
            give(found, name)
    else:
        out, said = graph.sdpa(name="forward", **inputs, is_inference=False, **common)
        give(out, "out")
        said.set_output(True).set_uid(_UIDS["sums"]).set_data_type(single)
        said.set_dim(sums["dim"]).set_stride(sums["stride"]).set_ragged_offset(sum_offsets)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, int(graph.get_workspace_size())


def _run_cudnn(places: Places, tensors: dict[str, torch.Tensor]) -> None:
    import cudnn

    tokens, heads, width = tensors["q"].shape
    device = tensors["q"].device.index
    sizes = (device, tokens, heads, width, len(places.lengths), places.longest)
    graph, workspace_bytes = _cudnn_plan(*sizes, backward="grad" in tensors)
    tensors |= {name: getattr(places, name) for name in ("offsets", "sum_offsets", "lengths")}
    handle = _cudnn_handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = places.lengths.new_empty(max(1, workspace_bytes), dtype=torch.uint8)
    graph.execute({_UIDS[name]: each for name, each in tensors.items()}, workspace, handle=handle)


def _forward_cudnn(heads: Heads, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (each.contiguous() for each in heads)
    out, sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    _run_cudnn(places, {"q": q, "k": k, "v": v, "out": out, "sums": sums})
    return out, sums


def _backward_cudnn(
    grad: torch.Tensor, heads: Heads, out: torch.Tensor, sums: torch.Tensor, places: Places
) -> Heads:
    q, k, v, grad = (each.contiguous() for each in (*heads, grad))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = {"grad": grad, "q": q, "k": k, "v": v, "out": out, "sums": sums}
    _run_cudnn(places, given | {"dq": dq, "dk": dk, "dv": dv})
    return dq, dk, dv


KERNELS = {
    "cudnn": Kernel(_forward_cudnn, _backward_cudnn, sums_first=False),
    "varlen": Kernel(_forward_varlen, _backward_varlen, sums_first=True),
    "each": Kernel(_forward_each, _backward_each, sums_first=False),
}


def _places(
    cu_seqlens: torch.Tensor,
    offsets: torch.Tensor,
    sum_offsets: torch.Tensor,
    lengths: torch.Tensor,
    extent: torch.Tensor,
    kernel: str,
    tokens: int,
) -> Places:
    documents, longest = extent.tolist()
    if kernel == "cudnn":  # it takes a tenth of a second to plan for each size
        documents, longest = rounded_up(documents, least=16), rounded_up(longest, least=512)
    documents, longest = min(documents, len(cu_seqlens) - 1), min(longest, tokens)
    part = slice(documents + 1)
    return Places(cu_seqlens[part], offsets[part], sum_offsets[part], lengths[:documents], longest)


@torch.library.custom_op("tokenmill::attend_documents", mutates_args=())
def attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    offsets: torch.Tensor,
    sum_offsets: torch.Tensor,
    lengths: torch.Tensor,
    extent: torch.Tensor,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within documents, and the logarithm of each token's sum.

    Queries, keys and values are (tokens, heads, width); the rest is that of `DocumentBoundaries`.
    """
    places = _places(cu_seqlens, offsets, sum_offsets, lengths, extent, kernel, len(q))
    return KERNELS[kernel].forward((q, k, v), places)


@attend_documents.register_fake
def _(
    q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    shape = (heads, tokens) if KERNELS[rest[-1]].sums_first else (tokens, heads)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("tokenmill::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    cu_seqlens: torch.Tensor,
    offsets: torch.Tensor,
    sum_offsets: torch.Tensor,
    lengths: torch.Tensor,
    extent: torch.Tensor,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of what went into `attend_documents`."""
    places = _places(cu_seqlens, offsets, sum_offsets, lengths, extent, kernel, len(q))
    return KERNELS[kernel].backward(grad, (q, k, v), out, sums, places)


@attend_documents_backward.register_fake
def _(
    _grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *given, ctx.kernel = inputs
    ctx.save_for_backward(*given[:3], *output, *given[3:])


def _gradients(ctx: Any, grad: torch.Tensor, _sums: torch.Tensor | None) -> tuple[Any, ...]:
    found = attend_documents_backward(grad, *ctx.saved_tensors, ctx.kernel)
    return (*found, *[None] * 6)


attend_documents.register_autograd(_gradients, setup_context=_keep)


class Trial(NamedTuple):
    """How long a layer's attention took, forward and backward."""

    kernel: str
    milliseconds: float


def try_kernels(
    names: Sequence[str], *, lengths: NDArray[np.integer], heads: int, width: int
) -> tuple[list[Trial], list[str]]:
    """The kernels that run here and agree with the last of them, the fastest first.

    And why the others do not. `lengths` are those of the documents of one batch.
    """
    tokens = int(lengths.sum())
    generator = torch.Generator("cuda").manual_seed(0)
    shape, kind = (4, tokens, heads, width), {"device": "cuda", "dtype": torch.bfloat16}
    *given, grad = torch.randn(shape, generator=generator, **kind).unbind()  # type: ignore[call-overload]
    # Filled up, as they are in a step: cuDNN rounds up their number.
    starts = np.full(2 * len(lengths) + 4, tokens, np.int32)
    starts[: len(lengths)] = np.cumsum(lengths) - lengths
    extent = torch.tensor([len(lengths), int(lengths.max())])
    found, problems, expected = [], [], None
    for name in reversed(names):
        try:
            boundaries = document_boundaries(
                torch.from_numpy(starts).cuda(), extent, kernel=name, heads=heads, width=width
            )
            marks = []
            for _ in range(TRIALS):
                q, k, v = (each.clone().requires_grad_() for each in given)
                marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                marks[-1][0].record()
                out, _sums = attend_documents(q, k, v, *boundaries)
                out.backward(grad)
                marks[-1][1].record()
            torch.cuda.synchronize()
            got = [out.detach(), *(cast("torch.Tensor", each.grad) for each in (q, k, v))]
            expected = expected or got
            pairs = zip(got, expected, strict=True)
            differences = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
            if not all(each < MOST_DIFFERENCE for each in differences):
                problems.append(f"{name} gives other numbers here than {names[-1]}")
                continue
            took = sorted(start.elapsed_time(end) for start, end in marks)
            found.append(Trial(name, took[len(took) // 2]))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            # Whatever another's package says on a device that it does not know.
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            problems.append(f"{name} does not run here: {what[:200]}")
    return sorted(found, key=lambda each: each.milliseconds), problems


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
        self, x_btd: torch.Tensor, rotation: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        rows, length, width = x_btd.shape
        shape = (rows, length, 3, self.num_heads, width // self.num_heads)
        q_bthk, k_bthk, v_bthk = self.qkv(x_btd).view(shape).unbind(2)
        q_bthk, k_bthk = rotated(q_bthk, rotation), rotated(k_bthk, rotation)
        mixed = attend(q_bthk, k_bthk, v_bthk, documents)
        return self.out(mixed.reshape(rows, length, width))  # type: ignore[no-any-return]


def attend(
    q_bthk: torch.Tensor, k_bthk: torch.Tensor, v_bthk: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Softmax attention, by the fastest kernel there is for what is asked."""
    if isinstance(documents, DocumentBoundaries):
        q, k, v = (each.flatten(0, 1) for each in (q_bthk, k_bthk, v_bthk))
        within: torch.Tensor = attend_documents(q, k, v, *documents)[0]
        return within.view_as(q_bthk)
    q, k, v = (each.transpose(1, 2) for each in (q_bthk, k_bthk, v_bthk))
    mixed = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=documents, is_causal=documents is None
    )
    return mixed.transpose(1, 2)


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
        self, x_btd: torch.Tensor, rotation: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        x_btd = x_btd + self.attention(self.norm_1(x_btd), rotation, documents)
        hidden = functional.gelu(self.up(self.norm_2(x_btd)), approximate="tanh")
        return x_btd + self.down(hidden)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Ids and labels in; the summed loss and the number of labels that counted out.

    Of the first `recomputed` blocks only the inputs are kept for the backward pass, and the rest is
    computed again: up to a third more work for a fraction of the memory. `kernel` names one of
    KERNELS for attention within documents; without it they get a mask.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        seq_len: int,
        dtype: torch.dtype = torch.float32,
        recomputed: int = 0,
        kernel: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.dtype = dtype
        self.recomputed = recomputed
        self.kernel = kernel
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
        extent: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_btd = self.hidden(ids_bt, position_ids, cu_seqlens, extent)
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
        extent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(b, t, v) in the compute dtype."""
        x_btd = self.hidden(ids_bt, position_ids, cu_seqlens, extent)
        return functional.linear(x_btd, self.tokens.weight.to(self.dtype))

    def hidden(
        self,
        ids_bt: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        extent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What logits are made of. With `cu_seqlens`, attention stays within documents.

        `extent`, on the CPU, says how many documents they are, and how long the longest is at most.
        """
        table: torch.Tensor = self.rotation_tk2  # type: ignore[assignment]
        rotation = table[: ids_bt.shape[1]] if position_ids is None else table[position_ids]
        rotation = rotation.unsqueeze(-3)  # the same for all heads
        documents: Documents = None
        if cu_seqlens is not None and self.kernel is None:
            documents = document_mask(cu_seqlens, ids_bt)
        elif cu_seqlens is not None and self.kernel is not None:
            if extent is None:
                extent = torch.tensor([len(cu_seqlens) - 1, self.seq_len])
            heads = self.config.num_heads
            documents = document_boundaries(
                cu_seqlens,
                extent,
                kernel=self.kernel,
                heads=heads,
                width=self.config.width // heads,
            )
        x_btd = self.tokens(ids_bt).to(self.dtype)
        for number, block in enumerate(self.blocks):
            if number < self.recomputed and self.training:
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
# number would be sent again at every step, or be compiled in. bitsandbytes hands its kernels a
# number. Which package 8-bit AdamW is of is told in docs/decisions/0009-eight-bit-adamw.md.

BETAS = (0.9, 0.95)
CLIP_EPS = 1e-6


def make_optimizer(
    model: nn.Module, *, kind: str, learning_rate: torch.Tensor, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer of a kind: "adamw", or a package of `EIGHT_BIT`.

    Its parameter groups share one learning rate, a tensor on the device; those of bitsandbytes are
    to be given a number before every step.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        # Fused also on the CPU: the other ways read numbers back from tensors.
        return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)
    if kind == "bitsandbytes":
        return _bitsandbytes(groups)
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=learning_rate, betas=BETAS)
    return optimizer


# Packages with an 8-bit AdamW; the first one that is installed is used.
EIGHT_BIT = ("bitsandbytes", "torchao")


def find_eight_bit() -> str:
    """The package for 8-bit AdamW; where none is installed that is said before a model is made."""
    found = next(filter(is_installed, EIGHT_BIT), None)
    if found is None:
        raise MissingExtraError(EIGHT_BIT[0], extra=EIGHT_BIT[0], purpose="8-bit AdamW")
    return found


def is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


def _bitsandbytes(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Its AdamW8bit, with state from the start, and without a wait for the device in each matrix.

    The wait is for states in memory that is paged, of which there are none here.
    """
    from bitsandbytes.optim import AdamW8bit

    class Unpaged(AdamW8bit):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # noqa: ARG002 (the name it has there)
            for number, group in enumerate(self.param_groups):
                for place, parameter in enumerate(group["params"]):
                    self.update_step(group, parameter, number, place)

    optimizer = Unpaged(groups, lr=0.0, betas=BETAS)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, number, place)
    made: torch.optim.Optimizer = optimizer
    return made


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
