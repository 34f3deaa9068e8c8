"""Problems that correct runs train on when they are counted: models, optimizers, precisions, numbers of
micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshmark.models.transformer import model_spec
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from tests.broken.mutant import GPT, TIED

_LLAMA = dataclasses.replace(
    model_spec("llama-tiny"),
    name="llama-mini",
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden=88,
    seq_len=32,
    init_std=0.15,
)
_SGD = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.01, clip_norm=0.5)
_MINI_LLAMA = dataclasses.replace(GPT, name="llama-mini", model=_LLAMA)
_MINI_SGD = dataclasses.replace(GPT, name="gpt-mini-sgd", optimizer=_SGD)


def _problem(trained: Workload, precision: Precision = Precision.FP32, dp: int = 1) -> Case:
    return Case(adapter="single", workload=trained, layout=Layout(dp=dp), precision=precision)


def _smaller(trained: Workload, name: str, **dims: Any) -> Workload:  # noqa: ANN401
    model = dataclasses.replace(trained.model, name=name, **dims)
    return dataclasses.replace(trained, name=name, model=model)


PROBLEMS: list[Case] = [
    _problem(GPT),
    _problem(_MINI_LLAMA),
    _problem(TIED),
    _problem(_MINI_SGD),
    _problem(dataclasses.replace(GPT, name="gpt-mini-unmasked", masked=False)),
    _problem(GPT, Precision.BF16),
    _problem(workload("vit-digits")),
    _problem(workload("vit-digits-bn"), dp=2),
    _problem(_MINI_LLAMA, Precision.FP64),
    _problem(GPT, Precision.FP64),
    _problem(workload("gpt-mini-momentum")),
    _problem(workload("gpt-mini-adafactor")),
    _problem(workload("gpt-mini-muon")),
    _problem(workload("vit-digits"), Precision.BF16),
    _problem(_MINI_LLAMA, Precision.BF16),
    _problem(GPT, Precision.BF16_REDUCE_BF16, dp=2),
    _problem(workload("gpt-mini-local-sgd2"), dp=2),
]
"""Problems of `single`. `make power` takes the first of them, `make power-long` all, again and again with other
seeds."""
_NANO = _smaller(GPT, "gpt-nano", hidden=16, num_heads=2, num_kv_heads=2, ffn_hidden=32, seq_len=8)
_NANO_LLAMA = _smaller(
    _MINI_LLAMA, "llama-nano", hidden=16, num_heads=2, num_kv_heads=1, ffn_hidden=40, seq_len=16, num_layers=1
)
SMALL: list[Case] = [
    _problem(_NANO),
    _problem(_NANO_LLAMA),
    _problem(_smaller(_MINI_SGD, "gpt-nano-sgd", hidden=24, num_heads=3, num_kv_heads=3, num_layers=1, seq_len=16)),
    _problem(_smaller(TIED, "gpt-nano-tied", hidden=16, num_heads=4, num_kv_heads=4, ffn_hidden=64, seq_len=16)),
    _problem(_smaller(workload("gpt-mini-momentum"), "gpt-nano-momentum", hidden=16, ffn_hidden=48, seq_len=8)),
    _problem(_smaller(workload("vit-digits"), "vit-nano", hidden=16, num_heads=2, ffn_hidden=32, num_layers=1)),
    _problem(_NANO, Precision.FP64),
    _problem(_NANO, Precision.BF16),
    _problem(_NANO_LLAMA, Precision.BF16),
]
"""Small problems of many runs at once, for `make power-long`."""
_NUM_MICRO_BATCHES = (1, 2, 4, 8)


def varied(problem: Case, number: int) -> Case:
    """`problem` with seed `number`, and in another number of micro-batches than with the next."""
    return dataclasses.replace(
        problem,
        workload=dataclasses.replace(problem.workload, seed=number),
        layout=dataclasses.replace(
            problem.layout, num_micro_batches=_NUM_MICRO_BATCHES[number % 4] // problem.layout.dp or 1
        ),
    )
