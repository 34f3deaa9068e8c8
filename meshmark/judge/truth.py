"""The truth: one process, float64, plain PyTorch; and how far a run is from it.

Two correct float32 runs drift apart. AdamW's first step is the sign of the gradient, so an element whose gradient is
all rounding moves by twice the learning rate, and everything after it differs. A comparison of trajectories would
either alarm at random or tolerate real errors. A run is therefore judged by induction, each step separately. It starts
at the prescribed values. At the parameters where it *is*, its loss and gradients must be those that float64 computes
there. From its own gradients, its update must be the one that a float64 optimizer makes of them. If replicas may differ
by design, each has its own gradients, and the update is the algorithm's transition of all. Nothing accumulates, so the
noise of the last step is that of the first.

Experts whose scores nearly tie are chosen in float64 as the run chose them. Two correct runs of a mixture of experts
may send a token to different experts if the last chosen and the first not chosen expert have equal scores up to
rounding. Both are then right. The run's gradients show which it took: ties are decided one by one, the closest first,
by what brings the truth nearer to the run. A token sent elsewhere for more than rounding stays where float64 sends it,
and is an error.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshmark import rank_progress
from meshmark.algorithms.contract import GradientRule, Tensors
from meshmark.errors import AdapterError
from meshmark.judge.deviation import (
    Deviation,
    Deviations,
    Quantity,
    QuantityKind,
    TensorPrint,
    TruthPrint,
    deviation,
    global_norm,
)
from meshmark.judge.other_roundings import with_other_roundings
from meshmark.judge.trace import Trace, observed_run
from meshmark.judge.twin import (
    UNCHANGED,
    Change,
    Twin,
    assess_buffers,
    doubles,
    exact_evaluation,
    exact_model,
    fresh_buffers,
    together,
)
from meshmark.models.mixture.module import Mixture
from meshmark.models.module import Model, initial_value, parameter_shapes, random_bits, skeleton, with_values
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import loss_share, reference_optimizer
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload

# --- Experts whose scores nearly tie: float64 makes the same choice as the run.

NEAR = 2.0**-18
"""Share of a layer's largest score. Two scores closer than this tie.

In float32 a score was off by up to 4.6e-7 of it, an eighth of this, in 200 steps of `gpt-moe-mini`.
"""
MOST_TIES = 6
"""Most ties that are decided per step. Of the 512 choices in a step of `gpt-moe-mini`, 0.01 tie."""
Tie = tuple[str, int]
"""Layer and token."""
Computed = TypeVar("Computed")


@dataclass
class _Routing:
    """Routing of all tokens of a forward pass."""

    swapped: frozenset[Tie] = frozenset()
    """Ties that go to the expert with the slightly lower score."""
    gaps: dict[Tie, float] = field(default_factory=dict)
    """Gaps of all ties, as a share of the largest score."""

    def choose(self, layer: str, scores_NE: Tensor, experts_per_token: int) -> Tensor:
        best = scores_NE.detach().topk(experts_per_token + 1, dim=-1)
        gap_N = (best.values[:, -2] - best.values[:, -1]) / scores_NE.detach().abs().max()
        chosen_NK = best.indices[:, :-1].clone()
        for token in (gap_N < NEAR).nonzero().flatten().tolist():
            self.gaps[layer, token] = float(gap_N[token])
            if (layer, token) in self.swapped:
                chosen_NK[token, -1] = best.indices[token, -1]
        return chosen_NK


@contextlib.contextmanager
def _routed(workload: Workload, routing: _Routing) -> Iterator[None]:
    """Make the truth's model choose experts by `routing`."""
    mixtures = [(name, m) for name, m in skeleton(workload.model).named_modules() if isinstance(m, Mixture)]

    def choosing(name: str, mixture: Mixture) -> Callable[[Tensor], Tensor]:
        return lambda scores_NE: routing.choose(name, scores_NE, mixture.experts_per_token)

    for name, mixture in mixtures:
        mixture.router = choosing(name, mixture)
    try:
        yield
    finally:
        for _, mixture in mixtures:
            mixture.router = None


