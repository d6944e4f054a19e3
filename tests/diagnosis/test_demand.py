from __future__ import annotations

import re

import pytest

from tokenmill.diagnosis.diagnose import check_known, demands
from tokenmill.errors import UsageError
from tokenmill.options import DiagnoseOptions


def test_a_rate_that_was_given_is_taken_as_it_is() -> None:
    [need] = demands(DiagnoseOptions(tokens_per_second=450_000, gpus=8), vocab_size=50_257)
    assert (need.tokens_per_second, need.total, need.is_estimate) == (450_000, 3_600_000, False)


def test_an_estimate_is_the_peak_times_the_mfu_over_the_cost_of_a_token() -> None:
    [need] = demands(
        DiagnoseOptions(model="small", gpu="H200", mfu=0.5, seq_len=2048), vocab_size=50_304
    )
    matrices = 12 * 12 * 768**2 + 50_304 * 768
    # Causal: each token looks at half of the row and itself.
    flops = 6 * matrices + 12 * 12 * 768 * 2049 / 2
    assert need.tokens_per_second == pytest.approx(989e12 * 0.5 / flops)
    assert need.is_estimate
    assert "50% of the 989 TFLOP/s of one H200, at 2,048 tokens" in need.basis
    assert "124M parameters" in need.origin


def test_without_a_model_there_is_a_demand_for_each_but_the_toy() -> None:
    found = demands(DiagnoseOptions(gpu="a100"), vocab_size=50_257)
    assert [need.name for need in found] == ["mini", "small", "medium", "large"]
    rates = [need.tokens_per_second for need in found]
    assert rates == sorted(rates, reverse=True)


def test_names_of_gpus_may_be_written_as_people_write_them() -> None:
    assert demands(DiagnoseOptions(model="small", gpu="RTX 4090"), vocab_size=100) == demands(
        DiagnoseOptions(model="small", gpu="rtx-4090"), vocab_size=100
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens_per_second": 5.0, "model": "small"}, "both say"),
        ({"tokens_per_second": 0.0}, "0 tokens a second"),
        ({"tokens_per_second": float("nan")}, "nan tokens a second"),
        ({"model": "gpt-9"}, "'gpt-9'"),
        ({"gpu": "Abacus"}, "'Abacus'"),
        ({"gpus": 0}, "0 GPUs"),
        ({"mfu": 1.5}, "mfu=1.5"),
        ({"seq_len": 0}, "seq_len=0"),
    ],
)
def test_a_demand_that_means_nothing_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        check_known(DiagnoseOptions(**options))  # type: ignore[arg-type]
    assert refused.value.hint
