"""Offload, Megatron's own model, and a folded pipeline, through the launcher, in a tiny case each: the rest of the
roster is what `make roster` runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapters.deepspeed import operators
from meshmark.adapters.megatron.buckets import bucket_sizes, default_elements, local_sizes
from meshmark.adapters.megatron.overlap import MegatronGPTOverlap
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from tests.broken.mutant import DEEP, GPT, LAYOUTS

MEGATRON = Case(adapter="megatron-gpt", workload=GPT, layout=LAYOUTS["pipeline"])
OFFLOADED = Case(adapter="deepspeed-offload", workload=GPT, layout=LAYOUTS["deepspeed-offload/2"])
FOLDED = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2, folded=True)
A_V = Case(adapter="pipeline-zbv", workload=DEEP, layout=FOLDED)


def refusal() -> str | None:
    return load_adapter(builtin_adapters()["deepspeed-offload"]).refusal(OFFLOADED, "cpu", "gloo")


@pytest.mark.parametrize("system", [OFFLOADED, MEGATRON, A_V], ids=lambda case: case.adapter)
def test_a_system_trains_as_planned(launcher: ForkserverLauncher, tmp_path: Path, system: Case) -> None:
    if system is OFFLOADED and (reason := refusal()):
        pytest.skip(reason)
    runner = Runner(launcher, builtin_adapters(), RunOptions(observed_steps=3), tmp_path)
    record = runner.observe(system)
    runner.close()
    judged = {v.suite: v.passed for v in record.verdicts}
    assert judged == {"equivalence": True, "memory": True, "communication": True}, record.outcome.message


def test_of_megatron_s_every_chunk_but_the_pipeline_s_first_keeps_what_it_has_received() -> None:
    """An interleaved first rank receives too."""
    interleaved = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    received = 2 * 4 * 32 * 32 * (DEEP.global_batch // 4)

    def kept(layout: Layout) -> list[float]:
        case = Case(adapter="megatron-gpt", workload=DEEP, layout=layout)
        adapter = load_adapter(builtin_adapters()["megatron-gpt"])
        declared = [[r for r in adapter.extra_memory(case, rank) if "received" in r.reason] for rank in range(2)]
        return [sum(r.num_bytes for r in of_rank) / received for of_rank in declared]

    assert kept(interleaved) == [1, 2]
    assert kept(LAYOUTS["pipeline"]) == [0, 1]


def test_megatron_s_first_stage_alone_reduces_in_buckets() -> None:
    case = Case(adapter="megatron-gpt-overlap", workload=GPT, layout=replace(LAYOUTS["pipeline"], dp=2))
    found = [sum(MegatronGPTOverlap.num_buckets(case, rank)) for rank in range(4)]
    assert sorted(found) == [1, 1, 2, 2] and found[0] == 2


def test_megatron_s_shared_buckets_are_padded_each() -> None:
    """Tensors begin at multiples of 64, and every bucket ends at one of 128."""
    case = Case(adapter="megatron-gpt-recommended", workload=GPT, layout=Layout(dp=2, zero_stage=1))
    sizes = sum(local_sizes(case, 0, range(1)))
    one, several = bucket_sizes(case, 0, 0, default_elements(2)), bucket_sizes(case, 0, 0, 10_000)
    assert len(one) == 1 and len(several) > 1 and not any(n % 128 for n in (*one, *several))
    assert sizes < sum(one) <= sum(several)
    whole = replace(case, layout=Layout(dp=2))
    assert sum(bucket_sizes(whole, 0, 0, 10_000)) == sizes == sum(local_sizes(whole, 0, range(1)))


def test_a_stage_of_deepspeed_receives_from_either_side_into_one_buffer() -> None:
    layout = Layout(pp=4, zero_stage=1, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
    case = Case(adapter="deepspeed-pipeline", workload=DEEP, layout=layout)
    adapter = load_adapter(builtin_adapters()["deepspeed-pipeline"])
    declared = [[r.num_bytes for r in adapter.extra_memory(case, rank) if "receive" in r.reason] for rank in range(4)]
    assert declared == [[4 * 32 * 32 * (DEEP.global_batch // 4)]] * 4


def test_an_operator_that_is_not_built_is_a_skip_with_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "FOLDER", tmp_path)
    command = "python -m meshmark.adapters.deepspeed.operators cpu_adam"
    assert refusal() == f"DeepSpeed's cpu_adam is not built: {command}"
    (tmp_path / "cpu_adam.so").touch()
    assert operators.missing("cpu_adam") is None
