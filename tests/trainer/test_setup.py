from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.runs import SEQ_LEN, VOCAB, make_setup

from tokenmill.errors import DeviceMemoryError, UsageError
from tokenmill.trainer.loop import (
    SHARE_OF_MEMORY,
    Setup,
    TrainRanks,
    advice,
    fitting_layers,
    fitting_rows,
    is_out_of_memory,
    memory_error,
    peak_flops,
)
from tokenmill.trainer.model import Model, learning_rates
from tokenmill.trainer.options import attention_windows, parse_mixture, peak_of


@pytest.mark.parametrize(
    ("said", "micro_batch", "accumulate"),
    [
        ({"batch_tokens": 512, "micro_batch": 4}, 4, 4),
        ({"batch_tokens": 512, "accumulate": 2}, 8, 2),
        ({"micro_batch": 4, "accumulate": 3}, 4, 3),
        ({"batch_tokens": 512}, 16, 1),
        ({"batch_tokens": 512, "ranks": TrainRanks(rank=1, world_size=2)}, 8, 1),
        ({"micro_batch": 7}, 7, 4),  # as near to the preset's 1,024 tokens as it goes
    ],
)
def test_a_step_is_divided_as_it_was_said(
    said: dict[str, Any], micro_batch: int, accumulate: int
) -> None:
    setup = make_setup(**said)
    assert (setup.micro_batch, setup.accumulate) == (micro_batch, accumulate)
    parts = setup.ranks.world_size * micro_batch * accumulate
    assert setup.batch_tokens == parts * SEQ_LEN


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"batch_tokens": 500}, "use --batch-tokens 480 or --batch-tokens 512"),
        ({"batch_tokens": 8}, "use --batch-tokens 32"),
        (
            {"batch_tokens": 512, "micro_batch": 3},
            "use --batch-tokens 480 or --batch-tokens 576",
        ),
        ({"batch_tokens": 512, "micro_batch": 4, "accumulate": 2}, "use --batch-tokens 256"),
        (
            {"batch_tokens": 544, "ranks": TrainRanks(world_size=2)},
            "use --batch-tokens 512 or --batch-tokens 576",
        ),
    ],
)
def test_numbers_that_do_not_come_out_even_get_the_nearest_that_do(
    said: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_setup(**said)
    assert caught.value.hint == hint
    assert f"--batch-tokens {said['batch_tokens']}" in caught.value.message


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"model": "huge"}, "no model 'huge'"),
        ({"seq_len": 2048, "model": "tiny"}, "longer than the context of the model 'tiny', 1,024"),
        ({"steps": 0}, "steps=0"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"attention": "none"}, "attention='none'"),
        ({"window": "1024"}, "window='1024' would have no effect with attention='flash'"),
        ({"window": "512:1024", "attention": "documents"}, "window='512:1024' is no schedule"),
        ({"window": "0:16,0:32", "attention": "documents"}, "window='0:16,0:32' is no schedule"),
        ({"window": "0:0", "attention": "documents"}, "window='0:0' is no schedule"),
        ({"window": "1k", "attention": "documents"}, "window='1k' is no schedule"),
        ({"window": "0:8,1e999:9", "attention": "documents"}, "is no schedule"),
        ({"mixture": "folder:"}, "mixture='folder:' does not say"),
        ({"mixture": "folder:web=0.5,web=0.5"}, "does not say by which column"),
        ({"mixture": "source", "feed": "encode"}, "mixture='source' cannot be had"),
        ({"packing": "tight"}, "packing='tight'"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"warmup": 20, "steps": 20}, "warmup=20"),
        ({"device": "tpu0x"}, "device='tpu0x'"),
        ({"device": "meta"}, "device='meta'"),
    ],
)
def test_a_bad_option_is_named_with_its_value(said: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_setup(**said)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_said() -> None:
    with pytest.raises(UsageError, match="finds no CUDA device"):
        make_setup(device="cuda")


def test_activations_are_computed_again_as_far_as_they_do_not_fit() -> None:
    """Of as many layers as need be, and of none because rows are long."""
    assert make_setup().recomputed == 0
    assert make_setup(checkpointing=True).recomputed == 2
    setup = make_setup(model="medium", seq_len=8192, micro_batch=1, checkpointing=False)
    assert setup.recomputed == 0

    def need(recomputed: int) -> float:
        needed = replace(setup, recomputed=recomputed).need
        return (needed.fixed_bytes + needed.activations) / SHARE_OF_MEMORY

    assert fitting_layers(setup, free=math.ceil(need(0))) == 0
    # One of them is there whole at a time: to compute a single one again saves nothing.
    assert fitting_layers(setup, free=math.ceil(need(0)) - 1) == 2
    assert need(1) > need(0) > need(2)
    assert fitting_layers(setup, free=math.ceil(need(7))) == 7
    assert fitting_layers(setup, free=0) == 20


def test_a_schedule_of_windows_is_read() -> None:
    assert attention_windows(None) is None
    assert attention_windows("1024") == [(0, 1024)]
    expected = [(0, 1024), (2_000_000_000, 4096), (20_000_000_000, None)]
    assert attention_windows("0:1024,2e9:4096, 20_000_000_000:all") == expected


def test_a_mixture_is_read() -> None:
    assert parse_mixture(None) is None
    assert parse_mixture("source") == ("source", None)
    expected = {"a=b.jsonl": 0.25, "*": 3.0}
    assert parse_mixture("source: a=b.jsonl=0.25, *=3") == ("source", expected)


def test_a_cosine_rises_and_falls_to_a_tenth() -> None:
    rates = learning_rates("cosine", peak=1.0, steps=101, warmup=10)
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert (np.diff(rates[10:]) < 0).all()


def test_wsd_stays_and_falls_in_the_last_fifth() -> None:
    rates = learning_rates("wsd", peak=2.0, steps=111, warmup=10)
    assert (rates[10:90] == 2.0).all()
    assert (np.diff(rates[91:]) < 0).all()
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rates("wsd", peak=1.0, steps=1, warmup=0).tolist() == [1.0]


def test_running_out_of_memory_gives_numbers_and_what_to_type() -> None:
    setup = make_setup(model="small", batch_tokens=32 * 24, micro_batch=8)
    error = memory_error(setup)
    assert isinstance(error, DeviceMemoryError)
    parameters = setup.config.num_parameters(VOCAB)
    assert f"parameters {4 * parameters / 1e6:.0f} MB" in error.message
    assert f"optimizer state {8 * parameters / 1e6:.0f} MB" in error.message
    assert "activations about" in error.message
    first, second, third = advice(setup)
    assert "--micro-batch 4 --accumulate 6" in first
    assert "--checkpointing" in second
    assert "--optimizer adamw8bit (saves 511 MB)" in third
    lean = make_setup(
        model="small", batch_tokens=32, micro_batch=1, checkpointing=True, optimizer="adamw8bit"
    )
    assert advice(lean) == [
        "use a smaller --model or a shorter --seq-len: there is nothing left to save"
    ]


def kept_bytes(setup: Setup, *, layers: int, vocab_size: int) -> int:
    """What the backward pass of a micro-batch keeps, copies of the matrices apart."""
    config = replace(setup.config, num_layers=layers)
    rows, length = setup.micro_batch, setup.seq_len
    model = Model(config, vocab_size=vocab_size, seq_len=length, dtype=setup.dtype)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.compiler.reset()
    forward = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        (forward if setup.compiles else model)(ids, ids)
    torch.compiler.reset()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {p.shape[::turn] for p in model.parameters() for turn in (1, -1)}
    return sum(
        tensor.untyped_storage().nbytes()
        for place, tensor in kept.items()
        if place not in weights and tensor.shape not in shapes
    )


@pytest.mark.parametrize(
    ("precision", "compiled"), [("fp32", False), ("bf16", False), ("bf16", True)]
)
def test_the_estimate_is_what_the_backward_pass_keeps_of_a_layer(
    precision: str, compiled: bool
) -> None:
    """Within a twentieth; the logits, of which copies are made besides, are left out."""
    setup = make_setup(micro_batch=3, accumulate=1, precision=precision, compile=compiled)
    few, many = (kept_bytes(setup, layers=layers, vocab_size=VOCAB) for layers in (1, 3))
    needed = [
        replace(setup, config=replace(setup.config, num_layers=layers)).need.activations
        for layers in (1, 3)
    ]
    assert many - few == pytest.approx(needed[1] - needed[0], rel=0.05)


def test_memory_that_runs_out_on_a_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 56)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("something else"))


def test_a_micro_batch_that_nobody_chose_fits() -> None:
    setup = make_setup(seq_len=1024, batch_tokens=1 << 20)
    assert setup.micro_batch == 8  # 8,192 tokens: more at once are of no use
    need = setup.need
    room = int((need.fixed_bytes + 3.5 * need.activation_bytes) / SHARE_OF_MEMORY)
    assert fitting_rows(setup, 1024, free=room) == 2  # a divisor of the rows
    assert fitting_rows(setup, 999, free=room) == 3
    assert fitting_rows(setup, 1024, free=0) == 1


def test_no_peak_is_guessed() -> None:
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert peak_of("NVIDIA Abacus") is None
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12, "not that of an A10"
    assert peak_of("NVIDIA L40S") == 362e12, "not that of an L4"
