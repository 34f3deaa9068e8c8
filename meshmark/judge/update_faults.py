"""Explain wrong updates: which other rule would have moved the parameters there, given the run's own gradients?

Hypotheses are the float64 optimizer with one change, replayed over the run. The closest one is accepted if it leaves
no more than rounding, or a tenth of the deviation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import global_norm
from meshmark.judge.failed_step import Explanation, FailedStep, rows_of
from meshmark.judge.faults import Fault, named_factor
from meshmark.judge.gradient_faults import low_precision_in_region, rounding
from meshmark.judge.partial_faults import (
    FEW,
    FEW_LEFT_OVER,
    describe_region,
    in_other_places,
    is_run,
    wrong_elements,
    wrong_region,
)
from meshmark.judge.trace import Trace, low_precisions
from meshmark.judge.truth import ExactOptimizer
from meshmark.judge.update_hypotheses import UpdateHypothesis, update_hypotheses
from meshmark.models.transformer import ModelSpec
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerKind
from meshmark.text import pluralize

LEFT_OVER = 0.1
_CUT = 0.95
"""Share of a tensor up to which it is wrong in part."""
_SAME_FLOAT = 3e-7
"""Relative distance of two numbers that are the same but for a rounding or two to float32."""
_MOST_TOLD = 3
"""Largest number of equally good rules that are reported."""
_GROUP = 3
"""Fewest wrong parameters that are not by chance all in one group."""


def explain_updates(failed: FailedStep) -> Explanation | None:
    """Return why wrong parameters have their values after the step, or None."""
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    if absent := [name for name in failed.names if name not in after]:
        return Fault.MISSING, f"{pluralize(len(absent), 'parameter is', 'parameters are')} absent"
    frozen_here = failed.case.workload.frozen_at(failed.step)
    if frozen := [name for name in failed.names if name.startswith(frozen_here)]:
        return Fault.UPDATE, f"{pluralize(len(frozen), 'frozen parameter')} moved{_by_decay(failed, frozen)}"
    still = [name for name in failed.names if np.array_equal(before[name], after[name])]
    kinds = low_precisions(after[name] for name in failed.names)
    moved = failed.step > 0 and len(still) < len(failed.names)
    if moved and all(np.array_equal(after[n], failed.trace.parameters[0][n]) for n in failed.names):
        back = "parameter is back at its initial values", "parameters are back at their initial values"
        return Fault.UPDATE, pluralize(len(failed.names), *back)
    if kinds and len(still) < len(failed.names):  # some may stay, where updates are below the last place
        return Fault.PRECISION, f"every value of {pluralize(len(failed.names), 'parameter')} is a {kinds[0]} number"
    if still:
        return (
            Fault.NEVER_UPDATED,
            f"{len(still)} of {pluralize(len(failed.names), 'wrong parameter')} did not move at all"
            + " in this step, but in the next one" * _moves_again(failed),
        )
    exact = replay(failed, ExactOptimizer(failed.case.workload.optimizer))
    found = (
        _zero_for_none(failed, exact)
        or in_other_places(failed, after, exact)
        or _kept_values(failed, exact)
        or _closest_hypothesis(failed, exact)
        or _other_counts(failed, exact)
        or _in_low_precision(failed, after, exact)
        or _stretched(failed, exact)
        or _decayed(failed, exact)
        or rounding(_relative(failed, exact), "updates")
    )
    return (found[0], f"{found[1]}{_of_group(failed)}") if found else None


def _by_decay(failed: FailedStep, frozen: Sequence[str]) -> str:
    """Return that weight decay has moved frozen parameters, if each is its old value times the same factor."""
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    spec = failed.case.workload.optimizer
    factor = 1 - spec.learning_rate * spec.rate_factor(failed.step) * spec.weight_decay
    if factor == 1 or not all(np.allclose(after[n], before[n] * factor, rtol=_SAME_FLOAT, atol=0) for n in frozen):
        return ""
    return f": weight decay moves them, to {factor:.7g} = 1 - rate x decay times what they were"


def _of_group(failed: FailedStep) -> str:
    """Return in which group of the optimizer's all wrong parameters are, if it has two. Empty if they are in both."""
    spec = failed.case.workload.optimizer
    decays = {spec.decays(name) for name in failed.names}
    if not spec.groups_decay or len(failed.names) < _GROUP or len(decays) > 1:
        return ""
    return f", all in the group with{'' if decays.pop() else 'out'} weight decay"


