from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.trainer.runs import SEQ_LEN, VOCAB
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenmill.errors import UsageError
from tokenmill.loader.batch import IGNORED, rounded_up
from tokenmill.trainer.model import (
    PART_BYTES,
    Model,
    document_mask,
    find_kernels,
    loss_in_parts,
)
from tokenmill.trainer.options import PRESETS, ModelConfig, padded_vocab, preset

TINY = PRESETS["tiny"]


def make_model(*, recomputed: int = 0, kernel: str | None = None) -> Model:
    torch.manual_seed(0)
    said: Any = {"vocab_size": VOCAB, "seq_len": SEQ_LEN}
    return Model(TINY, **said, recomputed=recomputed, kernel=kernel)


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "millions"), [("mini", 10.5), ("small", 123.6), ("medium", 861), ("large", 1814)]
)
def test_presets_have_the_sizes_they_are_named_for(name: str, millions: float) -> None:
    found = preset(name).num_parameters(50_257) / 1e6
    assert found == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_parameters_are_counted_without_making_the_model(name: str) -> None:
    model = Model(PRESETS[name], vocab_size=1000, seq_len=16)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == PRESETS[name].num_parameters(1000)
    assert padded_vocab(1000) == 1024


def test_operations_are_six_for_each_parameter_and_those_of_attention() -> None:
    config = ModelConfig(num_layers=1, width=64, num_heads=2, max_seq_len=8)
    matrices = 12 * 64 * 64 + 128 * 64
    # The first token looks at itself, the last one at all eight: 4.5 on average.
    assert config.flops_per_token(8, 100) == 6 * matrices + 12 * 64 * 4.5
    assert config.flops_per_token(8, 100, pairs=2) == 6 * matrices + 12 * 64 * 2


def test_operations_are_those_that_are_done() -> None:
    """Counted by torch itself; it counts what is above the diagonal too."""
    config = ModelConfig(num_layers=3, width=64, num_heads=2, max_seq_len=8)
    model = Model(config, vocab_size=100, seq_len=8)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model.logits(ids)
        logits.sum().backward()
    assert counter.get_total_flops() == 16 * config.flops_per_token(8, 100, pairs=8)