def followed(
    workload: Workload, own: Tensors, compute: Callable[[], Computed], gradients: Callable[[Computed], Tensors]
) -> Computed:
    """Return what `compute` finds in float64 with the tie choices closest to a run with gradients `own`."""

    def attempt(swapped: frozenset[Tie]) -> tuple[Computed, dict[Tie, float]]:
        routing = _Routing(swapped)
        with _routed(workload, routing):
            return compute(), routing.gaps

    swapped = frozenset[Tie]()
    best, gaps = attempt(swapped)
    decided = set[Tie]()
    while len(decided) < MOST_TIES and (open_ties := gaps.keys() - decided):
        tie = min(open_ties, key=lambda t: gaps[t])
        decided.add(tie)
        other, other_gaps = attempt(swapped | {tie})
        if _distance(own, gradients(other)) < _distance(own, gradients(best)):
            swapped, best, gaps = swapped | {tie}, other, other_gaps
    return best


def _distance(own: Tensors, exact: Tensors) -> float:
    """Return the sum over gradients of their squared relative distances."""
    return sum(
        float(np.sum(np.square(own[name].astype(np.float64) - x)) / (np.sum(np.square(x)) or 1.0))
        for name, x in exact.items()
        if name in own
    )


# --- The truth: one process, float64, plain PyTorch; and how far a run is from it.

MOST_PAST = 3
"""Number of the run's states that the truth looks back at: this step's and earlier ones."""


def assess(
    trace: Trace,
    workload: Workload,
    start: Tensors | None = None,
    layout: Layout | None = None,
    twin: Twin | None = None,
) -> Deviations:
    """Return every deviation of a (gathered) trace from the truth, and of its gradients from the `twin` if there is
    one.

    `start` replaces the workload's initial values. `layout` (by default one rank) matters if rows of a micro-batch
    affect each other's gradients, because it decides which do. Raises `AdapterError` for a tensor of an unknown name
    or shape.
    """
    return assess_replicas([trace], workload, start, layout, twin)


def assess_replicas(
    traces: Sequence[Trace],
    workload: Workload,
    start: Tensors | None = None,
    layout: Layout | None = None,
    twin: Twin | None = None,
) -> Deviations:
    """Like `assess`, with one trace per replica if replicas may differ by design, otherwise with one trace."""
    for trace in traces:
        _check_names(trace, workload)
    start = initial_values(workload) if start is None else start
    found = dict[Quantity, list[Deviation]]()

    def note(replica: int, quantity: Quantity, value: Deviation) -> None:
        whose = replica if len(traces) > 1 else None
        found.setdefault(replace(quantity, replica=whose), []).append(value)

    for replica, trace in enumerate(traces):
        for name, x in start.items():
            note(replica, QuantityKind.INITIAL.of(name), deviation(trace.parameters[0].get(name), x))
    rules = local_rules(workload, len(traces))
    algorithm = workload.algorithm.transition(workload, rules, num_stages=layout.pp if layout else 1)
    algorithm.follow(observed_run(traces))
    gradient_rule = workload.algorithm.gradient_rule(workload, layout or Layout())
    num_steps, pasts = len(traces[0].gradients), deque[list[Tensors]](maxlen=MOST_PAST)
    rank_progress.begin(rank_progress.Phase.TRUTH, num_steps * len(traces))
    for step in range(num_steps):
        here = [_filled(trace.parameters[step], start) for trace in traces]
        pasts.append(here)
        batch, owns = make_batch(workload, step), []
        parts = [algorithm.part(batch, replica) for replica in range(len(traces))]
        if gradient_rule:
            exact = [exact_pipelined_step(gradient_rule, workload, [states[0] for states in pasts], batch)]
        else:
            exact = [
                _exact_step_of(trace.gradients[step], workload, parameters, part, layout)
                for trace, parameters, part in zip(traces, here, parts, strict=True)
            ]
        right = algorithm.reported([e.gradients for e in exact])
        for replica, (trace, e, gradients) in enumerate(zip(traces, exact, right, strict=True)):
            there = e.loss
            if trace.evaluations and workload.couples_rows:
                there = exact_evaluation(workload, here[replica], batch, trace, step)
            own = {name: trace.gradients[step].get(name, np.zeros_like(gradients[name])) for name in e.used}
            owns.append(own)
            for quantity, value in _assess_gradients(trace, step, replace(e, gradients=gradients), there).items():
                note(replica, quantity, value)
        if twin:
            both = enumerate(zip(traces, here, strict=True))
            twins = [twin.step_of(trace, p, algorithm.part(batch, r), step) for r, (trace, p) in both]
            reduced = algorithm.reported([t.gradients for t in twins])
            for replica, (trace, t) in enumerate(zip(traces, twins, strict=True)):
                whole = replace(t, gradients=reduced[replica])
                if len(traces) == 1:
                    whole = with_other_roundings(twin, whole, trace, here[0], algorithm.part(batch, 0), step)
                for quantity, value in whole.deviations(trace, step, right[replica]).items():
                    note(replica, quantity, value)
            for way, other in twin.others.items():
                both = enumerate(zip(traces, here, strict=True))
                steps = [other.step_of(trace, p, algorithm.part(batch, r), step) for r, (trace, p) in both]
                reported = algorithm.reported([t.gradients for t in steps])
                for replica, (t, equivalent, gradients) in enumerate(zip(twins, steps, reported, strict=True)):
                    whole = replace(t, gradients=reduced[replica])
                    for quantity, value in whole.deviations_of(replace(equivalent, gradients=gradients), way).items():
                        note(replica, quantity, value)
        afters = algorithm.transition(here, owns)
        for replica, (trace, after, given) in enumerate(zip(traces, afters, algorithm.stepped_on(owns), strict=True)):
            if trace.reports_norms:
                trace.take_worst_norm(step, global_norm(given))
                norm = trace.norms[step]
                reported_norm = global_norm(given) if norm is None else norm  # where none is reported, none is judged
                note(replica, QuantityKind.NORM.of(), norm_deviation(reported_norm, given))
            for name, x in after.items():
                told = trace.parameters[step + 1].get(name)
                note(replica, QuantityKind.PARAMETERS.of(name), deviation(told, x))
    return {**found, **assess_buffers(traces[0], workload, layout)}


