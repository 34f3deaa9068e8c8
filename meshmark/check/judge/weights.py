"""Judge what changes weights beside the optimizer, and which weights no optimizer steps."""

from __future__ import annotations

import torch

from meshmark.check.gradients import shortened
from meshmark.check.judge.tensors import equal_at
from meshmark.check.overwritten import Earlier, change_of
from meshmark.check.run import Moment, Run
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault
from meshmark.text import pluralize


def judge_overwritten(run: Run, previous: Moment, moment: Moment, verdict: Verdict) -> None:
    """Report weights that the optimizer has stepped and that something else has changed since."""
    if not any(s.changed for s in moment.ranks):
        return
    owner = run.owners[0]
    now, held = moment.before[owner], previous.after[owner]
    stepped = [n for g in previous.ranks[0].groups for n in g.names if n in previous.ranks[0].gradients]
    names = [n for n in stepped if n in held and not torch.equal(now[n], held[n])]
    if not names:
        return
    change = change_of({n: now[n] for n in names}, run.history(moment.number, owner, names))
    told = f"something other than the optimizer has set {shortened(names)} to {change.text}"
    if change.averaged:
        verdict.add(
            Level.WRONG, "trained on averaged weights",
            f"{told}, and the script trains on (an average of weights that is not kept apart, or not taken back?)",
            moment.number,
        )  # fmt: skip
    else:
        verdict.add(Level.NOTE, "parameters changed between steps", told, moment.number)


def note_changed_before_the_update(moment: Moment, verdict: Verdict) -> None:
    """Note weights that are other ones when the optimizer steps than when their gradients were computed."""
    for before, step in zip(moment.before_parts, moment.ranks, strict=True):
        at_call = step.calls[-1].weights if step.calls else {}
        now = {
            name: x
            for name, x in step.stepped_from.items()
            if name in step.gradients and not equal_at(name, at_call, step.stepped_from)
        }
        if not now:
            continue
        change = change_of(now, [Earlier(when="before the step", values={n: before[n] for n in now})])
        verdict.add(
            Level.NOTE, "parameters changed before the update",
            "between the gradients and the update, something other than the optimizer has set "
            f"{shortened(now)} to {change.text}", moment.number,
        )  # fmt: skip
        return


def note_bypass(run: Run, verdict: Verdict) -> None:
    """Note that the script calls a module past its wrapper."""
    names = [f.bypassed for f in run.facts if f.bypassed]
    if names:
        why = (
            ", which then reduces no gradients"
            if names[0] == "DistributedDataParallel"
            else ", which then does not see the call"
        )
        verdict.add(
            Level.NOTE, "wrapper bypassed",
            f"a module is called past the {names[0]} around it{why} (call the wrapper, not its `.module`)",
        )  # fmt: skip


def note_not_trained(run: Run, verdict: Verdict) -> None:
    """Note parameters that are in no optimizer, unless one holds other tensors, which `judge_copies` judges."""
    left = _left_out(run)
    if left and not run.facts[0].strangers:
        told = f"{len(left)} of {pluralize(len(run.trained), 'parameter')} are in no optimizer ({left[0]})"
        verdict.add(Level.NOTE, "not trained", told)


def judge_copies(run: Run, previous: Moment | None, moment: Moment, verdict: Verdict) -> None:
    """Report an optimizer of tensors that are in no model, if there are parameters that are in no optimizer.

    If these parameters change between steps nevertheless, the script copies updated tensors into the model, as with
    float32 masters that are kept by hand.
    """
    strangers, left = run.facts[0].strangers, _left_out(run)
    if not strangers or not left:
        return
    told = (
        f"the optimizer holds {pluralize(strangers, 'tensor')} that no model has, and {len(left)} of the model's "
        f"{pluralize(len(run.trained), 'parameter')} ({left[0]}) are in no optimizer"
    )
    owner = run.owners[0]
    if previous is None:
        if run.num_steps == 1:
            verdict.add(Level.UNKNOWN, "copies are stepped", f"{told}; two steps would tell whether they change")
    elif all(equal_at(name, previous.before[owner], moment.before[owner]) for name in left):
        verdict.add(Level.WRONG, Fault.NEVER_UPDATED, f"{told}: was it made before the model was wrapped or copied?", 0)
    else:
        verdict.add(
            Level.UNKNOWN, "copies are stepped",
            f"{told}. Yet they change: the script steps on copies, such as masters in float32 or a flat buffer of "
            "which they are views. Gradients of copies, and what is written into the model, are not judged", 0,
        )  # fmt: skip


def _left_out(run: Run) -> list[str]:
    """Return the parameters of models that are in no optimizer of any rank."""
    held = {name for f in run.facts for name in f.held}
    return [name for name in run.trained if name not in held]
