"""Judge an AdamW with 8-bit moments, step by step, against float64 at the run's own moments (arXiv:2110.02861)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import storage_bytes
from meshmark.compression.contract import Moment, OptimizerAdapter
from meshmark.compression.judge import FACTOR, compare, ratio
from meshmark.compression.specification import HALF_ULP, TABLE_ROOM, dynamic_codes, in_blocks, round_to_codes
from meshmark.records.judged_case import CaseVerdict

BLOCK = 256
"""Elements of a block of 8-bit moments."""
LEAST_8_BIT = 4096
"""Tensors of fewer elements keep float32 moments."""
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
"""Settings that are judged."""


def judge_optimizer(
    adapter: OptimizerAdapter, model: nn.Module, gradients: Callable[[nn.Module, int], None], steps: int = 5
) -> Iterator[CaseVerdict]:
    """Train `model` for `steps` steps and yield every verdict.

    `gradients(model, step)` leaves a step's gradients in the model's parameters.
    """
    parameters = dict(model.named_parameters())
    optimizer = adapter.build(parameters.values(), **OPTIONS)
    worst: dict[str, CaseVerdict] = {}
    other, total = 0, 0
    for step in range(1, steps + 1):
        gradients(model, step)
        before = {name: _State(adapter, optimizer, p) for name, p in parameters.items()}
        optimizer.step()
        for name, p in parameters.items():
            was = before[name]
            found = _State(adapter, optimizer, p)
            if was.is_8_bit(found) is False:
                text = f"{name}: {p.numel()} elements have {found.moments[0].values.dtype} moments"
                yield CaseVerdict(name="moments", passed=False, text=text)
                return
            exact = _step(was, step, torch.float64)
            twins = [_step(was, step, torch.float32, way) for way in (0, 1)]
            verdicts = [compare("update", p.detach(), exact[0], [twin[0] for twin in twins])]
            for index, part in ((1, "first moment"), (2, "second moment")):
                verdict, missed = _moment(part, found, index, exact[index], [twin[index] for twin in twins])
                verdicts.append(verdict)
                other += missed
                total += p.numel()
            for verdict in verdicts:
                last = worst.get(verdict.name)
                if last is None or last.passed and (not verdict.passed or ratio(verdict) > ratio(last)):
                    text = f"step {step}, {name}: {verdict.text}"
                    worst[verdict.name] = CaseVerdict(
                        name=verdict.name, passed=verdict.passed, text=text, numbers=verdict.numbers
                    )
    yield from worst.values()
    yield _bytes(adapter, optimizer, list(parameters.values()), other / total)


class _State:
    """A parameter, its gradient and its moments before a step, by our own table of codes."""

    def __init__(self, adapter: OptimizerAdapter, optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        assert p.grad is not None
        self.parameter, self.gradient = p.detach().clone(), p.grad.clone()
        state = optimizer.state.get(p)
        zero = Moment(values=torch.zeros_like(self.parameter), largest=None)
        self.moments = copy.deepcopy(adapter.moments(state)) if state else (zero, zero)
        self.values = [_values(m, signed) for m, signed in zip(self.moments, (True, False), strict=True)]

    def is_8_bit(self, after: _State) -> bool:
        """Return whether moments `after` the step are 8-bit where they should be, and float32 elsewhere."""
        should = self.parameter.numel() >= LEAST_8_BIT
        return all((moment.largest is not None) == should for moment in after.moments)


def _values(moment: Moment, signed: bool) -> Tensor:
    if moment.largest is None:
        return moment.values.double()
    largest = moment.largest.double().repeat_interleave(BLOCK)[: moment.values.numel()].view(moment.values.shape)
    return dynamic_codes(signed)[moment.values.long()] * largest


def _step(was: _State, step: int, dtype: torch.dtype, way: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter and moments after a step, before moments are rounded; `way` is an order of operations."""
    lr, (one, two), eps = OPTIONS["lr"], OPTIONS["betas"], OPTIONS["eps"]
    p, g, m, v = (x.to(dtype) for x in (was.parameter, was.gradient, *was.values))
    m = one * m + (1 - one) * g if way == 0 else m + (1 - one) * (g - m)
    v = two * v + (1 - two) * g * g if way == 0 else v + (1 - two) * (g.square() - v)
    first, second = 1 - one**step, 1 - two**step
    p = p * (1 - lr * OPTIONS["weight_decay"])
    if way == 0:
        return p - lr * (m / first) / ((v / second).sqrt() + eps), m, v
    return p - lr / first * m / (v.sqrt() / math.sqrt(second) + eps), m, v