def _assess_gradients(trace: Trace, step: int, exact: Exact, evaluation: float) -> dict[Quantity, Deviation]:
    """Return the deviations of a step's gradients and losses."""
    found = {QuantityKind.LOSS.of(): scalar_deviation(trace.losses[step], exact.loss)}
    if trace.evaluations:
        found[QuantityKind.EVALUATION.of()] = scalar_deviation(trace.evaluations[step], evaluation)
    for name, x in exact.gradients.items():
        absent = np.zeros_like(x) if name in exact.unused else None
        found[QuantityKind.GRADIENTS.of(name)] = deviation(trace.gradients[step].get(name, absent), x)
    return found


def _filled(here: Tensors, start: Tensors) -> Tensors:
    """Return the run's parameters, with NaN for those that it does not report."""
    return {name: here.get(name, np.full(x.shape, np.nan)) for name, x in start.items()}


def initial_values(workload: Workload) -> Tensors:
    """Return the prescribed initial values in float32."""
    shapes = parameter_shapes(workload.model)
    return {
        name: initial_value(workload.model, name, shape, seed=workload.seed).numpy() for name, shape in shapes.items()
    }


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Results of a global batch in float64."""

    loss: float
    gradients: Tensors
    """Gradients of every trained parameter. Zero if unused."""
    unused: frozenset[str]
    """Trained parameters that did not affect this loss."""

    @property
    def used(self) -> list[str]:
        return [name for name in self.gradients if name not in self.unused]


PRINTED_GRADIENTS = (1.0, -0.5, 2.0)
"""Gradients of a fingerprint's updates, as multiples of random numbers. Moments show from the second update on."""


