"""One mutant: which defect, in which adapter, must be caught by what, and diagnosed as what."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.scenario import plain_workload
from meshmark.judge.faults import Fault
from meshmark.reference.own_model import describe
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm, algorithm_presets
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from tests.broken.engine import Broken

LAYOUTS = {
    "ddp": Layout(dp=2, num_micro_batches=4),
    "fsdp2": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "fairscale-oss": Layout(dp=2, zero_stage=2, num_micro_batches=4),
    "fairscale-fsdp": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "megatron": Layout(tp=2, num_micro_batches=4),
    "gpipe": Layout(pp=2, num_micro_batches=4),
    "post-local-sgd": Layout(dp=2, num_micro_batches=4),
    "pipedream": Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B),
    "accelerate": Layout(dp=2, num_micro_batches=4),
    "accelerate-fsdp2": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "deepspeed/1": Layout(dp=2, zero_stage=1, num_micro_batches=4),
    "deepspeed/2": Layout(dp=2, zero_stage=2, num_micro_batches=4),
    "deepspeed/3": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "deepspeed-offload-params": Layout(dp=2, zero_stage=3, num_micro_batches=4, offload=Offload.CPU),
    "fairscale-oss-ddp": Layout(dp=2, zero_stage=1, num_micro_batches=4),
    "fabric-ddp": Layout(dp=2, num_micro_batches=4),
    "fabric-ddp-separate": Layout(dp=2, num_micro_batches=4),
    "fabric-fsdp": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "fabric-fsdp-separate": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "deepspeed-zero0": Layout(dp=2, num_micro_batches=4),
    "deepspeed-offload/1": Layout(dp=2, zero_stage=1, num_micro_batches=4, offload=Offload.CPU),
    "deepspeed-offload/2": Layout(dp=2, zero_stage=2, num_micro_batches=4, offload=Offload.CPU),
    "deepspeed-offload/3": Layout(dp=2, zero_stage=3, num_micro_batches=4, offload=Offload.CPU),
    "accelerate-loop": Layout(dp=2, num_micro_batches=4),
    "hf-trainer": Layout(dp=2, num_micro_batches=4),
    "hf-trainer-fsdp2": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "hf-trainer-deepspeed": Layout(dp=2, zero_stage=2, num_micro_batches=4),
    "lightning-trainer": Layout(dp=2, num_micro_batches=4),
    "pipeline": Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B),
}
"""By adapter, and ZeRO stage where it has several. Degree and micro-batches differ, so that one is not taken for the
other. Adapters that are not here have `_TWO_REPLICAS`.
"""
_TWO_REPLICAS = Layout(dp=2, num_micro_batches=2)
_BASIC_ALGORITHMS = {"decentralised": "dsgd-ring", "compressed": "error-feedback-top-k10"}
"""Algorithms by which an adapter of several trains what is not about one of them."""
GPT = workload("gpt-mini")
DEEP = replace(GPT, name="gpt-deep", model=replace(GPT.model, name="gpt-deep", num_layers=4))
"""A layer for each of two virtual stages on two ranks."""
_WIDE = replace(GPT.model, name="gpt-wide", num_layers=1, hidden=512, ffn_hidden=2048)
WIDE = replace(GPT, name="gpt-wide", model=_WIDE)
"""Workload whose states ZeRO-Infinity writes to files."""
TIED = replace(GPT, name="gpt-tied", model=replace(GPT.model, name="gpt-tied", tied_embeddings=True))

MIXTURE = workload("gpt-moe-mini")
OWN = describe(f"{Path(__file__).parents[2] / 'examples' / 'workloads' / 'gated_convolution.py'}:GatedConvolution")
"""A user's own model, whose rows have unequal weights."""
VIT, VIT_BN, RESNET = workload("vit-digits"), workload("vit-digits-bn"), workload("resnet-digits")
COATNET, COATNET_BN = workload("coatnet-digits"), workload("coatnet-digits-bn")
AMOEBANET = workload("amoebanet-digits")


@functools.cache
def algorithm_of(adapter: str) -> Algorithm:
    """Return the algorithm by which `adapter` trains what is not about one: the first preset that it has."""
    can = load_adapter(builtin_adapters()[adapter.partition("/")[0]]).capabilities
    if SYNCHRONOUS.kind in can.algorithms:
        return SYNCHRONOUS
    presets = algorithm_presets()
    basic = _BASIC_ALGORITHMS.get(adapter)
    return presets[basic] if basic else next(preset for preset in presets.values() if can.trains_by(preset))