def _moves_again(failed: FailedStep) -> bool:
    """Return whether the wrong parameters move in the next step."""
    later = failed.trace.parameters[failed.step + 1 : failed.step + 3]
    return len(later) == 2 and not any(np.array_equal(later[0][n], later[1][n]) for n in failed.names if n in later[1])


def replay(
    failed: FailedStep, optimizer: ExactOptimizer, gradients: Callable[[Trace, int], Tensors] | None = None
) -> Tensors:
    """Return the run's parameters after the failed step by `optimizer`, which sees its gradients from the first step
    on.

    Gradients of parameters that a step does not use are left out, unless `gradients` provides them.
    """
    trace, uses = failed.trace, failed.case.workload.uses
    after: Tensors = {}
    for step in range(failed.step + 1):
        own = {name: g for name, g in trace.gradients[step].items() if uses(name, step)}
        after = optimizer.step(trace.parameters[step], gradients(trace, step) if gradients else own)
    return after


def _zero_for_none(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """Explain unused parameters that were updated as if they had a gradient of zero.

    Weight decay moves a parameter whose gradient is zero. One without a gradient stays where it is.
    """
    gradients, after = failed.trace.gradients[failed.step], failed.trace.parameters[failed.step + 1]
    given = all(name in gradients and not gradients[name].any() for name in failed.names)
    if given and all(np.linalg.norm(after[n] - exact[n]) <= failed.tolerances[n] for n in failed.names):
        return Fault.UPDATE, "as if unused parameters had a gradient of zero"
    return None


def _in_low_precision(failed: FailedStep, after: Tensors, exact: Tensors) -> Explanation | None:
    """Explain parameters of which all wrong elements are bf16 or fp16 numbers, and the rank that they are dealt to."""
    found = low_precision_in_region(failed, after, exact)
    rank = _lone_shard(failed, exact, _num_shards(failed)) if found else None
    if found is None or rank is None:
        return found
    return found[0], f"{found[1]}; they are in the rows of data-parallel rank {rank}"


def _kept_values(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """Explain parameters of which some elements have earlier values, and all others are right."""
    trace, gradients = failed.trace, failed.trace.gradients[failed.step]
    if (kept := _kept(failed, trace.parameters[failed.step], exact)) is not None:
        unused = all(n in gradients and not gradients[n][kept[n]].any() for n in failed.names)
        why = ", those whose gradient is zero" if unused else ""
        return Fault.NEVER_UPDATED, f"no move {describe_region(kept)}{why}; the others are right"
    if (kept := _kept(failed, trace.parameters[0], exact)) is not None:
        rank = _lone_shard(failed, exact, _num_shards(failed))
        where = describe_region(kept) if rank is None else f"in the rows of data-parallel rank {rank}"
        return Fault.UPDATE, f"initial values {where}; the others are right"
    return None


def _kept(failed: FailedStep, earlier: Tensors, exact: Tensors) -> dict[str, NDArray[np.bool_]] | None:
    """Return which elements of each wrong parameter are `earlier`'s, or None if that does not explain all errors."""
    after = failed.trace.parameters[failed.step + 1]
    kept = {n: (after[n] == earlier[n]) & (exact[n] != earlier[n]) for n in failed.names}
    for name, tolerance in failed.tolerances.items():
        rest = np.where(kept[name], 0.0, after[name] - exact[name])
        if not kept[name].any() or np.linalg.norm(rest) > tolerance:
            return None
    return kept


def _closest_hypothesis(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """Return the hypothesis that explains the most steps and, of several, the closest.

    If none explains whole tensors, each is tried on the rows that are dealt to one data-parallel rank, or on the wrong
    elements alone.
    """
    shards = _num_shards(failed)
    parts = _wrong_parts(failed, exact, shards)
    fitting: list[tuple[int, float, bool, UpdateHypothesis]] = []
    of_part: list[tuple[float, UpdateHypothesis]] = []
    for rival in update_hypotheses(failed.case.workload.optimizer, failed.step, shards, failed.names):
        there = replay(failed, rival.optimizer, rival.gradients)
        if (worst := _excess(failed, failed.step, there, exact)) <= 1:
            is_noise = _excess(failed, failed.step, there, exact, share=0.0) <= 1
            fitting.append((-_steps_explained(failed, rival), worst, is_noise, rival))
        elif parts:
            mixed = {n: np.where(parts.masks[n], there[n], exact[n]) for n in failed.names}
            of_part.append((_excess(failed, failed.step, mixed, exact, parts.share), rival))
    if fitting:
        explained, worst, is_noise, rival = min(fitting, key=lambda fit: fit[:2])
        if not is_noise and (counted := _other_counts(failed, exact)):
            return counted
        # If several explain the run up to rounding, nothing distinguishes them.
        others = [r for n, _, noise, r in fitting if is_noise and noise and n == explained and r is not rival]
        alike = [rival.detail, *(r.detail for r in others if r.fault is rival.fault)]
        about = f" (all but {worst * LEFT_OVER:.0%} of the difference)" if not is_noise and worst > LEFT_OVER else ""
        return rival.fault, ", or ".join(alike[:_MOST_TOLD]) + about
    if not parts or not of_part:
        return None
    worst, rival = min(of_part, key=lambda fit: fit[0])
    return (rival.fault, f"{rival.detail}, {parts.where} alone") if worst <= 1 else None


@dataclass(frozen=True, kw_only=True)
class _WrongPart:
    """Elements of wrong parameters. All other elements are right."""

    masks: dict[str, NDArray[np.bool_]]
    where: str
    share: float
    """Share of the deviation that may remain unexplained there."""


def _wrong_parts(failed: FailedStep, exact: Tensors, shards: int) -> _WrongPart | None:
    """Return the rows of one rank or else the elements that are wrong, or None if about all are."""
    after = failed.trace.parameters[failed.step + 1]
    if (rank := _lone_shard(failed, exact, shards)) is not None:
        masks = {}
        for name in failed.names:
            masks[name] = np.zeros(exact[name].shape, dtype=np.bool_)
            if exact[name].ndim:
                masks[name][rows_of(rank, shards, len(exact[name]))] = True
        return _WrongPart(masks=masks, where=f"in the rows of data-parallel rank {rank}", share=LEFT_OVER)
    region = wrong_region(failed, after, exact)
    if region is None:
        return _flat_part(failed, after, exact)
    few = sum(int(mask.sum()) for mask in region.values()) < FEW
    return _WrongPart(masks=region, where=describe_region(region), share=FEW_LEFT_OVER if few else LEFT_OVER)


def _flat_part(failed: FailedStep, after: Tensors, exact: Tensors) -> _WrongPart | None:
    """Return a run of the parameters that ends within a tensor, as a part of a flat buffer does, or None."""
    masks = {name: np.ones(exact[name].shape, dtype=np.bool_) for name in failed.names}
    cut = []
    for name, wrong in wrong_elements(failed, after, exact).items():
        places = np.flatnonzero(wrong)
        if not len(places) or not is_run(places):
            continue
        inside = places[-1] - places[0] + 1 < _CUT * wrong.size
        if inside and (places[0] == 0 or places[-1] == wrong.size - 1):
            cut.append(name)
            index = np.arange(wrong.size).reshape(wrong.shape)
            masks[name] = (index >= places[0]) & (index <= places[-1])
    if not 1 <= len(cut) <= 2 or len(cut) == len(masks):
        return None
    where = (
        f"in {pluralize(len(masks), 'tensor')}, of which {' and '.join(cut)} in part, as a rank's part of a flat buffer"
    )
    return _WrongPart(masks=masks, where=where, share=LEFT_OVER)


def _num_shards(failed: FailedStep) -> int:
    """Return the number of ranks that the rows of every tensor are dealt to."""
    layout = failed.case.layout
    return layout.dp if layout.zero_stage else 1


def _lone_shard(failed: FailedStep, exact: Tensors, shards: int) -> int | None:
    """Return the data-parallel rank whose rows contain all errors, or None if there is none or rows are not dealt."""
    if shards == 1:
        return None
    after = failed.trace.parameters[failed.step + 1]
    for rank in range(shards):
        if _excess(failed, failed.step, _in_rows(rank, shards, after, exact, failed.names), exact) <= 1:
            return rank
    return None


def _in_rows(rank: int, shards: int, there: Tensors, exact: Tensors, names: Sequence[str]) -> Tensors:
    """Return `exact` with the rows that are dealt to `rank` taken from `there`."""
    mixed = {}
    for name in names:
        mixed[name] = np.array(exact[name])
        if exact[name].ndim:
            own = rows_of(rank, shards, len(exact[name]))
            mixed[name][own] = there[name][own]
    return mixed


def _excess(failed: FailedStep, step: int, there: Tensors, exact: Tensors, share: float = LEFT_OVER) -> float:
    """Return how far the parameters after `step` are from `there`, at worst; up to 1 is close enough.

    `share` is that of the deviation that may remain.
    """
    after = failed.trace.parameters[step + 1]
    return max(
        float(np.linalg.norm(after[n] - there[n])) / max(tolerance, share * float(np.linalg.norm(after[n] - exact[n])))
        for n, tolerance in failed.tolerances.items()
    )


def _steps_explained(failed: FailedStep, rival: UpdateHypothesis) -> int:
    """Return how many steps after the failed one `rival` explains too, up to the first that it does not.

    `rival` has been replayed up to the failed step. Two hypotheses may agree there and differ later, such as a schedule
    one step ahead and one that runs too fast.
    """
    trace, count = failed.trace, 0
    right = ExactOptimizer(failed.case.workload.optimizer)
    replay(failed, right)
    for step in range(failed.step + 1, len(trace.parameters) - 1):
        own = {n: g for n, g in trace.gradients[step].items() if failed.case.workload.uses(n, step)}
        exact = right.step(trace.parameters[step], own)
        given = rival.gradients(trace, step) if rival.gradients else own
        if _excess(failed, step, rival.optimizer.step(trace.parameters[step], given), exact) > 1:
            break
        count += 1
    return count


_MOST_COUNTED = 1024
"""Number of steps up to which a wrong count is searched for."""
_MOST_MOVED = 2**28
"""Number of elements, times counts, up to which this is done."""
_SHARE = 0.01
"""Share of a deviation that another count may leave."""


def _other_counts(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """Explain by bias correction with a wrong count of steps, which may differ between tensors."""
    if failed.case.workload.optimizer.kind is not OptimizerKind.ADAMW:
        return None
    rule = ExactOptimizer(failed.case.workload.optimizer)
    replay(failed, rule)
    names, right = list(rule.parameters), failed.step + 1
    counts = np.arange(1, min(len(names) * (right + 1), _MOST_COUNTED) + 1)
    if sum(exact[n].size for n in failed.names) * len(counts) > _MOST_MOVED:
        return None
    fits: dict[str, NDArray[np.intp]] = {}
    for name in failed.names:
        after, there = failed.trace.parameters[right][name], _counted(rule, name, failed, counts)
        allowed = max(failed.tolerances[name], _SHARE * float(np.linalg.norm(after - exact[name])))
        fits[name] = counts[[bool(np.linalg.norm(after - x) <= allowed) for x in there]]
        if not fits[name].size:
            return None
    places = {name: names.index(name) for name in failed.names}
    if len(failed.names) > 1 and all(failed.step * len(names) + places[n] + 1 in fits[n] for n in fits):
        told = f"by one count of steps for all {len(names)} tensors, which each of them increases"
        return Fault.UPDATE, f"bias correction {told}: it is not {right} for {pluralize(len(fits), 'tensor')}"
    if alike := functools.reduce(np.intersect1d, fits.values()).tolist():
        return Fault.UPDATE, f"bias correction of step {_span(alike)} in place of {right}"
    low, high = min(int(fit[0]) for fit in fits.values()), max(int(fit[0]) for fit in fits.values())
    return Fault.UPDATE, f"bias correction of other steps than {right}, by tensor of steps {low} to {high}"


def _span(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} or a later one"


def _counted(
    rule: ExactOptimizer, name: str, failed: FailedStep, counts: NDArray[np.intp]
) -> Iterator[NDArray[np.float64]]:
    """Yield a parameter after AdamW's step with the moments of `rule`, whose bias is corrected as in step `counts`."""
    assert rule.optimizer
    parameter = rule.parameters[name]
    group = next(g for g in rule.optimizer.param_groups if any(p is parameter for p in g["params"]))
    state, (first, second) = rule.optimizer.state[parameter], group["betas"]
    mean, square = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
    here = failed.trace.parameters[failed.step][name].astype(np.float64) * (1 - group["lr"] * group["weight_decay"])
    for count in counts.tolist():
        divisor = np.sqrt(square / (1 - second**count)) + group["eps"]
        yield here - group["lr"] / (1 - first**count) * mean / divisor


def _stretched(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """Explain by the right step times a constant, such as a wrong learning rate."""
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    right = np.concatenate([(exact[n] - before[n]).ravel() for n in failed.names])
    own = np.concatenate([(after[n].astype(np.float64) - before[n]).ravel() for n in failed.names])
    factor = float(own @ right / (right @ right)) if right.any() else 0.0
    if np.linalg.norm(own - factor * right) > LEFT_OVER * np.linalg.norm(own - right):
        return None
    return Fault.UPDATE, f"{named_factor(factor, failed.known_factors())} times the right step"


def _decayed(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """Explain by wrong weight decay: what remains beyond the right step is a multiple of the parameters."""
    spec, before, after = failed.case.workload.optimizer, failed.trace.parameters[failed.step], failed.trace.parameters
    rate = spec.learning_rate * spec.rate_factor(failed.step) * spec.weight_decay
    multiples = {}
    for name in failed.names:
        here, beyond = before[name].astype(np.float64), after[failed.step + 1][name] - exact[name]
        multiple = float(np.sum(here * beyond)) / (float(np.sum(here * here)) or 1.0)
        if np.linalg.norm(beyond - multiple * here) > LEFT_OVER * np.linalg.norm(beyond):
            return None
        multiples[name] = -multiple / rate if rate else -multiple
    reported = ", ".join(f"{m:.4g}" for m in sorted({round(m, 2) for m in multiples.values()})[:4])
    return Fault.UPDATE, f"weight decay beyond the right one, as multiples of it: {reported}"


def _relative(failed: FailedStep, exact: Tensors) -> list[float]:
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    return sorted(
        float(np.linalg.norm(after[n] - exact[n]) / (np.linalg.norm(exact[n] - before[n]) or 1.0)) for n in failed.names
    )


def explain_norm(reported: float, gradients: Tensors, failed: FailedStep) -> Explanation:
    """Explain a global norm that is not that of the run's own gradients."""
    earlier = failed.trace.gradients[failed.step - 1] if failed.step else {}
    if earlier and abs(reported / global_norm(earlier) - 1) < 1e-5:
        return Fault.STALE_GRADIENT, f"the reported norm is that of the gradients of step {failed.step - 1}"
    if counted := _counted_otherwise(reported, gradients, failed.case):
        return Fault.CLIPPING, counted
    known = {f"1/sqrt({k})": v**-0.5 for k, v in failed.known_factors().items() if v > 1 and "/" not in k}
    if failed.trace.loss_scales and failed.trace.loss_scales[failed.step] != 1:
        known["the loss scale, as if told before unscaling"] = failed.trace.loss_scales[failed.step]
    return (
        Fault.CLIPPING,
        f"the reported norm is {named_factor(reported / global_norm(gradients), known)} times the right one",
    )


_SEEN = 1e-3
"""Smallest error of the squared norm, as a share of it, that is explained by wrongly counted tensors."""
_CLOSE = 1e-5
"""Share of the squared norm by which such an explanation may be off."""


def _counted_otherwise(reported: float, gradients: Tensors, case: Case) -> str:
    """Return which tensors a global norm counts several times, or leaves out; empty if no such set explains it.

    Tensor-parallel ranks hold norms and some biases whole. A norm that is summed over these ranks counts them once a
    rank, unless the framework takes care. A tied weight may be counted once for each of its places. A norm that is not
    summed over ranks leaves out what others hold.
    """
    squares = {name: float(np.square(g.astype(np.float64)).sum()) for name, g in gradients.items()}
    total = sum(squares.values())
    over = reported**2 - total
    if not abs(over) > _SEEN * total:
        return ""
    vectors = {name for name, g in gradients.items() if g.ndim == 1}
    norms = {name for name in vectors if "norm" in name}
    ends = {name for name in vectors if name.endswith(("out.bias", "down.bias"))}
    groups: list[tuple[str, set[str]]] = [
        ("norms", norms),
        ("norms and the biases of products that are summed", norms | ends),
        ("tensors with one dimension", vectors),
    ]
    embeddings = {name for name in squares if name.startswith("embedding.")}
    positions = {name for name in embeddings if "positions" in name}
    for more, held in (("positions", positions), ("embeddings", embeddings)):
        groups += [(f"{text}, and {more}", names | held) for text, names in groups[:3] if held]
    groups += [*_of_other_ranks(case, list(squares)), *((name, {name}) for name in squares)]
    for times in dict.fromkeys((2, case.layout.tp, 0)):
        for text, names in groups:
            if abs(over - (times - 1) * sum(squares[name] for name in names)) <= _CLOSE * total:
                return (
                    f"the reported norm counts {text} {times} times"
                    if times
                    else f"the reported norm leaves out {text}"
                )
    return ""


def _of_other_ranks(case: Case, names: Sequence[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield the parameters that a rank does not hold, where experts are dealt over ranks or layers over stages."""
    layout = case.layout
    experts = {name: int(found[1]) for name in names if (found := _EXPERT.search(name))}
    count = 1 + max(experts.values(), default=-1)
    for ranks in sorted({layout.dp, layout.tp} - {1}):
        for rank in range(ranks if count >= ranks else 0):
            own = range(rank * count // ranks, (rank + 1) * count // ranks)
            text = f"the experts that rank {rank} of {ranks} does not hold"
            yield text, {name for name, number in experts.items() if number not in own}
    model = case.workload.model
    if layout.pp == 1 or not isinstance(model, ModelSpec):
        return
    stage_of = model.stages_of(layout.pp * layout.virtual_stages, names)
    for rank in range(layout.pp):
        held = layout.stages_of(rank)
        yield f"what pipeline rank {rank} does not hold", {name for name in names if stage_of[name] not in held}


_EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Number of an expert in a parameter's name."""
