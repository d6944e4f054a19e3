"""Attention within documents: masks of blocks and parts of peers, against a mask of all pairs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store
from torch import distributed
from torch.distributed.nn.functional import all_gather
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.errors import UsageError
from tokenmill.loader.loader import Loader
from tokenmill.torch import (
    KINDS,
    ContextSlice,
    DeviceFeeder,
    TensorBatch,
    block_mask,
    context_slice,
    to_tensors,
)

ROOT = Path(__file__).parents[3]
FIELDS = ("input_ids", "position_ids", "doc_ids", "cu_seqlens")
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=12)


def borders(lengths: list[int], row: int, *, more: int = 0) -> torch.Tensor:
    """cu_seqlens of documents of these lengths, and of what fills up the last row."""
    ends = np.cumsum(lengths).tolist()
    tokens = -(-ends[-1] // row) * row
    starts = {0, *ends, *range(0, tokens, row)} - {tokens}
    return torch.tensor([*sorted(starts), *[tokens] * (1 + more)], dtype=torch.int32)


def allowed(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(tokens, tokens): who looks at whom in the flattened batch."""
    tokens = int(cu_seqlens[-1])
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        mask[begin:end, begin:end] = True
    return mask.tril()


# Block masks.


@settings(deadline=None, max_examples=30)
@given(
    lengths=LENGTHS,
    row=st.sampled_from([16, 48, 50, 64]),
    block=st.sampled_from([1, 8, 16, 64, 128]),
)
def test_a_block_mask_is_the_one_that_torch_makes_of_all_pairs(
    lengths: list[int], row: int, block: int
) -> None:
    cu_seqlens = borders(lengths, row, more=3)
    rows = int(cu_seqlens[-1]) // row
    dense = allowed(cu_seqlens)
    mask = block_mask(cu_seqlens, (rows, row), block_size=block)

    def of_pairs(b: Any, _h: Any, q: Any, kv: Any) -> Any:
        return dense[b * row + q, b * row + kv]

    expected = create_block_mask(of_pairs, rows, None, row, row, device="cpu", BLOCK_SIZE=block)
    assert mask.shape == (rows, 1, row, row) == expected.shape
    for kind in ("kv", "q", "full_kv", "full_q"):
        counts = [getattr(each, f"{kind}_num_blocks") for each in (mask, expected)]
        tables = [getattr(each, f"{kind}_indices") for each in (mask, expected)]
        assert torch.equal(*counts)
        assert [each.dtype for each in counts + tables] == [torch.int32] * 4
        listed = torch.arange(tables[0].shape[-1]) < counts[0][..., None]
        assert torch.equal(tables[0][listed], tables[1][listed])
    places = torch.arange(row)
    for b in range(rows):
        pairs = mask.mask_mod(torch.tensor(b), torch.tensor(0), places[:, None], places)
        here = slice(b * row, (b + 1) * row)
        assert torch.equal(pairs, dense[here, here])


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[TensorBatch]:
    """Of each packing, with padding, and with an attention window."""
    lengths = np.random.default_rng(1).geometric(1 / 60, 60).tolist()
    store = numbered_store(tmp_path_factory.mktemp("documents") / "store", [[*lengths, 700]])
    found = []
    for options in ({"packing": "best-fit"}, {"packing": "pad"}, {"window": 40}):
        loader = Loader(store, seq_len=256, batch_size=2, seed=2, **options)
        with DeviceFeeder(loader, device="cpu", fields=FIELDS) as feeder:
            found += [batch for batch, _ in zip(feeder, range(2), strict=False)]
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_a_batchs_mask_is_attention_within_its_documents(
    batches: list[TensorBatch],
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 256, 16, dtype=torch.float64)
    for batch in batches:
        found = flex_attention(q, k, v, block_mask=batch.block_mask())
        dense = allowed(batch.cu_seqlens)
        for row in range(2):
            here = slice(row * 256, row * 256 + 256)
            mask = dense[here, here]
            expected = scaled_dot_product_attention(q[row], k[row], v[row], attn_mask=mask)
            assert torch.allclose(found[row], expected)
    # Documents are told apart by other fields as well, where there is no window.
    ids = batches[0].doc_ids.flatten()
    rows = torch.arange(512) // 256
    same = (ids[:, None] == ids) & (rows[:, None] == rows)
    assert torch.equal(allowed(batches[0].cu_seqlens), same.tril())


def test_a_batch_without_boundaries_has_no_mask() -> None:
    batch = TensorBatch({"input_ids": torch.zeros(2, 8)})
    for wanted in (batch.block_mask, lambda: batch.context_slice(rank=0, size=2)):
        with pytest.raises(UsageError, match="only \\['input_ids'\\]"):
            wanted()
    with pytest.raises(UsageError, match="no field of rows"):
        TensorBatch({"cu_seqlens": torch.tensor([0, 8])}).block_mask()


def test_no_value_has_to_come_back_from_the_device(batches: list[TensorBatch]) -> None:
    """Tensors without values have the shapes of those with them: nothing asks for a value."""
    for batch in batches:
        bare = batch.to("meta")
        mask, bare_mask = batch.block_mask(), bare.block_mask()
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_num_blocks"):
            assert getattr(bare_mask, name).shape == getattr(mask, name).shape
        part, bare_part = (each.context_slice(rank=3, size=4) for each in (batch, bare))
        for field in fields(ContextSlice):
            one, other = (getattr(each, field.name) for each in (part, bare_part))
            if isinstance(one, torch.Tensor):
                assert other.is_meta
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
            else:
                assert one == other