def _moment(part: str, after: _State, index: int, exact: Tensor, twins: Sequence[Tensor]) -> tuple[CaseVerdict, int]:
    """Compare a moment, relative to the largest of its block; return how many codes are not the nearest too."""
    found, moment = after.values[index - 1], after.moments[index - 1]
    if moment.largest is None:
        return compare(part, found, exact, list(twins)), 0
    codes = dynamic_codes(signed=index == 1)
    exact_maxima = _blocks(exact).abs().amax(1, keepdim=True)
    scaled = _blocks(exact) / exact_maxima.clamp(min=1e-38)
    nearest = round_to_codes(_blocks(exact), codes, BLOCK).values / exact_maxima.clamp(min=1e-38)
    taken = torch.where(exact_maxima == 0, nearest, codes[_blocks(moment.values).long()])  # any code x 0 is 0
    # A code that is nearest to a value within TABLE_ROOM is at most twice that further away than the nearest.
    excess = (taken - scaled).abs() - (nearest - scaled).abs()
    worst = float(excess.flatten()[: exact.numel()].max())
    allowed = 2 * TABLE_ROOM + FACTOR * HALF_ULP
    noise = max([HALF_ULP, *(_off(_blocks(twin).abs().amax(1, keepdim=True), exact_maxima) for twin in twins)])
    maxima = _off(moment.largest.view(-1, 1), exact_maxima)
    text = (
        f"codes are {worst:.1e} of the block's largest further away than the nearest, at most {allowed:.1e}; "
        f"largest of blocks are off by {maxima:.1e}, at most {FACTOR * noise:.1e}"
    )
    passed = worst <= allowed and maxima <= FACTOR * noise
    numbers = {"largest": max(worst, 0.0), "detects": allowed, "maxima": maxima}
    missed = int((excess.flatten()[: exact.numel()] > FACTOR * HALF_ULP).sum())
    return CaseVerdict(name=part, passed=passed, text=text, numbers=numbers), missed


def _off(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).abs() / exact.clamp(min=1e-38)).max())


def _blocks(x: Tensor) -> Tensor:
    return in_blocks(x, BLOCK)


def _bytes(
    adapter: OptimizerAdapter, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], other: float
) -> CaseVerdict:
    """Compare all tensors of the optimizer's state with the closed form."""
    states = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    held = sum(storage_bytes(states).values())
    sizes = [p.numel() for p in parameters]
    small = [size for size in sizes if size < LEAST_8_BIT]
    large = [size for size in sizes if size >= LEAST_8_BIT]
    specified = sum(8 * size for size in small) + sum(2 * size + 8 * math.ceil(size / BLOCK) for size in large)
    specified += 2 * 4 * 256 if large else 0  # one table of codes for each moment
    before = 8 * sum(sizes)
    text = f"{held:,}, closed form {specified:,}; {before:,} in float32: {held / before:.3f}"
    numbers = {"bytes": float(held), "specified": float(specified), "before": float(before), "not_nearest": other}
    return CaseVerdict(name="bytes", passed=held == specified, text=text, numbers=numbers)


def step_times(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """Return the seconds of one step of each optimizer."""
    laps = [time.perf_counter()]
    for optimizer in optimizers:
        optimizer.step()
        laps.append(time.perf_counter())
    return [end - start for start, end in zip(laps, laps[1:], strict=False)]
