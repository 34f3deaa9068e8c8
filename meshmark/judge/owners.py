"""Explain gradients that are one rank's part only: which rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshmark.judge.deviation import Tensors
from meshmark.judge.failed_step import LEFT_OVER, SAME, Explanation, FailedStep
from meshmark.judge.faults import Fault
from meshmark.judge.trace import Trace
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case


def shards_of_owners(failed: FailedStep) -> Explanation | None:
    """Explain tensors made of different sequences: each shard is the part of the rank that owns it."""
    batch, own, parts = failed.batch, failed.trace.gradients[failed.step], set()
    rows = [failed.truth(failed.step, part) for part in failed.parts(batch)]
    for name in failed.names:
        basis = np.stack([row[name].ravel() for row in rows], axis=1)
        gradient = np.asarray(own[name], dtype=np.float64).ravel()
        weights = np.linalg.lstsq(basis, gradient, rcond=None)[0]
        if np.linalg.norm(gradient - basis @ weights) < LEFT_OVER * np.linalg.norm(gradient):
            parts.add(tuple(int(i) for i in np.flatnonzero(np.abs(weights) > SAME * np.abs(weights).max())))
    if len(parts) < 2 or sum(map(len, parts)) > len(rows):
        return None
    listed = " or ".join(str(list(part)) for part in sorted(parts))
    return Fault.NOT_REDUCED, f"each tensor is made of its owner's {failed.parts_name} alone: {listed}"


def nobody_reduced(case: Case, trace: Trace, step: int) -> str | None:
    """Return a text if every drifting rank, and the lowest, has gradients of one data-parallel rank's sequences only.

    None if some rank's gradients are made of several ranks' sequences, or of something else.
    """
    names = sorted(set.intersection(*(set(held) for held in trace.drifted.values()))) if trace.drifted else []
    if not names or step >= len(trace.gradients) or any(name not in trace.gradients[step] for name in names):
        return None
    batch = make_batch(case.workload, step)
    failed = FailedStep(case=case, trace=trace, step=step, tolerances=dict.fromkeys(names, 0.0))
    rows = [failed.truth(step, part) for part in failed.parts(batch)]
    held = {0: trace.gradients[step], **trace.drifted}
    parts = {rank: _whose(held[rank], rows, names, case.layout.dp) for rank in sorted(held)}
    if any(part is None for part in parts.values()) or len(set(parts.values())) < 2:
        return None
    listed = ", ".join(f"rank {rank} that of {part}" for rank, part in parts.items())
    return f"no rank reduced, each holds the part of one data-parallel rank alone: {listed}"


def not_summed_over_tp(case: Case, trace: Trace, step: int, tolerance: Callable[[str], float]) -> list[str]:
    """Return the parameters whose gradients on the tensor-parallel ranks differ, and add up to the truth.

    Other gradients may drift as well: what reached them over a residual connection was summed, or was whole.
    """
    tp = case.layout.tp
    held = {0: trace.gradients[step], **trace.drifted} if step < len(trace.gradients) else {}
    if tp == 1 or not held.keys() >= set(range(tp)):
        return []
    names = set.intersection(*(set(held[rank]) for rank in range(tp)))
    failed = FailedStep(case=case, trace=trace, step=step, tolerances=dict.fromkeys(names, 0.0))
    exact = failed.exact
    totals = {name: sum(np.asarray(held[rank][name], dtype=np.float64) for rank in range(tp)) for name in names}
    return sorted(name for name in names if np.linalg.norm(totals[name] - exact[name]) <= tolerance(name))


def _whose(own: Tensors, rows: Sequence[Tensors], names: Sequence[str], dp: int) -> int | None:
    """Return the data-parallel rank whose sequences alone produce all these gradients, or None."""
    basis = np.stack([np.concatenate([row[n].ravel() for n in names]) for row in rows], axis=1)
    gradient = np.concatenate([np.asarray(own[n], dtype=np.float64).ravel() for n in names])
    weights = np.linalg.lstsq(basis, gradient, rcond=None)[0]
    if np.linalg.norm(gradient - basis @ weights) > LEFT_OVER * np.linalg.norm(gradient):
        return None
    shares = np.abs(weights.reshape(dp, -1)).max(axis=1)
    present = np.flatnonzero(shares > SAME * shares.max())
    return int(present[0]) if len(present) == 1 else None
