"""The page of the suites' power to fail."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.honest import PROBABILITIES, Honest, Tail
from benchmarks.smallest import Smallest
from benchmarks.trials import Cell, Trial
from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.finding import ClauseResult
from meshmark.environment import Environment
from meshmark.judge.tolerance_model import CLOSE, FALSE_ALARMS, SMALLEST_FACTORS, FalseAlarms, compare, kind_of, shown
from meshmark.models.config import Dataset
from meshmark.records.record import Record, Status
from meshmark.report.table import table as markdown
from meshmark.run.verdict import detection_limits
from tests.broken.narrow import HIDDEN_BY_BF16
from tests.broken.sizes import SIZED


@dataclass(frozen=True, kw_only=True)
class Power:
    """All that was measured."""

    trials: list[Trial]
    smallest: list[Smallest]
    cells: list[Cell]
    """Clauses of correct adapters."""
    real: list[Record]
    """Correct runs of adapters in the suites' workloads."""
    algorithms: list[Record]
    """Correct runs of algorithms that are not synchronous, over seeds."""
    limits: list[Record]
    """Records of `real` whose detection limits the page shows."""
    honest: Honest
    seconds: float
    environment: Environment

    @property
    def caught(self) -> int:
        return sum(t.caught for t in self.trials)

    @property
    def named(self) -> int:
        return sum(t.caught and t.named for t in self.trials)

    @property
    def alarms(self) -> list[str]:
        """Correct runs that failed."""
        wrong = [r.case.id for r in (*self.real, *self.algorithms) if not _correct_run(r)]
        cells = [f"{c.adapter} {c.clause}: {c.finding.evidence}" for c in self.cells if c.alarm]
        return [*wrong, *cells, *self.honest.alarms]

    @property
    def num_alarms(self) -> int:
        return self.honest.num_alarms + len(self.alarms) - len(self.honest.alarms)

    @property
    def judged(self) -> list[Cell]:
        """Those that could have alarmed."""
        unjudged = (ClauseResult.UNSUPPORTED, ClauseResult.TOLD)
        return [c for c in self.cells if c.finding.result not in unjudged]

    @property
    def complaints(self) -> list[str]:
        """Why the power to fail is not what it should be; empty when it is."""
        survived = [f"survived: {t.mutant.name}" for t in self.trials if not t.caught]
        misnamed = [f"misnamed: {t.mutant.name}" for t in self.trials if t.caught and not t.named]
        return [*survived, *misnamed, *(f"alarmed: {what}" for what in self.alarms), *self.misfits]

    @property
    def largest(self) -> dict[str, float]:
        """By kind of quantity, the furthest from the truth that an adapter's correct run was, in its noise."""
        of_cells = (r for c in self.cells for r in c.records)
        records = {id(r): r for r in (*self.real, *self.algorithms, *of_cells)}  # clauses share records
        found: dict[str, float] = {}
        for e in (r.equivalence for r in records.values() if _equivalent(r)):
            for ratio, quantity, _ in e.tolerance_model.ratios(compare(e.deviations)):
                kind = kind_of(quantity)
                found[kind] = max(found.get(kind, 0.0), ratio)
        return found

    @property
    def misfits(self) -> list[str]:
        """Kinds of which more correct runs are far out than the spreads of their noise runs say: than three times as
        many, for a few dozen runs do not tell a spread exactly, and three by chance."""
        return [
            f"misfit: of {tail.compared:,} comparisons of {kind}, {beyond:,} where {probability:g} of them should be"
            for kind, tail in self.honest.tails.items()
            for probability, beyond in zip(PROBABILITIES, tail.beyond, strict=True)
            if beyond > 3 * probability * tail.compared + 3
        ]


