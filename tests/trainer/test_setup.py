from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.runs import SEQ_LEN, VOCAB, make_setup

from tokenmill.errors import DeviceMemoryError, UsageError
from tokenmill.trainer.loop import (
    SHARE_OF_MEMORY,
    Trainer,
    TrainRanks,
    advice,
    fitting_rows,
    is_out_of_memory,
    memory_error,
    peak_flops,
)
from tokenmill.trainer.model import learning_rates
from tokenmill.trainer.options import peak_of


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


def test_activations_are_computed_again_for_long_rows_alone() -> None:
    assert not make_setup().checkpointing
    assert make_setup(model="medium", seq_len=8192, micro_batch=1).checkpointing
    assert not make_setup(
        model="medium", seq_len=8192, micro_batch=1, checkpointing=False
    ).checkpointing


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


def test_the_estimate_is_near_what_the_backward_pass_keeps() -> None:
    setup = make_setup(micro_batch=4, accumulate=1)
    ids = torch.zeros(4, SEQ_LEN, dtype=torch.int64)
    trainer, kept = Trainer(setup), {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.model(ids, ids)
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    found = sum(size for place, size in kept.items() if place not in weights)
    assert 0.5 < found / setup.need.activations < 2


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
