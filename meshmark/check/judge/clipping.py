"""Judge the clipping of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshmark.check.judge.replicas import SAME_METRIC
from meshmark.check.judge.tensors import farthest, flattened, multiple, norm_of
from meshmark.check.recording import Clip, Step
from meshmark.check.run import Moment
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault

CLIPPED_EARLY = 1e-3
"""Relative error up to which gradients are those of the ranks, each clipped on its own and then added up."""


def clipped_early(moment: Moment, verdict: Verdict) -> bool:
    """Return whether each rank clips its own gradient, and the script adds them up only then."""
    if len(moment.gradients) < 2 or not all(step.clips for step in moment.ranks):
        return False
    owners = list(moment.gradients)
    names = sorted(set.intersection(*(set(of[o]) for of in (moment.gradients, moment.clipped) for o in owners)))
    if not names:
        return False
    own, stepped = ([flattened(of[o], names) for o in owners] for of in (moment.gradients, moment.clipped))
    alike = SAME_METRIC * float(own[0].norm())
    if float((own[1] - own[0]).norm()) <= alike or any(float((x - stepped[0]).norm()) > alike for x in stepped):
        return False
    if multiple(own[1], own[0])[1] <= CLIPPED_EARLY * float(own[1].norm()):  # one gradient, scaled by each rank
        return False
    matrix = torch.stack(own, 1)
    weights = torch.linalg.lstsq(matrix, stepped[0].unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((stepped[0] - matrix @ weights).norm())
    if left > CLIPPED_EARLY * float(stepped[0].norm()) or float(weights.min()) <= CLIPPED_EARLY:
        return False
    told = "every rank clips the gradient of its own rows, by its own norm, before gradients are reduced over ranks"
    if float(weights.max() - weights.min()) <= CLIPPED_EARLY * float(weights.max()):
        verdict.add(
            Level.NOTE, "clipped before reduction", f"{told} (without effect: the norms are below the bound)",
            moment.number,
        )  # fmt: skip
        moment.gradients = moment.clipped
    else:
        verdict.add(Level.WRONG, "clipped before reduction", told, moment.number)
    return True


def judge_clipping(moment: Moment, verdict: Verdict) -> str:
    """Report clipping that does not do what it is called for.

    Returns what was clipped to what, in words. They are empty if there is no clipping, or a wrong one.
    """
    steps, number = moment.ranks, moment.number
    for step in steps:
        if held := [name for name in step.clipped_nothing if name in step.gradients]:
            verdict.add(
                Level.WRONG, Fault.CLIPPING,
                f"clipping has no effect: when it is called, none of its parameters has a gradient ({held[0]}). "
                "DeepSpeed's ZeRO keeps gradients elsewhere, and clips if its configuration has gradient_clipping",
                number,
            )  # fmt: skip
    if not any(s.clips for s in steps):
        return ""
    missing = [r for r, s in enumerate(steps) if not s.clips]
    if missing:
        verdict.add(Level.WRONG, Fault.CLIPPING, f"rank {missing[0]} does not clip, others do", number)
        return ""
    clips = steps[0].clips
    if all(step.clips_in_turn for step in steps):
        return _judge_clips(clips, moment, verdict)
    if len(clips) > 1 and not steps[0].clips_parts and not any(clip.acts for step in steps for clip in step.clips):
        told = f"gradients are clipped {len(clips)} times a step, without effect: the norms are below the bound"
        verdict.add(Level.NOTE, "clipping without effect", told, number)
        return ""
    if len(clips) > 1 and not steps[0].clips_parts:
        told = f"gradients are clipped {len(clips)} times a step, before they are complete"
        verdict.add(Level.WRONG, Fault.CLIPPING, told, number)
        return ""
    trained = [n for g in steps[0].groups for n in g.names if n in steps[0].gradients]
    left = [n for n in trained if not any(n in clip.names for clip in clips)]
    if left:
        told = f"{len(left)} of {len(trained)} gradients are not clipped ({left[0]})"
        verdict.add(Level.NOTE, "clipping of a part", told, number)
    if len(clips) > 1:
        told = f"{len(clips)} sets of parameters are clipped, each by its own norm"
        verdict.add(Level.NOTE, "clipping of parts", told, number)
    return next(filter(None, [_judge_clips([clip], moment, verdict) for clip in clips if clip.scaled == 1.0]), "")


def _judge_clips(clips: Sequence[Clip], moment: Moment, verdict: Verdict) -> str:
    """Judge calls of clipping functions, each of what the one before has left. Returns as `judge_clipping` does."""
    allowed, told = _rounding(moment), ""
    for owner, gradients in moment.gradients.items():
        own = moment.clipped.get(owner, {})
        held = {n for group in moment.ranks[owner].groups for n in group.names}
        clipped = [n for n in gradients if any(n in clip.names for clip in clips) and (n in own or n in held)]
        if not clipped:  # of an optimizer that holds other tensors
            return ""
        before = {name: gradients[name].double() for name in clipped}
        after = {name: own.get(name, torch.zeros_like(gradients[name])) for name in clipped}
        right, norm = _clipped(gradients, clips)
        if farthest(after, {name: right[name] for name in clipped}) > allowed:
            why = (
                f"gradients are not those that {len(clips)} clippings, one after the other, leave"
                if len(clips) > 1
                else _why_wrong(clips[0], norm, before, after, moment)
            )
            verdict.add(Level.WRONG, Fault.CLIPPING, why, moment.number)
            return ""
        told = told or f"{_told(clips[0], norm)} (first step)"
    return f"{len(clips)} clippings, one after the other" if len(clips) > 1 else told


def _clipped(gradients: Mapping[str, Tensor], clips: Sequence[Clip]) -> tuple[dict[str, Tensor], float]:
    """Return what clippings leave of gradients, in float64, and the norm that the last one has met."""
    left, norm = {name: x.double() for name, x in gradients.items()}, 0.0
    for clip in clips:
        names = [name for name in clip.names if name in left]
        norm = norm_of({name: left[name] for name in names}, clip.norm_type)
        factor = min(1.0, clip.max_norm / (norm + 1e-6))
        for name in names:
            x, bound = left[name], clip.max_norm
            left[name] = x.clamp(-bound, bound) if clip.by_value else factor * x
    return left, norm


def _rounding(moment: Moment) -> float:
    """Return the relative error that clipping may leave, which rounds in the gradients' format."""
    eps = max((torch.finfo(g.dtype).eps for of in moment.gradients.values() for g in of.values()), default=0.0)
    return max(1e-4, 4 * eps)