def report(power: Power) -> str:
    parts = [
        "# The power to fail",
        *_summary(power),
        *_smallest(power),
        *_limits(power),
        *_correct(power),
        *_mutants(power),
        *_origin(power),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(power: Power) -> Iterable[str]:
    num_correct = power.honest.num_runs + len(power.real) + len(power.algorithms)
    diagnosed = [t for t in power.trials if t.mutant.faults]
    yield (
        f"**{power.caught} of {len(power.trials)} mutants caught by the suite or clause that should; of "
        f"{len(diagnosed)} that a diagnosis must name, {sum(t.caught and t.named for t in diagnosed)} named rightly; "
        f"{power.num_alarms} false alarms in {num_correct} correct runs and {len(power.judged)} "
        f"clauses of correct adapters** ({power.honest.num_comparisons:,} comparisons in the first "
        f"{power.honest.num_runs}). A mutant counts as caught when its run goes to the end and is judged wrong; a "
        "crash only where the clause is about errors. Of the other mutants what fails is the name: bytes, calls, or a "
        "clause."
    )
    if power.complaints:
        yield f"Not good: {'; '.join(power.complaints)}"
    yield markdown(list(_by_catcher(power.trials)))
    own = [trial for trial in power.trials if trial.mutant.workload.dataset is Dataset.OWN]
    yield (
        f"Of these, {len(own)} train a user's own model, of {len({t.mutant.adapter for t in own})} adapters: "
        f"{sum(t.caught for t in own)} caught, {sum(t.named for t in own)} named rightly."
    )


SUITES = ("equivalence", "memory", "communication", "throughput")
"""That mutants fail, in the order of the page."""


def _by_catcher(trials: Sequence[Trial]) -> Iterable[dict[str, object]]:
    """One row for every suite and clause."""
    order = [*SUITES, *CLAUSES]
    counts = Counter(t.mutant.catcher for t in trials)
    for catcher in sorted(counts, key=order.index):
        every = [t for t in trials if t.mutant.catcher == catcher]
        own, narrow = ([t for t in every if t.mutant.in_bf16 is low] for low in (False, True))
        yield {
            "suite or clause": catcher,
            "mutants": len(own),
            "defects": len({t.mutant.defect for t in own}),
            "caught": sum(t.caught for t in own),
            "with a diagnosis": sum(bool(t.mutant.faults) for t in own),
            "named rightly": sum(t.named for t in own if t.mutant.faults),
            "in bf16": len(narrow) or "",
            "caught in bf16": sum(t.caught for t in narrow) if narrow else "",
            "named rightly in bf16": sum(t.named for t in narrow) if narrow else "",
        }


def _smallest(power: Power) -> Iterable[str]:
    yield "## Smallest defects caught"
    yield (
        "Of each kind by bisection, relative to what is right: the smallest that was caught, the largest that was not, "
        "and by how much, relatively, any of the losses of three steps then differs from a correct run's, where 6e-8 "
        "is the rounding of a float32. In 16 bits, whose rounding is 5e-4 (fp16) and 4e-3 (bf16), of gradients: the "
        "twin sees them."
    )
    yield markdown(
        [
            {
                "defect": (SIZED[s.kind].__doc__ or "").rstrip("."),
                "in": f"{s.adapter}, {s.precision}",
                "caught": "none" if s.caught is None else f"{s.caught:.1e}",
                "survived": f"{s.survived:.1e}",
                "in the loss": "random" if s.loss != s.loss else f"{s.loss:.1e}",
                "caught by": s.evidence[:160],
            }
            for s in power.smallest
        ]
    )


def _limits(power: Power) -> Iterable[str]:
    yield "## Detection limits"
    yield (
        f"Of the gradient of every parameter, at every one of {power.limits[0].steps} steps. *Scaling*: the smallest "
        "factor, less one, on one parameter's gradient that is caught. *Any direction*: the smallest error, relative "
        "in norm, that leaves the gradient's size as it is. Gradients that are zero by mathematics (the keys' biases) "
        "have no relative error; they are held to their noise. "
        "In 16 bits they are those against the twin, wherever it is as far from float64 as a run may be: where no "
        "product is split, at most 5e-6 is the aim, and 1e-3 under tensor parallelism. "
        f"Factors aim at {FALSE_ALARMS:g} of correct cases that fail; what is shown of it stands below."
    )
    yield markdown([_limit_row(record) for record in power.limits])


def _correct(power: Power) -> Iterable[str]:
    honest, counted = power.honest, shown()
    yield "## Correct runs"
    yield (
        f"Counted by `make power-long`: **{counted}**. Each run is held against noise runs of its own problem, seed "
        "and number of micro-batches, of other orders and last bits; *batched* runs are those of a small model that "
        "are computed many at once. Runs of a problem fare more alike than others, so that they show as much as their "
        f"number over a design effect, {counted.design_effect:.2f}: by how much the share of the furthest {CLOSE:.0%} "
        "varies more from problem to problem than it would of independent runs. Counted on "
        f"{', '.join(counted.machines) or 'no machine'}, torch {', '.join(counted.torch) or 'none'}."
    )
    yield markdown(_alarm_rows(counted))
    yield f"And here, of {honest.num_runs} runs of `single` and {len(power.real)} launches of real adapters:"
    yield markdown(list(honest.rows()))
    yield (
        "Whether the fit is right: of all comparisons of these runs of `single`, how many were so far from the truth "
        "that their noise runs' spread has only that part of correct runs there, over how many that is. One is a fit, "
        "less is caution. Noise that is no larger than the least it is taken for is left out. Then the largest "
        "multiple of the noise that was seen, and what no factor is smaller than."
    )
    yield markdown([_tail_row(kind, honest.tails.get(kind), power.largest) for kind in SMALLEST_FACTORS])
    yield markdown([_real_row(record) for record in power.real])
    yield f"And {len(power.algorithms)} launches of algorithms that are not synchronous, each over its own seeds:"
    yield markdown(list(_algorithm_rows(power.algorithms)))
    yield "Every clause of conformance, once, on every adapter that the mutants break:"
    yield markdown([_adapter_row(power.cells, adapter) for adapter in dict.fromkeys(c.adapter for c in power.cells)])


def _alarm_rows(counted: FalseAlarms) -> list[dict[str, object]]:
    return [
        {
            "correct runs": c.what,
            "problems": c.problems,
            "tolerance_models": c.tolerance_models,
            "runs": f"{c.runs:,}",
            "alarms": c.alarms,
        }
        for c in counted.counted
    ]


def _tail_row(kind: str, tail: Tail | None, largest: Mapping[str, float]) -> dict[str, object]:
    row: dict[str, object] = {"kind": kind, "comparisons": f"{tail.compared:,}" if tail else 0}
    for index, probability in enumerate(PROBABILITIES):
        told = f"{tail.beyond[index] / (probability * tail.compared):.2f} ({tail.beyond[index]})" if tail else ""
        row[f"beyond {probability:g}"] = told
    return row | {
        "largest, `single`": f"{tail.largest:.2f}" if tail else "",
        "largest, adapters": f"{largest[kind]:.2f}" if kind in largest else "",
        "factor at least": f"{SMALLEST_FACTORS[kind]:.2f}",
    }


def _adapter_row(cells: Sequence[Cell], adapter: str) -> dict[str, object]:
    own = [c for c in cells if c.adapter == adapter]
    counts = Counter(c.finding.result for c in own)
    return {"adapter": adapter} | {str(result): counts[result] for result in ClauseResult}


def _mutants(power: Power) -> Iterable[str]:
    yield "## Mutants"
    yield (
        f"{len({t.mutant.defect for t in power.trials})} defects, most in several adapters; those that fp32's "
        "verdicts of equivalence must see are tried in bf16 too, where the twin sees them. Not tried there: single "
        "modules, which are localised in fp32, and what bf16 hides, "
        f"{', '.join(defect.__name__ for defect in HIDDEN_BY_BF16)}. The diagnosis was made "
        "with these mutants at hand, and mended where it misnamed them: its score says that it works on them, not "
        "how often it is right on a new defect. What each adapter's run showed, in words, goes to "
        "`results/power/mutants.csv`."
    )
    mutants: dict[tuple[str, str], list[Trial]] = {}
    for trial in power.trials:
        mutants.setdefault((trial.mutant.defect.__name__, trial.mutant.catcher), []).append(trial)
    yield markdown([_row(*names, trials) for names, trials in mutants.items()])


def _origin(power: Power) -> Iterable[str]:
    environment = power.environment
    yield "## How it was obtained"
    yield (
        f"`make power`: {power.seconds / 60:.0f} minutes on {environment.num_cpus} CPUs ({environment.machine}), "
        f"commit {environment.commit}, {environment.date}, torch {environment.versions['torch']}."
    )


def _equivalent(record: Record) -> bool:
    verdict = record.verdict("equivalence")
    return verdict is not None and verdict.passed


def _where(trial: Trial) -> str:
    return f"{trial.mutant.adapter} in bf16" if trial.mutant.in_bf16 else trial.mutant.adapter


def _row(defect: str, catcher: str, trials: Sequence[Trial]) -> dict[str, object]:
    missed = [_where(t) for t in trials if not t.caught]
    misnamed = [_where(t) for t in trials if not t.named]
    wide, narrow = ([t for t in trials if t.mutant.in_bf16 is low] for low in (False, True))
    return {
        "defect": defect,
        "must fail": catcher,
        "caught": _share(wide),
        "in bf16": _share(narrow) if narrow else "",
        "not in": f"**{', '.join(missed)}**" if missed else "",
        "named rightly": len(trials) - len(misnamed) if any(t.mutant.faults for t in trials) else "",
        "wrongly in": f"**{', '.join(misnamed)}**" if misnamed else "",
        "fails": ", ".join(dict.fromkeys(suite for trial in trials for suite in trial.failed)),
    }


def _share(trials: Sequence[Trial]) -> str:
    return f"{sum(t.caught for t in trials)} of {len(trials)}"


def write_mutants(trials: Sequence[Trial], path: Path) -> None:
    """Every mutant with what its run showed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["adapter", "precision", "defect", "must fail", "caught", "named rightly", "fails", "evidence"])
        for trial in trials:
            mutant = trial.mutant
            what = (mutant.adapter, str(mutant.precision), mutant.defect.__name__)
            shown = (*what, mutant.catcher, trial.caught, trial.named)
            writer.writerow([*shown, ", ".join(trial.failed), trial.explanation])


def _correct_run(record: Record) -> bool:
    return record.outcome.status is Status.OK and _equivalent(record)


def _real_row(record: Record) -> dict[str, object]:
    verdict = record.verdict("equivalence")
    e = verdict.evidence if verdict else {}
    return {
        "case": record.case.id,
        "seed": record.case.workload.seed,
        "passed": "yes" if _equivalent(record) else "**no**",
        "worst": e.get("worst_quantity", record.outcome.message),
        "x noise": f"{float(e.get('ratio', 0)):.2f}",
        "allowed": f"{float(e.get('factor', 0)):.2f}",
    }


def _algorithm_rows(records: Sequence[Record]) -> Iterable[dict[str, object]]:
    """By kind of algorithm."""
    for kind in dict.fromkeys(record.case.workload.algorithm.kind for record in records):
        of_kind = [r for r in records if r.case.workload.algorithm.kind is kind]
        ratios = [float(v.evidence.get("ratio", 0)) for r in of_kind if (v := r.verdict("equivalence"))]
        yield {
            "algorithm": str(kind),
            "presets": len({r.case.workload.algorithm.id for r in of_kind}),
            "correct runs": len(of_kind),
            "alarms": sum(not _correct_run(r) for r in of_kind),
            "furthest, x noise": f"{max(ratios, default=0.0):.2f}",
        }


def _limit_row(record: Record) -> dict[str, object]:
    limits = detection_limits(record)
    scaling = sorted(limits, key=lambda n: -limits[n].scaling)
    blind = sorted(limits, key=lambda n: -limits[n].any_direction)
    middle = limits[scaling[len(scaling) // 2]]
    beyond = sum(limit.any_direction > 5e-6 for limit in limits.values())
    return {
        "workload": record.case.workload.name,
        "case": f"{record.case.adapter} {record.case.layout.id}",
        "precision": str(record.case.precision),
        "scaling": f"{limits[scaling[0]].scaling:.1e} ({scaling[0]})",
        "any direction": f"{limits[blind[0]].any_direction:.1e} ({blind[0]})",
        "medians": f"{middle.scaling:.1e}, {limits[blind[len(blind) // 2]].any_direction:.1e}",
        "beyond 5e-6 in any direction": f"{beyond} of {len(limits)}",
        "beyond 1e-3": f"{sum(limit.any_direction > 1e-3 for limit in limits.values())} of {len(limits)}",
        "largest factor": f"{max(record.equivalence.factors.values()):.2f}",
    }
