"""Tokens over seconds of the slowest rank, and the peak that utilisation is of."""

from __future__ import annotations

import pytest

from meshmark.run.throughput import peak_flops_per_second, throughput
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.theory.flops import model_flops_per_token
from tests.factories import make_case, make_environment, make_timed, make_timing

TOKENS = 4 * 12


def test_tokens_per_second_is_all_tokens_over_all_seconds_of_the_slowest_rank() -> None:
    """Steps of 1 and 3 seconds: 2 steps in 4 seconds, not the mean of the rates 1 and 1/3; the ranks take turns in
    being the slowest, so neither one's own sum (2.5, 2.0) will do."""
    found = throughput(make_timed(timing=make_timing(rank_step_seconds=[[1.0, 1.5], [0.5, 3.0]])))
    assert found.per_second == pytest.approx(TOKENS * 2 / 4)


def test_mfu_is_model_operations_over_the_peak_of_all_ranks() -> None:
    record = make_timed(timing=make_timing(rank_step_seconds=[[0.5, 0.5]] * 2, matmul_flops_per_second=[1e9, 3e9]))
    found = throughput(record)
    per_token = model_flops_per_token(record.case.workload.model)
    assert found.mfu == pytest.approx(TOKENS / 0.5 * per_token / 4e9)
    assert found.peak_source == "best matrix product, all ranks at once"


@pytest.mark.parametrize(
    "machine, precision, ranks, nnodes, peak",
    [
        ("1 x NVIDIA H100 80GB HBM3", Precision.BF16, 1, 1, 989.4e12),
        ("8 x NVIDIA H100 80GB HBM3", Precision.BF16, 2, 1, 2 * 989.4e12),
        ("1 x NVIDIA H200", Precision.FP32, 2, 1, 67e12),
        ("1 x NVIDIA A100-SXM4-80GB", Precision.FP16, 2, 2, 2 * 312e12),
    ],
    ids=["one", "two of eight", "two ranks share one", "two nodes"],
)
def test_the_peak_of_a_known_gpu_is_its_datasheet_s_times_the_gpus_in_use(
    machine: str, precision: Precision, ranks: int, nnodes: int, peak: float
) -> None:
    record = make_timed(
        case=make_case(layout=Layout(dp=ranks), precision=precision),
        environment=make_environment(machine=machine, device="cuda", nnodes=nnodes),
    )
    found, source = peak_flops_per_second(record)
    assert found == peak
    assert source.startswith("datasheet of ")


@pytest.mark.parametrize(
    "machine, precision, device",
    [
        ("1 x NVIDIA Unheard 9000", Precision.BF16, "cuda"),
        ("1 x NVIDIA H200", Precision.FP64, "cuda"),
        ("2 CUDA devices", Precision.FP32, "cuda"),
        ("no GPU", Precision.FP32, "cuda"),
        ("1 x NVIDIA H200", Precision.FP32, "cpu"),
    ],
)
def test_a_peak_that_nobody_published_is_measured(machine: str, precision: Precision, device: str) -> None:
    record = make_timed(
        case=make_case(precision=precision), environment=make_environment(machine=machine, device=device)
    )
    assert peak_flops_per_second(record) == (3e9, "best matrix product, all ranks at once")