# Parts of context-parallel peers.


def attend(part: ContextSlice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As varlen kernels do: part by part, the last query sees the last key."""
    k, v = k[part.kv_index], v[part.kv_index]
    ends = zip(part.cu_seqlens_q[1:].tolist(), part.cu_seqlens_k[1:].tolist(), strict=True)
    out, q_begin, k_begin = [], 0, 0
    for q_end, k_end in ends:
        num_q, num_k = q_end - q_begin, k_end - k_begin
        assert num_q <= part.max_seqlen_q
        assert num_k <= part.max_seqlen_k
        scores = q[q_begin:q_end] @ k[k_begin:k_end].T
        mask = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        out.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[k_begin:k_end])
        q_begin, k_begin = q_end, k_end
    assert q_begin == len(q)
    return torch.cat(out)


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, size=st.integers(1, 5), more=st.integers(0, 4))
def test_peers_together_attend_as_one_and_hold_equally_many_tokens(
    lengths: list[int], size: int, more: int
) -> None:
    cu_seqlens = borders(lengths, 12 * size, more=more)
    tokens, most = int(cu_seqlens[-1]), int(cu_seqlens.diff().max())
    parts = [
        context_slice(cu_seqlens, tokens, max_seqlen=most, rank=rank, size=size)
        for rank in range(size)
    ]
    assert len({tuple(part.index.shape + part.kv_index.shape) for part in parts}) == 1
    places = torch.cat([part.index for part in parts])
    assert sorted(places.tolist()) == list(range(tokens))

    q, k, v = torch.randn(3, tokens, 4, dtype=torch.float64)
    scores = (q @ k.T).masked_fill(~allowed(cu_seqlens), -torch.inf)
    expected = scores.softmax(-1) @ v
    for part in parts:
        found = attend(part, q[part.index], k[places], v[places])
        assert torch.allclose(found, expected[part.index])


def test_peers_have_equal_work_in_every_document() -> None:
    lengths = np.random.default_rng(3).lognormal(6, 1.3, 60).astype(int).tolist()
    cu_seqlens = borders(lengths, 8192)
    tokens = int(cu_seqlens[-1])
    work = []
    for rank in range(8):
        part = context_slice(cu_seqlens, tokens, max_seqlen=8192, rank=rank, size=8)
        starts = cu_seqlens[torch.searchsorted(cu_seqlens, part.index, right=True) - 1]
        work.append(int((part.index - starts + 1).sum()))
    assert sum(work) == sum(n * (n + 1) // 2 for n in cu_seqlens.diff().tolist())
    assert max(work) / np.mean(work) < 1.005


def test_a_part_of_a_batch_is_that_of_its_boundaries(batches: list[TensorBatch]) -> None:
    for batch in batches:
        part = batch.context_slice(rank=1, size=2)
        boundaries = batch.cu_seqlens
        whole = context_slice(boundaries, 512, max_seqlen=batch.max_seqlen or 0, rank=1, size=2)
        for field in fields(ContextSlice):
            one, other = (torch.as_tensor(getattr(each, field.name)) for each in (part, whole))
            assert torch.equal(one, other)
        assert len(part.index) == 256
    for rank, size, reason in ((2, 2, "rank 2 of 2"), (0, 3, "512 tokens cannot be cut into 3")):
        with pytest.raises(UsageError, match=reason):
            batches[0].context_slice(rank=rank, size=size)


def test_labels_that_a_model_shifts_are_not_cut_into_parts(batches: list[TensorBatch]) -> None:
    batch = KINDS["same"](dict(batches[0]), step=0)
    with pytest.raises(UsageError, match="next token of where a part is cut is on another peer"):
        batch.context_slice(rank=0, size=2)


def peer(number: str, folder: str) -> None:
    """One of two processes."""
    rank = int(number)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    loader = Loader(f"{folder}/store", seq_len=96, batch_size=2, seed=4, packing="best-fit")
    for step in range(3):
        batch = to_tensors(loader.batch(step), fields=FIELDS)
        torch.manual_seed(step)
        q, k, v = (torch.randn(192, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        scores = (q @ k.T).masked_fill(~allowed(batch.cu_seqlens), -torch.inf)
        whole = scores.softmax(-1) @ v
        weights = torch.randn(192, 8, dtype=torch.float64)
        expected = torch.autograd.grad((whole * weights).sum(), (q, k, v))

        part = batch.context_slice(rank=rank, size=2)
        mine = [tensor[part.index].detach().requires_grad_() for tensor in (q, k, v)]
        keys, values = (torch.cat(all_gather(tensor)) for tensor in mine[1:])
        out = attend(part, mine[0], keys, values)
        assert torch.allclose(out, whole[part.index])
        found = torch.autograd.grad((out * weights[part.index]).sum(), mine)
        for gradient, reference in zip(found, expected, strict=True):
            assert torch.allclose(gradient, reference[part.index])
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_compute_what_full_attention_does(tmp_path: Path) -> None:
    lengths = np.random.default_rng(5).geometric(1 / 25, 50).tolist()
    numbered_store(tmp_path / "store", [[*lengths, 150]])
    code = "import sys; from tests.loader.torch.test_documents import peer; peer(*sys.argv[1:])"
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [each.communicate(timeout=120)[1] for each in peers]
    finally:
        for each in peers:
            each.kill()
    assert [each.returncode for each in peers] == [0, 0], errors
