"""Loops as engines: which rows each rank gets, where a loop is stopped, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from meshmark.adapter.engine import RankContext
from meshmark.adapter.loop import Dealing, GlobalRows, Loop, LoopEngine, Moment, collate
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.options import chosen_workloads
from meshmark.errors import AdapterError
from meshmark.launch.launch import ForkserverLauncher
from meshmark.reference.data import Batch, make_batch
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

ROOT = Path(__file__).parent.parent
GPT = workload("gpt-mini")
LAYOUT = Layout(dp=2, num_micro_batches=2)


def case(layout: Layout = LAYOUT) -> Case:
    return Case(adapter="plain-loop", workload=GPT, layout=layout)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def context(tmp_path: Path) -> RankContext:
    return RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=tmp_path)


@pytest.mark.parametrize(
    ("name", "broadcasts"),
    [
        ("ddp-recommended", True),
        ("plain-loop", False),
        ("hf-trainer-model-loss", False),
        ("hf-trainer-rank-means", False),
    ],
)
def test_loops_that_ask_ddp_for_no_broadcast_of_buffers_plan_none(name: str, broadcasts: bool) -> None:
    """They were accused of sending none, on models with buffers such as Llama's tables of positions."""
    (llama,) = chosen_workloads(f"hf:{ROOT}/examples/transformers/llama.json", None, None)
    one = Case(adapter=name, workload=llama, layout=LAYOUT)
    exceptions = load_adapter(builtin_adapters()[name]).traffic_exceptions(one, 0)
    assert any(flow.kind == "broadcast" for each in exceptions for flow in each.sends) == broadcasts


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sampler_of_ranks_deals_each_the_micro_batches_of_its_layout(rank: int) -> None:
    rows = GlobalRows(case(), Dealing.ROWS)
    sampler: DistributedSampler[Batch] = DistributedSampler(rows, num_replicas=2, rank=rank, shuffle=False)
    batches = iter(DataLoader(rows, batch_size=2, sampler=sampler, collate_fn=collate))
    for step in range(2):
        for micro in make_batch(GPT, step).shard(rank, 2).micro_batches(2):
            assert same(next(batches), micro)


def test_micro_batches_dealt_in_turn_are_those_of_the_layout() -> None:
    rows = GlobalRows(case(), Dealing.MICRO_BATCHES)
    batches = iter(DataLoader(rows, batch_size=2, collate_fn=collate))
    for step in range(2):
        parts = [list(make_batch(GPT, step).shard(rank, 2).micro_batches(2)) for rank in range(2)]
        for micro in range(2):
            for rank in range(2):
                assert same(next(batches), parts[rank][micro])


class Tiny(Loop):
    """One parameter; `moments` are what it calls back at in a step."""

    def __init__(self, tmp_path: Path, *moments: str) -> None:
        super().__init__(case(Layout()), context(tmp_path), Dealing.ROWS)
        self.moments = moments
        self.left = False

    def run(self, checkpoint: Path | None) -> None:
        model = nn.Linear(1, 1)
        try:
            self.ready(model, torch.optim.SGD(model.parameters()))
            for moment in self.moments:
                assert torch.is_grad_enabled()
                with torch.no_grad(), torch.autocast("cpu"):
                    self.gradients_complete(torch.ones(())) if moment == "gradients" else self.step_done()
        finally:
            self.left = True


def engine_of(loop: Tiny) -> LoopEngine:
    return LoopEngine(loop.case, loop.context, loop)


def test_a_loop_is_stopped_twice_a_step_and_left_where_it_stands(tmp_path: Path) -> None:
    loop = Tiny(tmp_path, "gradients", "step", "gradients")
    engine, batch = engine_of(loop), make_batch(GPT, 0)
    with torch.no_grad():  # as when a pass first asks
        engine.parameters()
    assert float(engine.backward(batch)) == 1
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"), "modes of the loop stay in it"
    engine.update()
    engine.backward(batch)
    assert not loop.left
    engine.close()
    assert loop.left


@pytest.mark.parametrize(
    ("moments", "told"),
    [(("step",), "came to 'step done', expected 'gradients complete'"), ((), "ended, expected 'gradients complete'")],
)
def test_a_loop_that_calls_back_otherwise_is_told_what_is_expected(
    tmp_path: Path, moments: tuple[str, ...], told: str
) -> None:
    engine = engine_of(Tiny(tmp_path, *moments))
    with pytest.raises(AdapterError, match=told):
        engine.backward(make_batch(GPT, 0))


def test_an_error_of_the_trainer_is_the_rank_s(tmp_path: Path) -> None:
    class Fails(Tiny):
        def run(self, checkpoint: Path | None) -> None:
            raise ZeroDivisionError("of the trainer")

    with pytest.raises(ZeroDivisionError, match="of the trainer"):
        engine_of(Fails(tmp_path)).parameters()


def test_a_checkpoint_is_loaded_before_the_first_step_alone(tmp_path: Path) -> None:
    engine = engine_of(Tiny(tmp_path))
    engine.parameters()
    with pytest.raises(AdapterError, match="before its first step"):
        engine.load(tmp_path)


def test_a_loop_outside_of_an_engine_says_so(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=Moment.READY):
        Tiny(tmp_path).run(None)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["hf-trainer", "lightning-trainer"])
def test_a_trainer_is_judged_as_an_engine_is(trainer: str, launcher: ForkserverLauncher, tmp_path: Path) -> None:
    asked = Case(adapter=trainer, workload=GPT, layout=LAYOUT)
    if reason := load_adapter(builtin_adapters()[trainer]).refusal(asked, "cpu", "gloo"):
        pytest.skip(reason)
    runner = Runner(launcher, builtin_adapters(), RunOptions(observed_steps=3), tmp_path)
    record = runner.observe(asked)
    runner.close()
    judged = {verdict.suite: verdict.passed for verdict in record.verdicts}
    assert judged == {"equivalence": True, "memory": True, "communication": True}, record.outcome.message


def test_an_absent_trainer_is_skipped_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import meshmark.adapter.contract as module

    real = module.find_spec
    hidden: Any = lambda name: None if name == "pytorch_lightning" else real(name)  # noqa: E731
    monkeypatch.setattr(module, "find_spec", hidden)
    adapter = load_adapter(builtin_adapters()["lightning-trainer"])
    assert "pip install pytorch-lightning" in str(adapter.refusal(case(), "cpu", "gloo"))
