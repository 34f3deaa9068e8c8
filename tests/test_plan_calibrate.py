"""Calibration: curves through measurements, one file for a machine and its rates, this machine really measured."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmark.cli.commands import main
from meshmark.errors import InputError
from meshmark.models.transformer import gpt
from meshmark.plan.calibrate import (
    Microbenchmarks,
    calibrate_here,
    latency_and_bandwidth,
    machine_from,
    width_curve,
)
from meshmark.plan.calibration_file import Calibrated, calibrated_at, read_calibrated, write_calibrated
from meshmark.plan.microbenchmarks import Measurement
from meshmark.plan.prediction import predict_grid
from meshmark.plan.rates import Rates, rates
from meshmark.spec.hardware import Gpu, gpu, gpu_of_device
from meshmark.theory.grid import make_grid
from meshmark.theory.recipe import recipe
from studies.twins_calibrated import calibrated_twin
from tests.test_plan_search import sweep_rows, write_table


def measurement(kind: str, seconds: float, work: float, size: int = 512, dtype: str = "fp32") -> Measurement:
    return Measurement(kind=kind, dtype=dtype, size=size, seconds=seconds, work=work)


def some_machine(peak: float = 5e10) -> Gpu:
    return Gpu(
        name="some-cpu",
        peak_flops={"fp32": peak},
        memory_bytes=8e9,
        memory_bandwidth=2e10,
        link_bandwidth=1e9,
        network_bandwidth=1e9,
        gpus_per_node=2,
        source="a test",
    )


def findings(scale: float = 1.0, peak: float = 5e10) -> Microbenchmarks:
    products = [measurement("product", 1e9 / peak / scale, 1e9, size) for size in (128, 256, 512)]
    return Microbenchmarks(
        main_dtype="fp32",
        on_device=[
            *products,
            measurement("attention", 1.0, 0.4 * peak),
            measurement("elementwise", 1.0, 1e10),
            measurement("copy", 1.0, 2e10),
        ],
        inside=[measurement("all_gather", 1e-4 + b / 1e9, b) for b in (1e4, 1e6, 1e8)],
        overlap=0.25,
    )


@given(efficiency=st.floats(0.2, 1.0), half=st.floats(0.0, 2000.0))
def test_a_width_curve_is_found_again(efficiency: float, half: float) -> None:
    products = [measurement("product", 1.0, 1e12 * efficiency * h / (h + half), h) for h in (128, 512, 2048, 8192)]
    found, width = width_curve(products, 1e12)
    assert found == pytest.approx(efficiency, rel=1e-6)
    assert width == pytest.approx(half, rel=1e-4, abs=1e-3)


def test_what_is_no_curve_is_the_median() -> None:
    slower_when_wider = [
        measurement("product", 1.0, rate * 1e12, h) for rate, h in ((0.9, 128), (0.8, 512), (0.7, 2048))
    ]
    assert width_curve(slower_when_wider, 1e12) == (pytest.approx(0.8), 0.0)


@given(latency=st.floats(1e-5, 1e-2), bandwidth=st.floats(1e8, 1e12))
def test_latency_and_bandwidth_are_found_again_and_an_all_reduce_is_two_collectives(
    latency: float, bandwidth: float
) -> None:
    found = latency_and_bandwidth(
        [measurement("all_gather", latency + b / bandwidth, b) for b in (1e4, 1e6, 1e8)]
        + [measurement("all_reduce", 2 * latency + 2 * b / bandwidth, 2 * b) for b in (1e5, 1e7, 1e9)]
    )
    assert found == (pytest.approx(latency, rel=1e-3), pytest.approx(bandwidth, rel=1e-3))


@given(scale=st.floats(0.1, 1.0))
def test_a_calibrated_step_takes_what_the_products_took(scale: float) -> None:
    """The rates are shares of the machine that is written with them, whatever a datasheet says of another."""
    there = machine_from(findings(scale), some_machine(), world=2)
    model = gpt("x", 2, 256, 4, vocab_size=256, seq_len=64)
    found = predict_grid(model, make_grid(micro_batch=[4]), there.gpu, recipe("fp32"), there.rates)
    flops = 6.0 * 4 * 64 * (2 * 12 * 256 * 256 + 256 * 256)
    assert found.time.matmul[0] == pytest.approx(flops / (5e10 * scale))


def test_what_was_measured_is_in_the_rates_and_what_was_not_is_as_inside_the_node() -> None:
    there = machine_from(findings(), some_machine(), world=2)
    found = there.rates
    assert (found.kernels.attention_efficiency, found.kernels.memory_efficiency) == (
        pytest.approx(0.4),
        pytest.approx(0.5),
    )
    assert (
        found.network.tp_bandwidth == found.network.node_bandwidth == found.network.p2p_bandwidth == pytest.approx(1e9)
    )
    assert found.network.tp_latency_seconds == pytest.approx(1e-4) and found.network.overlap == 0.25
    assert "a test" in found.origin and found.name == "some-cpu" and found.host.step_seconds == 0.0
    across = [measurement("all_gather", 2e-3 + b / 1e8, b) for b in (1e4, 1e6, 1e8)]
    wide = machine_from(dataclasses.replace(findings(), across=across), some_machine(), world=5).rates
    assert (wide.network.tp_bandwidth, wide.network.tp_network_bandwidth) == (pytest.approx(1e9), pytest.approx(1e8))
    assert wide.network.hop_seconds == pytest.approx(5e-4) and wide.network.node_bandwidth == pytest.approx(2e8)


def test_a_known_gpu_keeps_its_datasheet_and_the_fitted_rates_of_what_was_not_measured() -> None:
    h100 = gpu("h100")
    products = [measurement("product", 1.0, 6e14, h, "bf16") for h in (1024, 4096)]
    alone = Microbenchmarks(main_dtype="bf16", on_device=[*products, *findings().on_device[3:]])
    found = machine_from(alone, h100, world=1)
    assert found.gpu == h100 and found.rates.kernels.gemm_efficiency == pytest.approx(6e14 / 989.4e12)
    assert (
        found.rates.network.node_bandwidth == rates("h100-sweep").network.node_bandwidth
        and "ultrascale" in found.rates.origin
    )


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla V100-SXM3-32GB", "v100-32"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L4", None),
    ],
)
def test_calibration_measures_against_the_gpu_that_is_there(device: str, name: str | None) -> None:
    found = gpu_of_device(device)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("machine", [some_machine(), gpu("h100")], ids=["host unknown", "host known"])
def test_a_machine_survives_its_file(machine: Gpu, tmp_path: Path) -> None:
    there = Calibrated(gpu=machine, rates=Rates(name="some", origin="measured"))
    write_calibrated(tmp_path / "in" / "m.json", there)
    found = read_calibrated(tmp_path / "in" / "m.json")
    assert found.rates == there.rates
    assert dataclasses.replace(found.gpu, memory_bytes=machine.memory_bytes, host=machine.host) == machine
    assert (found.gpu.host is None) == (machine.host is None)
    with pytest.raises(InputError, match="cannot write"):
        write_calibrated(tmp_path / "in" / "m.json" / "m.json", there)


def test_a_machine_replaces_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so before it measures."""
    measured = list[object]()
    monkeypatch.setattr("meshmark.plan.calibrate.calibrate_here", lambda *given: measured.append(given))
    records = tmp_path / "records.jsonl"
    records.write_text("{}\n")
    assert main(["calibrate", "-o", str(records)]) == 2
    assert "it holds records" in capsys.readouterr().err and not measured
    with pytest.raises(InputError, match="it holds records"):
        write_calibrated(records, Calibrated(gpu=some_machine(), rates=Rates(name="some", origin="measured")))
    assert records.read_text() == "{}\n"


