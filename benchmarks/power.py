"""The power to fail, measured: `python -m benchmarks.power` leaves reports/power.md.

Every engine of tests/broken that trains on wrongly is run through the launcher and must fail the suite that should
catch it, with the right diagnosis; correct runs must not fail. Exits with 1 when a mutant survives, is diagnosed as
something else, or a correct run raises an alarm.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters import ADAPTERS
from benchmarks.honest import Honest, measure_honest
from meshmark.case import Case
from meshmark.cluster import Cluster, ClusterSpec
from meshmark.launch import Launcher
from meshmark.layout import Precision
from meshmark.machine import describe
from meshmark.record import Record, Status
from meshmark.report.tables import markdown
from meshmark.runner import Runner, RunOptions
from meshmark.verdict import detection_limits
from meshmark.workload import workload
from meshmark.yardstick import FALSE_ALARMS
from tests.broken.mutants import GPT, LAYOUTS, MUTANTS, Mutant, scaled, target

STEPS = 3
FRAMEWORKS = ["megatron.core", "fairscale.nn.data_parallel", "fairscale.optim"]
SCALES = [10, 30, 100, 300, 1000, 3000]
"""Parts per billion by which one norm's gradient is scaled, to find the smallest that is caught."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of a mutant."""

    mutant: Mutant
    record: Record

    @property
    def failed(self) -> list[str]:
        return [v.suite for v in self.record.verdicts if not v.passed]

    @property
    def caught(self) -> bool:
        """By the suite that should: a crash is not a verdict."""
        return self.record.outcome.status is Status.OK and self.mutant.suite in self.failed

    @property
    def named(self) -> bool:
        diagnosis = self.record.diagnosis
        return not self.mutant.faults or (diagnosis is not None and diagnosis.fault in self.mutant.faults)

    @property
    def told(self) -> str:
        if self.record.diagnosis and self.mutant.faults:
            return self.record.diagnosis.text
        verdict = self.record.verdict(self.mutant.suite)
        return verdict.summary if verdict else self.record.outcome.message


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power", description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="mutants whose name contains TEXT (default: all)")
    parser.add_argument("--groups", type=int, default=40, help="problems of 26 correct runs each (default: 40)")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/power.md"))
    parsed = parser.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster:
        chosen = [m for m in MUTANTS if parsed.k in m.name]
        slight = {scaled("ddp", n): target(scaled("ddp", n)) for n in SCALES}
        known = {m.name: target(m.name) for m in chosen} | slight | ADAPTERS
        runner = Runner(Launcher(cluster, FRAMEWORKS), known, RunOptions(observed_steps=STEPS), Path(folder))
        trials = [_try(runner, mutant) for mutant in chosen]
        scales = {n: _observe(runner, scaled("ddp", n)) for n in SCALES}
        real = [runner.observe(case) for case in real_cases()]
        limits = [runner.observe(case) for case in limit_cases()]
        runner.close()
    honest = measure_honest(parsed.groups)
    text, good = report(trials, scales, [*real, *limits], limits, honest, time.monotonic() - started)
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    parsed.output.write_text(text)
    print(f"{parsed.output}: {'every mutant caught, no false alarm' if good else 'NOT GOOD'}")
    return 0 if good else 1


def _try(runner: Runner, mutant: Mutant) -> Trial:
    trial = Trial(mutant=mutant, record=runner.observe(mutant.case))
    state = "caught" if trial.caught else "SURVIVED"
    print(f"{state:<8} {mutant.name:<36} {'' if trial.named else 'MISNAMED '}{trial.told}", flush=True)
    return trial


def _observe(runner: Runner, adapter: str) -> Record:
    return runner.observe(Case(adapter=adapter, workload=GPT, layout=LAYOUTS["ddp"]))


def real_cases() -> Iterable[Case]:
    """The adapters that the mutants break, as they are, over seeds and numbers of micro-batches."""
    for seed, num_micro_batches in ((0, 4), (1, 2), (2, 1)):
        problem = dataclasses.replace(GPT, seed=seed)
        for adapter, layout in LAYOUTS.items():
            own = layout if layout.pp > 1 else dataclasses.replace(layout, num_micro_batches=num_micro_batches)
            yield Case(adapter=adapter, workload=problem, layout=own)


def limit_cases() -> Iterable[Case]:
    """Whose detection limits are told: the workloads of the suites, and in other precisions the mutants'."""
    tiny = [(workload(name), Precision.FP32) for name in ("gpt-tiny", "llama-tiny")]
    for problem, precision in (*tiny, (GPT, Precision.FP32), (GPT, Precision.BF16), (GPT, Precision.FP64)):
        yield Case(adapter="ddp", workload=problem, layout=LAYOUTS["ddp"], precision=precision)