def test_a_loss_in_parts_is_that_of_torch_with_the_same_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 700, 60_000
    assert rows > 2 * PART_BYTES // (4 * vocab), "one part would prove nothing"
    x = torch.randn(rows, 8, generator=generator)
    weight = torch.randn(vocab, 8, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[::3] = IGNORED
    found = []
    for is_ours in (True, False):
        x, weight = (each.detach().requires_grad_() for each in (x, weight))
        if is_ours:
            loss = loss_in_parts(x, weight, labels)
        else:
            logits = torch.nn.functional.linear(x, weight)
            loss = torch.nn.functional.cross_entropy(
                logits, labels, ignore_index=IGNORED, reduction="sum"
            )
        (loss / 7).backward()
        assert x.grad is not None
        assert weight.grad is not None
        found.append((loss.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        alone = loss_in_parts(x, weight, labels)
    assert torch.equal(alone, found[0][0])
    nothing = loss_in_parts(x, weight, torch.full_like(labels, IGNORED))
    assert float(nothing.detach()) == 0


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match="tiny, mini, small, medium, large"):
        preset("huge")


def test_a_new_model_knows_nothing_and_looks_only_back() -> None:
    model, ids = make_model(), some_ids(2, SEQ_LEN)
    logits = model.logits(ids)
    loss, count = model(ids, ids.flip(0))
    assert int(count) == 2 * SEQ_LEN
    assert float(loss.detach() / count) == pytest.approx(math.log(384), abs=0.1)
    ids[:, 20:] = 5
    assert torch.equal(model.logits(ids)[:, :20], logits[:, :20])
    assert not torch.equal(model.logits(ids)[:, 20:], logits[:, 20:])


def test_labels_that_are_ignored_do_not_count() -> None:
    model, ids = make_model(), some_ids(2, SEQ_LEN)
    labels = ids.clone()
    labels[:, 8:] = IGNORED
    loss, count = model(ids, labels)
    assert int(count) == 16
    assert torch.allclose(loss, model(ids[:, :8], ids[:, :8])[0], rtol=1e-4)


@pytest.mark.parametrize("kernel", [None, "each"])
def test_attention_within_documents_is_each_document_alone(kernel: str | None) -> None:
    model = make_model(kernel=kernel)
    lengths = [[10, 22], [3, 1, 28]]
    ids = some_ids(2, SEQ_LEN)
    ends = torch.tensor([n for row in lengths for n in row]).cumsum(0)
    # As a loader gives them: filled up with the number of tokens.
    cu_seqlens = torch.cat([torch.tensor([0]), ends, torch.full((4,), 64)]).to(torch.int32)
    positions = torch.cat([torch.arange(n) for row in lengths for n in row]).view(2, SEQ_LEN)

    together = model.logits(ids, positions.to(torch.int32), cu_seqlens).flatten(0, 1)

    flat, start = ids.flatten(), 0
    for end in ends.tolist():
        alone = model.logits(flat[None, start:end])[0]
        torch.testing.assert_close(together[start:end], alone, rtol=1e-4, atol=1e-5)
        start = end
    across = model.logits(ids).flatten(0, 1)
    torch.testing.assert_close(across[:10], together[:10], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(across[10:32], together[10:32], rtol=1e-2)


def test_the_mask_of_documents_is_what_it_says() -> None:
    cu_seqlens = torch.tensor([0, 2, 3, 6, 6], dtype=torch.int32)
    mask = document_mask(cu_seqlens, torch.zeros(2, 3, dtype=torch.int64))
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def boundaries(lengths: list[int], *, room: int) -> tuple[torch.Tensor, ...]:
    """Positions, `cu_seqlens` filled up to so many documents, and their number and longest."""
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, SEQ_LEN)
    starts = torch.full((room + 1,), 2 * SEQ_LEN, dtype=torch.int32)
    starts[: len(lengths)] = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return positions, starts, torch.tensor([len(lengths), max(lengths)])


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_a_kernel_gives_the_loss_and_gradients_of_the_mask(recomputed: int) -> None:
    ids, found = some_ids(2, SEQ_LEN), []
    said = boundaries([10, 22, 3, 1, 28], room=64)
    for kernel in (None, "each"):
        model = make_model(kernel=kernel, recomputed=recomputed)
        loss, _ = model(ids, ids.roll(-1, 1), *said)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    (expected, theirs), (loss, ours) = found
    torch.testing.assert_close(loss, expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_model_is_compiled_once_for_any_documents() -> None:
    model, ids = make_model(kernel="each", recomputed=1), some_ids(2, SEQ_LEN)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, dynamic=False)
    for lengths in ([32, 32], [10, 22, 3, 1, 28], [1] * 64):
        said = boundaries(lengths, room=64)
        loss, _ = compiled(ids, ids, *said)
        loss.backward()
        torch.testing.assert_close(loss.detach(), model(ids, ids, *said)[0].detach())
    torch.compiler.reset()
    assert counter.frame_count == 1


def test_plans_are_made_for_few_sizes_that_are_hardly_too_large() -> None:
    sizes = {rounded_up(number, least=4) for number in range(1, 4097)}
    assert len(sizes) <= 2 * math.log2(4096)
    for number in range(4, 4097):
        assert number <= rounded_up(number, least=4) < 2 * max(number, 4)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, ["each"]),
        ("cuda", torch.float32, []),  # kernels are in half precision
        # torch has it since 2.10.
        ("cuda", torch.bfloat16, ["varlen"] if find_spec("torch.nn.attention.varlen") else []),
    ],
)
def test_a_kernel_is_found_for_a_device(
    device: str, dtype: torch.dtype, expected: list[str]
) -> None:
    found = find_kernels(torch.device(device), dtype)
    assert [name for name in found if name != "cudnn"] == expected


def test_recomputing_gives_the_same_gradients_from_less_memory_the_more_layers_it_is_of() -> None:
    ids, gradients, kept = some_ids(2, SEQ_LEN), [], []
    for recomputed in (0, 1, 2):
        model = make_model(recomputed=recomputed)
        saved = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss, _ = model(ids, ids)
        kept.append(saved)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again, all_again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)
        torch.testing.assert_close(plain, all_again)
    assert kept[1] < 0.8 * kept[0]
    assert kept[2] < 0.5 * kept[0]


def test_computing_in_bf16_keeps_weights_and_loss_in_fp32() -> None:
    with torch.device("meta"):  # dtypes without numbers: not every CPU can multiply in bf16
        model = Model(TINY, vocab_size=VOCAB, seq_len=SEQ_LEN, dtype=torch.bfloat16)
        ids = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    loss, _ = model(ids, ids)
    loss.backward()
    assert loss.dtype is torch.float32
    assert model.logits(ids).dtype is torch.bfloat16
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_a_head_of_odd_width_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 8"):
        ModelConfig(num_layers=1, width=60, num_heads=4, max_seq_len=8)