def _told(clip: Clip, norm: float) -> str:
    if clip.by_value:
        return f"elements clipped to {clip.max_norm:g}"
    return f"norm {norm:.4g}, {'clipped to' if norm > clip.max_norm else 'below'} {clip.max_norm:g}"


def _why_wrong(
    clip: Clip, norm: float, before: Mapping[str, Tensor], after: Mapping[str, Tensor], moment: Moment
) -> str:
    """Say how gradients differ from what one clipping should have left of them. `norm` is that of all gradients."""
    if clip.by_value:
        off = farthest(after, {name: x.clamp(-clip.max_norm, clip.max_norm) for name, x in before.items()})
        return f"gradients are not those of clipping by value to {clip.max_norm:g}; off by {off:.2g}"
    names, allowed = [*before], _rounding(moment)
    factor, _ = multiple(flattened(after, names), flattened(before, names))
    if farthest(after, {name: factor * x for name, x in before.items()}) > allowed:
        if parts := _norms_of_parts(moment.ranks, clip, allowed):
            shown = ", ".join(f"{x:.4g}" for x in parts)
            return (
                f"each rank clips by the norm of its own part of the gradients ({shown}); that of all is {norm:.4g} "
                "(call the wrapper's own clip_grad_norm_)"
            )
        return "the optimizer steps on other gradients than those that were clipped"
    if abs(factor - 1) <= allowed:
        return (
            f"the optimizer steps on gradients of norm {norm:.4g}, which are not clipped to {clip.max_norm:g} "
            "(clip_grad_norm_ after the step, or of other tensors?)"
        )
    used = clip.max_norm / factor if factor < 1 else norm
    return f"scaled by {factor:.4g}, as by a norm of {used:.4g}; the norm of all gradients is {norm:.4g}"


def _norms_of_parts(steps: Sequence[Step], clip: Clip, allowed: float) -> list[float]:
    """Return the norm of each rank's own gradients if each was clipped by it; empty otherwise."""
    norms, factors = [], []
    for step in steps:
        before = {n: g for c in step.clips if c.names == clip.names for n, g in c.gradients.items() if n in clip.names}
        names = [n for n in before if n in step.gradients]
        if not names:
            return []
        flat, own = flattened(before, names), flattened(step.gradients, names)
        norms.append(float(torch.linalg.vector_norm(flat, clip.norm_type)))
        factors.append(float(own @ flat / (flat @ flat)) if flat.any() else 1.0)
        right = min(1.0, clip.max_norm / (norms[-1] + 1e-6))
        if float((own - factors[-1] * flat).norm()) > allowed * float(own.norm()):
            return []
        if abs(factors[-1] / right - 1) > allowed:
            return []
    return norms if max(factors) > (1 + allowed) * min(factors) else []