def layout_of(adapter: str) -> Layout:
    """Return the layout of `adapter`, a key of `LAYOUTS` or the name of an adapter of one layout."""
    return LAYOUTS.get(adapter, _TWO_REPLICAS)


def under(adapter: str, problem: Workload) -> Workload:
    """`problem`, by an algorithm that `adapter` has, with plain SGD where it is defined on no other optimizer."""
    algorithm = algorithm_of(adapter)
    if problem.algorithm.kind is not SYNCHRONOUS.kind or algorithm is SYNCHRONOUS:
        return problem
    plain = workload("gpt-mini-sgd").optimizer
    optimizer = plain if algorithm.refusal(problem.optimizer) else problem.optimizer
    return replace(problem, algorithm=algorithm, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect in one adapter."""

    adapter: str
    """The real one that is broken, and ZeRO stage where it has several: a key of LAYOUTS."""
    defect: type[Broken] | type[Adapter]
    """A mixin for its engine, or an adapter in its place."""
    suite: str = ""
    """That must fail in a plain run; another may fail too."""
    clause: str = ""
    """Clause of conformance that must fail in its scenarios, for defects that no suite sees."""
    faults: frozenset[Fault]
    """Diagnoses that are right. Empty where the summary of what fails is the diagnosis."""
    layout: Layout
    workload: Workload = GPT
    precision: Precision = Precision.FP32
    steps: int | None = None
    """That a run must take to show it; None: those of every run."""
    diagnosis: str = ""
    """What is said of the defect in a run in float64: a regular expression. Set for defects of algorithms."""

    @property
    def name(self) -> str:
        plain = f"{self.adapter.replace('-', '_').replace('/', '')}_{self.defect.__name__}"
        if self.diagnosis:
            plain += f"_by_{self.workload.algorithm.id.replace('-', '_')}"
        if self.in_bf16:
            plain += "_in_bf16"
        if self.workload == OWN:
            plain += "_of_own"
        return f"{plain}_{self.clause.replace(' ', '_')}" if self.clause else plain

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> Mutant:
        """Return the mutant of that name, as a file holds it. Raises `ValueError` if there is none."""
        from tests.broken.mutants import BY_NAME  # which are made of these

        if text not in BY_NAME:
            raise ValueError(f"{text!r} is no mutant of this commit")
        return BY_NAME[text]

    @property
    def in_bf16(self) -> bool:
        """Whether it must be seen beneath bf16's own rounding."""
        return self.suite == "equivalence" and self.precision == Precision.BF16

    @property
    def catcher(self) -> str:
        """Describe what must fail."""
        return self.suite or self.clause

    @property
    def case(self) -> Case:
        return Case(adapter=self.name, workload=self.workload, layout=self.layout, precision=self.precision)


def on(
    adapters: str,
    defect: type[Broken] | type[Adapter],
    *faults: Fault,
    suite: str = "equivalence",
    workload: Workload = GPT,
    layout: Layout | None = None,
    precision: Precision = Precision.FP32,
    steps: int | None = None,
) -> Iterator[Mutant]:
    """Mutants that a suite must catch."""
    for adapter in adapters.split():
        yield Mutant(
            adapter=adapter,
            defect=defect,
            suite=suite,
            faults=frozenset(faults),
            workload=under(adapter, workload),
            layout=layout or layout_of(adapter),
            precision=precision,
            steps=steps,
        )


def base_layout(adapter: str) -> Layout:
    """The layout that a conformance pass of `adapter` is made of: one micro-batch, of a pipeline one a stage."""
    return replace(layout_of(adapter), num_micro_batches=layout_of(adapter).pp)


def of_algorithm(
    adapter: str,
    trained: str,
    named: Mapping[Any, str],
    *,
    fault: Fault = Fault.ALGORITHM,
    layout: Layout | None = None,
) -> Iterator[Mutant]:
    """Mutants of the engine that trains the workload `trained` by an algorithm, with what is said of each defect."""
    for defect, diagnosis in named.items():
        for mutant in on(adapter, defect, fault, workload=workload(trained), layout=layout):
            yield replace(mutant, diagnosis=diagnosis)


def against(
    clause: str,
    adapters: str,
    defect: type[Broken] | type[Adapter],
    *faults: Fault,
    layout: Layout | None = None,
) -> Iterator[Mutant]:
    """Mutants that a clause of conformance must catch."""
    for adapter in adapters.split():
        yield Mutant(
            adapter=adapter,
            defect=defect,
            clause=clause,
            faults=frozenset(faults),
            workload=under(adapter, plain_workload()),
            layout=layout or base_layout(adapter),
        )