def test_plan_and_predict_use_a_machine_with_its_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.json"
    write_calibrated(file, machine_from(findings(), some_machine(), world=2))
    asked = ["plan", "--model", "gpt-tiny", "--gpus", "2", "--global-batch", "8", "--recipe", "fp32", "--json"]
    answers = []
    for option in ("--gpu", "--rates"):
        assert main([*asked, option, str(file)]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["gpu"] == "some-cpu" and "held to no run of pytorch on some-cpu" in answers[0]["rates"]
    assert answers[0]["layouts"] == answers[1]["layouts"]
    assert main([*asked, "--gpu", "h100", "--rates", str(file)]) == 2
    assert "are shares of some-cpu" in capsys.readouterr().err
    source, target = write_table(tmp_path / "in.csv", sweep_rows(1)), tmp_path / "out.csv"
    assert main(["predict", str(source), "-o", str(target), "--gpu", str(file), "--recipe", "fp32"]) == 0
    assert "Rates: some-cpu" in capsys.readouterr().out
    with target.open(newline="") as rows:
        assert all(float(row["predicted_step_seconds"]) > 1e3 for row in csv.DictReader(rows))


@pytest.mark.parametrize(
    "text, words", [("{", "cannot read"), ('{"gpu": {}}', "holds no machine"), (None, "cannot read")]
)
def test_a_file_that_holds_no_machine_is_refused(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.json"
    if text is not None:
        file.write_text(text)
    assert main(["plan", "--gpus", "2", "--gpu", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said and "meshmark calibrate -o" in said and said.count("\n") == 1
    assert calibrated_at("h100") is None


@pytest.mark.parametrize(
    "arguments, words", [(["--seconds", "0"], "expected more than 0"), (["--ranks", "0"], "0 ranks to calibrate with")]
)
def test_impossible_calibrations_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of its ranks together, for a moment: numbers that a machine can have, and a plan from them."""
    file = tmp_path / "m.json"
    assert calibrate_here(file, 0.5) == 0
    said = capfd.readouterr().out
    found = read_calibrated(file)
    fastest = max(float(line.split()[5]) for line in said.splitlines() if line.startswith("product        fp32"))
    assert found.gpu.peak_flops["fp32"] == pytest.approx(fastest * 1e9, rel=0.01)
    assert 1e9 < found.gpu.peak_flops["fp32"] < 1e14 and 1e9 < found.gpu.memory_bandwidth < 1e13
    assert 0 < found.rates.kernels.gemm_efficiency <= 1 and 0 < found.rates.kernels.memory_efficiency <= 1
    if found.gpu.gpus_per_node > 1:
        assert 1e-6 < found.rates.network.tp_latency_seconds < 1 and 1e6 < found.rates.network.tp_bandwidth < 1e13
        assert "reduce_scatter" in said


def test_real_steps_take_about_what_a_calibration_of_the_same_sitting_says() -> None:
    """As measured with `make twins`: one process within a fifth, every framework within a factor of two."""
    errors = {row[0][:3]: row[1][0].error for row in calibrated_twin().rows if row[1][0]}
    assert len(errors) == 18
    assert max(abs(e) for (name, *_), e in errors.items() if name == "single") < 0.2
    assert np.mean([abs(e) for e in errors.values()]) < 0.3 and min(errors.values()) > -0.5
