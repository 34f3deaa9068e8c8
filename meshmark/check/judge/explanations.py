"""Find out why gradients are wrong, or whether the script has changed right ones by design."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmark.check.gradients import CLAMPED, Comparison, Expected, Explanation, clipped_singly, compare, explain
from meshmark.check.judge.tensors import flattened, is_multiple, multiple, norm_of
from meshmark.check.run import Moment, Run
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault


@dataclass(frozen=True, kw_only=True)
class WrongGradients:
    """Gradients of one replica that are not the right ones."""

    run: Run
    moment: Moment
    own: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]
    comparison: Comparison
    noise: Mapping[str, float]
    eps: float
    parts: list[list[dict[str, Tensor]]]
    """Gradients by rank and micro-batch that they should be made of."""
    previous: Mapping[str, Tensor] | None
    """Gradients before this step, if nothing has cleared them."""
    expected: Expected
    again: Callable[[], Mapping[str, Tensor] | None]
    """Returns the gradients of activations that are computed again; None where none are."""

    @property
    def names(self) -> list[str]:
        """Wrong parameters, the worst first."""
        return self.comparison.wrong

    @property
    def off_by(self) -> str:
        return f"off by {min(self.comparison.worst, 1e9):.2g}"

    @functools.cached_property
    def explanation(self) -> Explanation:
        """The weights with which the parts add up to the gradients, in words."""
        return explain(self.own, self.parts, self.previous, self.names, self.expected)

    @property
    def detail(self) -> str:
        return f"{self.explanation.detail}; {self.off_by}"

    @property
    def edited(self) -> set[str]:
        """Parameters whose gradients the script changes itself, on all ranks."""
        return set.intersection(*(set(step.edited) for step in self.moment.ranks))


@dataclass(kw_only=True)
class Explainer:
    """Reports why a replica's gradients are wrong, by the first explanation that fits."""

    verdict: Verdict
    unseen: str = ""
    """Why the objective cannot be judged by these gradients."""

    def judge(self, wrong: WrongGradients) -> Comparison:
        """Report the explanation.

        Returns the comparison by which the gradients count: another one if the script has changed right ones.
        """
        explanations: Sequence[Callable[[WrongGradients], Comparison | None]] = (
            self._all_cleared,
            self._activations_again,
            self._own_summands,
            self._factor_by_rank,
            self._bounded_elements,
            self._clipped_one_by_one,
            self._clipped_to_norm,
            self._edited,
            self._hooked,
            self._summed_narrow,
        )
        for explanation in explanations:
            if (comparison := explanation(wrong)) is not None:
                return comparison
        self.verdict.add(Level.WRONG, wrong.explanation.fault, wrong.detail, wrong.moment.number)
        return wrong.comparison

    def _all_cleared(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by gradients that are all cleared before the step. A script may clear some of them by design."""
        if any(wrong.own[name].any() for name in wrong.own) or not any(x.any() for x in wrong.exact.values()):
            return None
        told = "are all zero" if wrong.own else "are absent"
        replicas = wrong.moment.gradients
        cleared = [rank for rank, own in replicas.items() if not any(g.any() for g in own.values())]
        where = "" if len(cleared) == len(replicas) else f" on rank {cleared[0]}"
        self.verdict.add(
            Level.WRONG, Fault.MISSING,
            f"gradients {told}{where} when the optimizer steps (cleared after the backward pass, or never reduced?)",
            wrong.moment.number,
        )  # fmt: skip
        return wrong.comparison

    def _activations_again(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by activations that the backward pass computes otherwise than the forward pass did."""
        if (again := wrong.again()) is None or is_multiple(wrong.own, wrong.exact, wrong.names):
            return None
        if not is_multiple(wrong.own, again, wrong.names):
            return None
        self.verdict.add(
            Level.WRONG, Fault.BACKWARD,
            "activations that torch.utils.checkpoint computes again are not those of the forward pass: random "
            "numbers are drawn anew (preserve_rng_state=False?), or something has changed in between; "
            f"{with_verb(wrong.names)} {wrong.off_by}", wrong.moment.number,
        )  # fmt: skip
        return wrong.comparison

    def _own_summands(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by tensor-parallel ranks that do not add their gradients up."""
        names, added = wrong.names, wrong.moment.added
        if not all(n in added for n in names):
            return None
        if compare({n: added[n] for n in names}, {n: wrong.exact[n] for n in names}, wrong.noise, wrong.eps).wrong:
            return None
        self.verdict.add(
            Level.WRONG, Fault.NOT_REDUCED,
            f"{with_verb(names)} a sum over the tensor-parallel group, and each rank keeps its own "
            "summand (SequenceParallel missing?)", wrong.moment.number,
        )  # fmt: skip
        return wrong.comparison

    def _factor_by_rank(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by a factor of each rank's own."""
        factors = _scaled_by_rank(wrong)
        if not factors:
            return None
        shown = ", ".join(f"{x:.4g}" for x in factors)
        shards = any(wrong.run.facts[0].pieces[n].ranks for n in wrong.names)
        each = f"each rank scales {'its own part of ' if shards else ''}the gradients by its own factor ({shown})"
        if shards:
            each += ", as by the norm of that part; the norm of all gradients is the same on all ranks"
        else:
            each += ", after they are reduced (a number of its own rows or tokens, in the place of all ranks'?)"
        self.verdict.add(Level.WRONG, Fault.CLIPPING if shards else Fault.SCALED, each, wrong.moment.number)
        self.unseen = "each rank scales gradients by a factor of its own"
        return wrong.comparison

    def _bounded_elements(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by elements that the script bounds."""
        if not (bound := _clamped(wrong.own, wrong.exact)):
            return None
        text = f"no element of a gradient is beyond {bound:.4g} (clipping of its own, which is not judged)"
        self.verdict.add(Level.NOTE, "scaled by the script", text, wrong.moment.number)
        self.unseen = "the script clips gradients itself"
        return wrong.comparison

    def _clipped_one_by_one(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by tensors, or rows of tensors, that the script clips one by one."""
        single = clipped_singly(wrong.own, wrong.exact, wrong.names) if wrong.edited else None
        if single is None or not wrong.edited.issuperset(wrong.names):
            return None
        before = compare({**wrong.own, **single.gradients}, wrong.exact, wrong.noise, wrong.eps)
        if before.wrong:
            return None
        self.verdict.add(
            Level.NOTE, "gradients clipped one by one",
            f"{with_verb(wrong.names)} the right gradient, which the script has multiplied {single.text} "
            "(clipping one by one, which is not judged)", wrong.moment.number,
        )  # fmt: skip
        return before

    def _clipped_to_norm(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by gradients that the script scales down to a norm."""
        if wrong.explanation.fault != Fault.SCALED or not _is_clipped_by_hand(wrong.own, wrong.exact):
            return None
        self.verdict.add(
            Level.NOTE, "scaled by the script",
            f"all gradients are scaled to a norm of {norm_of(wrong.own):.4g} (clipping of its own, which is not "
            "judged)",
            wrong.moment.number,
        )  # fmt: skip
        self.unseen = "the script scales gradients itself"
        return wrong.comparison

    def _edited(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by gradients that the script changes itself."""
        fault = wrong.explanation.fault
        own_factor = fault == Fault.SCALED and not any(name in wrong.detail for name in wrong.expected.known)
        unknown = own_factor or fault in (Fault.BACKWARD, Fault.UNEXPLAINED)
        if not (unknown and wrong.edited.issuperset(wrong.names)):
            return None
        self.verdict.add(
            Level.UNKNOWN, "gradients changed by the script",
            "the script changes gradients in a hook or after the backward pass; "
            f"{with_verb(wrong.names)} not judged", wrong.moment.number,
        )  # fmt: skip
        self.unseen = "the script changes gradients itself"
        return wrong.comparison

    def _hooked(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by a communication hook of DDP's."""
        hooks, fault = " and ".join(wrong.run.facts[0].hooks), wrong.explanation.fault
        if not hooks or fault not in (Fault.PRECISION, Fault.BACKWARD, Fault.UNEXPLAINED):
            return None
        level = Level.NOTE if fault == Fault.PRECISION else Level.UNKNOWN
        self.verdict.add(
            level, "a communication hook",
            f"gradients pass DDP's communication hook {hooks}, which may change them: {wrong.off_by} (not judged)",
            wrong.moment.number,
        )  # fmt: skip
        self.unseen = "a communication hook changes gradients"
        return wrong.comparison

    def _summed_narrow(self, wrong: WrongGradients) -> Comparison | None:
        """Explain by gradients that the script itself sums over ranks in a lower precision, as hooks of DDP do."""
        dtype = wrong.run.facts[0].sums_narrow
        if not dtype or wrong.explanation.fault != Fault.PRECISION:
            return None
        self.verdict.add(
            Level.NOTE, "gradients summed in a lower precision",
            f"the script sums gradients over ranks in {dtype}, which rounds them: {wrong.off_by} (not judged)",
            wrong.moment.number,
        )  # fmt: skip
        self.unseen = "gradients are summed in a lower precision"
        return wrong.comparison


def _scaled_by_rank(wrong: WrongGradients) -> list[float]:
    """Return the factor by which each rank has scaled the gradients that it holds; empty if they do not differ."""
    factors = []
    for f, step in zip(wrong.run.facts, wrong.moment.ranks, strict=True):
        names = [n for n in wrong.names if n in step.complete_gradients and n not in f.gradient_pieces]
        if not names or f.partial:
            return []
        parts = {n: step.complete_gradients[n] for n in names}
        exact = {n: f.pieces[n].take(wrong.exact[n], x) for n, x in parts.items()}
        own, right = flattened(parts, names), flattened(exact, names)
        factor, left = multiple(own, right)
        if factor <= 0.0 or left > CLAMPED * float(own.norm()):
            return []
        factors.append(factor)
    return factors if max(factors) - min(factors) > CLAMPED * max(factors) else []


_ROUND = 5e-5
"""Relative difference up to which a norm is a number of two digits."""


def _is_clipped_by_hand(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> bool:
    """Return whether gradients are the right ones scaled down to a norm of two digits, such as 0.1, 0.25 or 5."""
    norm = norm_of(own)
    if not 0.0 < norm < 0.999 * norm_of(exact):
        return False
    digits = norm / 10.0 ** (math.floor(math.log10(norm)) - 1)  # from 10 to 100
    return abs(digits - round(digits)) < _ROUND * digits


def _clamped(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float | None:
    """Return the bound if gradients are the right ones clipped by value, else None."""
    names = [n for n in exact if n in own]
    flat, right = (torch.cat([x[n].double().reshape(-1) for n in names]) for x in (own, exact))
    bound = float(flat.abs().max())
    if not 0.0 < bound < 0.999 * float(right.abs().max()):
        return None
    off = float((flat - right.clamp(-bound, bound)).norm()) / float(flat.norm())
    return bound if off < CLAMPED else None


def with_verb(names: list[str]) -> str:
    """Return the first name, how many there are besides, and the verb that belongs to them."""
    return names[0] + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")
