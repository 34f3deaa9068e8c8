"""ZeRO-Infinity's files: what they hold before and after a step; and what is refused."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshmark.adapter.engine import RankContext
from meshmark.adapters.deepspeed.infinity import OPERATORS, DeepSpeedInfinity, InfinityEngine
from meshmark.adapters.deepspeed.operators import missing
from meshmark.models.module import initial_value
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload
from tests.broken.mutant import GPT, WIDE
from tests.ranks import on_two_ranks

CASE = Case(adapter="deepspeed-infinity", workload=WIDE, layout=Layout(dp=2, zero_stage=3, offload=Offload.NVME))


def read(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.float32))


def look(rank: int) -> dict[str, bool]:
    """Before a step and after it: whether files hold this rank's share of the initial values, whether those of weights
    that are computed with are those of masters, and whether those of moments are there and not zero."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        return held(
            RankContext(rank=rank, world_size=2, device=torch.device("cpu"), backend="gloo", scratch=Path(scratch))
        )


def held(context: RankContext) -> dict[str, bool]:
    rank = context.rank
    engine = DeepSpeedInfinity().build(CASE, context)
    assert isinstance(engine, InfinityEngine)
    folder = context.scratch / "infinity" / "zero_stage_3"
    (masters,) = (folder / "optimizer" / f"rank{rank}").glob("[0-9]*.swp")
    drawn = [initial_value(WIDE.model, name, p.ds_shape, seed=WIDE.seed) for name, p in engine.named_parameters()]  # type: ignore[attr-defined]
    shares = [values.flatten().chunk(2)[rank] for values in drawn]
    before = read(masters)[: sum(map(len, shares))]
    starts = dict(zip((n for n, _ in engine.named_parameters()), np.cumsum([0, *map(len, shares)]), strict=False))
    found = {"initial": torch.equal(before, torch.cat(shares))}
    engine.step(make_batch(WIDE, 0))
    after = read(masters)[: len(before)]
    swapped = {id(parameter) for parameter in engine.swapped()}
    pairs = [
        (read(Path(p.nvme_swapper.get_path(p))), after[starts[name] : starts[name] + p.ds_tensor.ds_numel])  # type: ignore[attr-defined]
        for name, p in engine.named_parameters()
        if id(p) in swapped
    ]
    found["moved"] = bool((after != before).any())
    found["weights"] = len(pairs) == 2 and all(torch.equal(*pair) for pair in pairs)
    moments = [*(folder / "optimizer" / f"rank{rank}").glob("exp_avg*.swp")]
    found["moments"] = len(moments) == 2 and all(bool(read(path).count_nonzero()) for path in moments)
    return found


def test_files_hold_states_and_weights() -> None:
    if reason := missing(*OPERATORS):
        pytest.skip(reason)
    assert on_two_ranks(look) == {"initial": True, "moved": True, "weights": True, "moments": True}


def test_what_would_stay_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshmark.adapters.deepspeed import operators

    monkeypatch.setattr(operators, "FOLDER", tmp_path)
    command = "python -m meshmark.adapters.deepspeed.operators cpu_adam pin_memory async_io"
    absent = "DeepSpeed's cpu_adam, pin_memory, async_io is not built"
    assert DeepSpeedInfinity.refusal(CASE, "cpu", "gloo") == f"{absent}: {command}"
    for name in OPERATORS:
        (tmp_path / f"{name}.so").touch()
    assert DeepSpeedInfinity.refusal(CASE, "cpu", "gloo") is None
    reason = DeepSpeedInfinity.refusal(replace(CASE, workload=GPT), "cpu", "gloo")
    odd = replace(WIDE, model=replace(WIDE.model, hidden=400, ffn_hidden=1600))
    assert "512 bytes" in str(DeepSpeedInfinity.refusal(replace(CASE, workload=odd), "cpu", "gloo"))
    assert reason and reason.endswith("a rank's share of the largest tensor of gpt-mini is 16,384")