def report(
    trials: Sequence[Trial], scales: dict[int, Record], real: Sequence[Record], limits: Sequence[Record],
    honest: Honest, seconds: float,
) -> tuple[str, bool]:  # fmt: skip
    """The page, and whether all is as it should be."""
    caught, named = sum(t.caught for t in trials), sum(t.caught and t.named for t in trials)
    wrong = [r.case.id for r in real if r.outcome.status is not Status.OK or not _equivalent(r)]
    alarms = honest.num_alarms + len(wrong)
    good = caught == named == len(trials) and not alarms
    by_suite = Counter(suite for t in trials for suite in t.failed)
    seen = sorted(n for n, record in scales.items() if not _equivalent(record))
    smallest = f"{seen[0] * 1e-9:.0e}" if seen else "none of those tried"
    environment = describe("cpu", "gloo", 1)
    tried = ", ".join(f"{n * 1e-9:.0e}" for n in sorted(scales))
    suites = ", ".join(f"{suite} {n}" for suite, n in by_suite.most_common())
    parts = [
        "# The power to fail",
        f"**{caught} of {len(trials)} mutants caught by the suite that should, {named} diagnosed rightly; {alarms} "
        f"false alarms in {honest.num_runs + len(real)} correct runs** ({honest.num_comparisons:,} comparisons in the "
        f"first {honest.num_runs}). Suites that failed, over all mutants: {suites}.",
        f"Smallest scaling of one norm's gradient that was caught (tried: {tried}): **{smallest}**.",
        *([f"Alarmed: {', '.join([*wrong, *honest.alarms])}"] if alarms else []),
        "## Detection limits",
        f"Of the gradient of every parameter, at every one of {STEPS} steps. *Scaling*: the smallest factor, less "
        "one, on one parameter's gradient that is caught. *Any direction*: the smallest error, relative in norm, that "
        "leaves the gradient's size as it is. Gradients that are zero by mathematics (the keys' biases) have no "
        "relative error; they are held to their noise. "
        f"A correct case fails with probability {FALSE_ALARMS:g}, by the tails of its own noise runs.",
        markdown([_limit_row(record) for record in limits]),
        "## Correct runs",
        f"{honest.num_runs} runs of `single` over {honest.num_groups} problems (GPT, LLaMA and tied GPT, AdamW and "
        "SGD, seeds, precisions), each problem with noise runs of its own and correct runs under other chunkings, "
        f"orders and last bits; and {len(real)} launches of real adapters.",
        markdown(list(honest.rows())),
        markdown([_real_row(record) for record in real]),
        "## Mutants",
        markdown([_row(trial) for trial in trials]),
        "## How it was obtained",
        f"`make power`: {seconds / 60:.0f} minutes on {environment.num_cpus} CPUs ({environment.machine}), commit "
        f"{environment.commit}, {environment.date}, torch {environment.versions['torch']}.",
    ]
    return "\n\n".join(parts) + "\n", good


def _equivalent(record: Record) -> bool:
    verdict = record.verdict("equivalence")
    return verdict is not None and verdict.passed


def _row(trial: Trial) -> dict[str, object]:
    return {
        "adapter": trial.mutant.adapter, "defect": trial.mutant.defect.__name__,
        "caught": "yes" if trial.caught else "**no**", "fails": ", ".join(trial.failed),
        "diagnosis": ("" if trial.named else "**wrong:** ") + trial.told.replace("|", "/")[:240],
    }  # fmt: skip


def _real_row(record: Record) -> dict[str, object]:
    verdict = record.verdict("equivalence")
    e = verdict.evidence if verdict else {}
    return {
        "case": record.case.id, "seed": record.case.workload.seed, "passed": "yes" if _equivalent(record) else "**no**",
        "worst": e.get("worst_quantity", record.outcome.message),
        "x noise": f"{float(e.get('ratio', 0)):.2f}", "allowed": f"{float(e.get('factor', 0)):.2f}",
    }  # fmt: skip


def _limit_row(record: Record) -> dict[str, object]:
    limits = detection_limits(record)
    scaling = sorted(limits, key=lambda n: -limits[n].scaling)
    blind = sorted(limits, key=lambda n: -limits[n].any_direction)
    middle = limits[scaling[len(scaling) // 2]]
    beyond = sum(limit.any_direction > 5e-6 for limit in limits.values())
    return {
        "workload": record.case.workload.name, "precision": str(record.case.precision),
        "scaling": f"{limits[scaling[0]].scaling:.1e} ({scaling[0]})",
        "any direction": f"{limits[blind[0]].any_direction:.1e} ({blind[0]})",
        "medians": f"{middle.scaling:.1e}, {limits[blind[len(blind) // 2]].any_direction:.1e}",
        "beyond 5e-6 in any direction": f"{beyond} of {len(limits)}",
        "factors": ", ".join(f"{kind} {factor:.2f}" for kind, factor in record.factors.items()),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