def truth_print(workload: Workload) -> TruthPrint:
    """Return a fingerprint of the truth in this process: one step of the model and some of the optimizer."""
    initial = initial_values(workload)
    drawn = {name: drawn_like(name, x.shape) for name, x in initial.items()}
    start = {name: near(x, drawn[name]) for name, x in initial.items()}
    exact = exact_gradients(workload, start, make_batch(workload, 0))
    rule = local_rules(workload, 1)[0]
    values: Tensors = start
    for factor in PRINTED_GRADIENTS:
        values = rule.step(values, {name: factor * drawn[name] for name in exact.used})
    return TruthPrint(
        loss=exact.loss,
        gradients={name: tensor_print(exact.gradients[name], drawn[name]) for name in exact.used},
        updates={name: tensor_print(values[name] - x, drawn[name]) for name, x in start.items()},
    )


def tensor_print(tensor: NDArray[np.floating], drawn: NDArray[np.float64]) -> TensorPrint:
    """Return the part of a fingerprint that is of one tensor."""
    return TensorPrint(norm=float(np.linalg.norm(tensor)), projection=float(np.vdot(tensor, drawn)))


def near(initial: NDArray[np.floating], drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values near the initial ones, which themselves would hide errors: a norm's weights are all one."""
    mean = float(np.sqrt(np.mean(np.square(initial, dtype=np.float64)))) if initial.size else 0.0
    return np.asarray(initial + (0.5 * mean or 0.1) * drawn, dtype=np.float64)


def drawn_like(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return random numbers in [-1, 1], the same in every process."""
    bits = random_bits(f"print/{name}", shape, seed=0).numpy()
    return np.asarray(bits / 2.0**63, dtype=np.float64)


def local_rules(workload: Workload, count: int) -> list[ExactOptimizer]:
    """Return the float64 optimizers that `count` replicas use locally."""
    spec = workload.algorithm.local_optimizer(workload.optimizer)
    return [ExactOptimizer(spec) for _ in range(count)]


def _exact_step_of(own: Tensors, workload: Workload, parameters: Tensors, batch: Batch, layout: Layout | None) -> Exact:
    """Return the exact step for a run with gradients `own`. Where experts tie, it follows the run."""

    def compute() -> Exact:
        return exact_gradients(workload, parameters, batch, layout)

    if not workload.routes:
        return compute()
    return followed(workload, own, compute, lambda exact: exact.gradients)


def exact_pipelined_step(rule: GradientRule, workload: Workload, past: Sequence[Tensors], batch: Batch) -> Exact:
    """Return the next step of a pipeline whose gradients use older weights.

    `past` ends with the run's current state.
    """

    def compute(parameters: Tensors, part: Batch, changed: Tensors | None) -> tuple[float, Tensors]:
        found = exact_gradients(workload, parameters, part, changed=changed)
        return found.loss, found.gradients

    history = [{name: x.astype(np.float64) for name, x in states.items()} for states in past]
    found = rule.step(history, batch, compute)
    return Exact(loss=found.loss, gradients=found.gradients, unused=frozenset())


def exact_gradients(
    workload: Workload,
    parameters: Tensors,
    batch: Batch,
    layout: Layout | None = None,
    changed: Tensors | None = None,
    change: Change = UNCHANGED,
) -> Exact:
    """Return loss and gradients of a global batch, or of some of its micro-batches, without dropout.

    For `layout` see `assess`. `changed` is values that parameters get in place before the backward pass, which is
    wrong except under PipeMare. `change` is computed in place of the right function.
    """
    model = exact_model(workload, batch)
    values = doubles({name: x.copy() for name, x in parameters.items()} if changed else parameters)
    trained = {name: value.requires_grad_() for name, value in values.items() if batch.trains(name)}

    def differentiate() -> tuple[Tensor, tuple[Tensor | None, ...]]:
        loss = _loss(workload, model, values, together(workload, batch, layout), change)
        for name, value in (changed or {}).items():
            values[name].data.copy_(torch.from_numpy(value))
        return loss, torch.autograd.grad(loss, list(trained.values()), allow_unused=True)

    loss, gradients = with_values(model, values | fresh_buffers(workload), differentiate)
    later = {name: None for name in parameters if workload.trains(name)}  # what a later step unfreezes is unused here
    found = {**later, **dict(zip(trained, gradients, strict=True))}
    rank_progress.advance()
    return Exact(
        loss=float(loss.detach()),
        unused=frozenset(name for name, g in found.items() if g is None),
        gradients={name: np.zeros(parameters[name].shape) if g is None else g.numpy() for name, g in found.items()},
    )


@torch.no_grad()
def exact_loss(
    workload: Workload, parameters: Tensors, batch: Batch, layout: Layout | None = None, change: Change = UNCHANGED
) -> float:
    """Return the loss that `exact_gradients` returns, in a third of the time."""
    parts = together(workload, batch, layout)
    loss = float(_loss(workload, exact_model(workload, batch), doubles(parameters), parts, change))
    rank_progress.tick()
    return loss


def _loss(
    workload: Workload, model: Model, values: dict[str, Tensor], parts: Sequence[Batch], change: Change
) -> Tensor:
    shares = list[Tensor]()
    for part in parts:
        with change.within(model):
            outputs = torch.func.functional_call(model, {**values, **fresh_buffers(workload)}, (part.inputs,))
        shares.append(change.loss(outputs, part) if change.loss else loss_share(outputs, part, workload.loss))
    return torch.stack(shares).sum() if len(shares) > 1 else shares[0]


class ExactOptimizer:
    """Clipping, schedule and optimizer in float64. Its moments come from the gradients that it is given."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """Return `parameters` after an update by `gradients` (unclipped).

        Parameters without a gradient stay, and so do their moments, as in PyTorch.
        """
        if self.optimizer is None:
            self.parameters = {
                name: nn.Parameter(torch.tensor(p, dtype=torch.float64)) for name, p in parameters.items()
            }
            self.optimizer = self.build()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(parameters[name]))
                own = gradients.get(name)
                parameter.grad = None if own is None else torch.tensor(own, dtype=torch.float64)
        if self.spec.clip_norm is not None:
            self.clip(self.spec.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.learning_rate * self.spec.rate_factor(self.steps)
        self.optimizer.step()
        self.steps += 1
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}

    def build(self) -> torch.optim.Optimizer:
        return reference_optimizer(self.spec).build_exact(self.parameters.items())

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)


def scalar_deviation(y: float, x: float) -> Deviation:
    return deviation(np.array([y]), np.array([x]))


_ROUNDING = 3e-7
"""Relative error of a float32 norm of the tensors' norms."""
_FLAT_SHORT = 1e-5
"""Largest relative error of a norm over one flat float32 vector that is taken for the rounding of a correct engine.

Of tens of millions of elements PyTorch's is off by more (adapters/gaps/vector_norm_large.py).
"""


def norm_deviation(told: float, tensors: Tensors) -> Deviation:
    """Return the deviation of a reported global norm from that of `tensors`.

    A framework may combine the norms of single tensors, as the noise runs do, or take the norm of one flat float32
    vector. Both are correct but round differently. If `told` is off by more than rounding and is the flat norm, it is
    compared with the flat norm.
    """
    exact = global_norm(tensors)
    found = scalar_deviation(told, exact)
    in_float32 = all(t.dtype == np.float32 for t in tensors.values())
    if not exact or not in_float32 or abs(told / exact - 1) <= _ROUNDING:
        return found
    flat = float(torch.linalg.vector_norm(torch.cat([torch.from_numpy(t).flatten() for t in tensors.values()])))
    if not 0 < flat < math.inf:  # the squares are beyond float32
        return scalar_deviation(exact, exact) if told == flat else found
    is_flat = abs(told / flat - 1) <= _ROUNDING and abs(flat / exact - 1) <= _FLAT_SHORT
    return scalar_deviation(told, flat) if is_flat else found


def _check_names(trace: Trace, workload: Workload) -> None:
    shapes = parameter_shapes(workload.model)
    for kind, steps in (("parameters", trace.parameters), ("gradients", trace.gradients)):
        for name, tensor in (item for tensors in steps for item in tensors.items()):
            if name not in shapes:
                raise AdapterError(f"{kind}() returned {name!r}; the canonical names are {', '.join(shapes)}")
            if tensor.shape != shapes[name]:
                raise AdapterError(f"{kind}() returned {name!r} as {tensor.shape}; its full shape is {shapes[name]}")
