"""`python -m benchmarks.reach.mutants`: run mutants of the frameworks against the passes that execute them.

A mutant is one small change of one statement that `python -m benchmarks.reach` has seen executed. It runs against those
judged passes, quick ones first, until one kills it or its time is over. Results are appended to
baselines/reach/mutants.jsonl, and a run goes on where it was cut off. Survivors are read by hand: readings.toml.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.reach.attempts import TRIED, Attempt, End, tried_before
from benchmarks.reach.measured import load, versions
from benchmarks.reach.mutate import Mutation, change_of, mutations
from benchmarks.reach.mutating_launcher import MutatingLauncher
from benchmarks.reach.runs import KEPT, PASSES, RESULTS, Pass, done, passes
from benchmarks.reach.scope import DISTRIBUTIONS, MODULES, SITE, framework_of, statements
from meshmark.adapter.registry import builtin_adapters
from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import encode
from meshmark.spec.case import Case

SECONDS = 90.0
"""At most for one mutant, all its passes together. The last pass begins before."""
PATIENCE_SECONDS = 25.0
"""Time limit of one pass. Unmutated, the passes that are chosen take a few seconds."""
SEED = 20261124
MOST_PASSES = 6
"""Most passes of the suites for one mutant; clauses are added to these."""


# --- Choosing.


def _source() -> Path:
    """Return the file of passes: this machine's own, or the one that is kept."""
    return PASSES if PASSES.exists() else KEPT


def judging(found: Sequence[Pass], results: dict[str, dict[str, str]]) -> list[Pass]:
    """Return the passes by which something passed, and which can therefore fail by a mutant. `results` is what `done`
    returns."""

    def passed(each: Pass) -> bool:
        if not each.scenario:
            return bool(each.passed)
        readers = (name for name, clause in CLAUSES.items() if each.scenario in clause.scenarios)
        return any(results[each.unit].get(name) == "pass" for name in readers)

    return [each for each in found if each.judged and passed(each)]


def sample(found: Sequence[Pass]) -> Iterator[tuple[str, Mutation]]:
    """Yield framework and mutant in a random order that the seed fixes, one of each framework in turn."""
    executed: dict[str, set[int]] = defaultdict(set)
    for each in found:
        for file, lines in each.lines.items():
            executed[file] |= statements(file).executed(set(lines))
    by_framework: dict[str, list[Mutation]] = {name: [] for name in MODULES}
    for file in sorted(executed):
        by_framework[framework_of(file)] += mutations(file, executed[file])
    order = {name: random.Random(f"{SEED} {name}").sample(own, len(own)) for name, own in by_framework.items()}
    for position in range(max(map(len, order.values()), default=0)):
        for name, mutants in order.items():
            if position < len(mutants):
                yield name, mutants[position]


def executing(mutation: Mutation, found: Sequence[Pass]) -> list[Pass]:
    """Return the judged passes that execute the mutated statement: those of the suites, of different adapters and quick
    ones first, then scenarios of clauses."""
    own = statements(mutation.file)
    hits = [each for each in found if mutation.line in own.executed(set(each.lines.get(mutation.file, ())))]
    suites = sorted((each for each in hits if not each.scenario), key=lambda each: each.seconds)
    first: dict[str, Pass] = {}
    for each in suites:
        first.setdefault(each.case.adapter, each)
    rest = [each for each in suites if each not in first.values()]
    chosen = [*first.values(), *rest][:MOST_PASSES]
    return [*chosen, *(each for each in hits if each.scenario)]


# --- Running.


def attempt(
    launcher: MutatingLauncher,
    framework: str,
    mutation: Mutation,
    found: Sequence[Pass],
    results: dict[str, dict[str, str]],
) -> Attempt:
    """Run one mutant until something kills it, or its time is over."""
    started, tried = time.monotonic(), list[str]()
    before, after = change_of(mutation)
    launcher.mutation = mutation
    end, by, told = (End.NO_MUTANT, "", "the change has no effect on the code") if before == after else (None, "", "")
    plan = executing(mutation, found) if end is None else []
    runner = Runner(
        launcher,
        builtin_adapters(),
        RunOptions(time_limit_seconds=PATIENCE_SECONDS, observed_steps=3),
        RESULTS / "mutants",
    )
    scenarios, clauses_done = ScenarioRunner(runner), set[tuple[str, Case]]()
    try:
        for each in plan:
            if time.monotonic() - started > SECONDS or end:
                break
            if not each.scenario:
                tried.append(f"suites {each.case.id}")
                record = runner.observe(each.case)
                failed = [v for v in record.verdicts if v.suite in each.passed and not v.passed]
                end = _ended(record) or (End.VERDICT if failed else None)
                by = f"{each.case.adapter}: {', '.join(v.suite for v in failed)}" if failed else each.case.adapter
                told = _describe(record) or (failed[0].summary if failed else "")
            else:
                end, by, told = _try_clauses(scenarios, each, results, clauses_done, tried)
            if launcher.complaint:
                end, told = End.NO_MUTANT, launcher.complaint
    finally:
        runner.close()
        launcher.mutation = None
    return Attempt(
        framework=framework,
        version=version(DISTRIBUTIONS[framework]),
        mutation=mutation,
        before=before,
        after=after,
        end=end or End.SURVIVED,
        by=by if end else "",
        message=_of_any_machine(told.partition("\n")[0])[:300] if end else "",
        tried=tried,
        seconds=round(time.monotonic() - started, 1),
    )


def _of_any_machine(text: str) -> str:
    """Return `text` without the folders of this machine."""
    return text.replace(f"{SITE}/", "").replace(f"{Path.cwd()}/", "")


def _try_clauses(
    scenarios: ScenarioRunner,
    each: Pass,
    results: dict[str, dict[str, str]],
    clauses_done: set[tuple[str, Case]],
    tried: list[str],
) -> tuple[End | None, str, str]:
    """Judge the clauses that read a scenario and passed without the mutation."""
    base = next((case for case in _bases(each)), None)
    if base is None:
        return None, "", ""
    for name, clause in CLAUSES.items():
        passed = results[each.unit].get(name) == "pass"
        if each.scenario not in clause.scenarios or not passed or (name, base) in clauses_done:
            continue
        clauses_done.add((name, base))
        tried.append(f"{base.adapter} clause {name}")
        finding = scenarios.judge(clause, base)
        if finding.result != "pass":
            records = scenarios.perform_all(clause, base).values()
            ended = next((end for record in records if (end := _ended(record))), None)
            # The clause about errors ends in a crash by intention.
            return (
                (End.VERDICT if name == "error" else ended or End.VERDICT),
                f"{base.adapter}: clause {name}",
                finding.evidence,
            )
    return None, "", ""


def _bases(each: Pass) -> Iterator[Case]:
    """Yield the base case of the unit that a scenario's pass belongs to."""
    from benchmarks.reach.runs import units

    for unit in units([each.case.adapter]):
        if unit.name == each.unit:
            yield unit.case


def _ended(record: Record) -> End | None:
    """Return how a pass ended that did not come to its end; None also where the fault is outside of its ranks."""
    status = record.outcome.status
    if status in (Status.HUNG, Status.SLOW):
        return End.HANG
    if status is Status.NAN:
        return End.VERDICT
    return End.CRASH if status not in (Status.OK, Status.SKIPPED) and not status.outside else None


def _describe(record: Record) -> str:
    return "" if record.outcome.status is Status.OK else f"{record.outcome.status}: {record.outcome.message}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reach.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="begin no more after that (default: 15)")
    parser.add_argument("--most", type=int, default=400, help="mutants in all, with those tried before (default: 400)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose name contains TEXT; not kept")
    parsed = parser.parse_args(arguments)
    source = _source()
    if source == KEPT and load().versions != (here := versions()):
        parser.error(f"{KEPT} is of {load().versions}, and installed are {here}: run `make reach` first")
    results = done(source)
    found, before = judging(passes(source), results), {each.mutation.name for each in tried_before()}
    if not found:
        parser.error(
            f"neither {PASSES} nor {KEPT} has passes: run `make reach` first, which finds out what is executed"
        )
    TRIED.parent.mkdir(parents=True, exist_ok=True)
    started, count = time.monotonic(), len(before)
    with Cluster(ClusterSpec()) as cluster:
        launcher = MutatingLauncher(cluster)
        for framework, mutation in sample(found):
            if count >= parsed.most or time.monotonic() - started > 60 * parsed.minutes:
                break
            if mutation.name in before or parsed.only not in mutation.name:
                continue
            each = attempt(launcher, framework, mutation, found, results)
            count += 1
            if not parsed.only:
                with TRIED.open("a") as file:
                    file.write(json.dumps(encode(each)) + "\n")
            told = f"{each.before[:60]} -> {each.after[:60]}  {each.by} {each.message[:100]}"
            print(f"{each.end:<9} {each.seconds:5.1f} s  {mutation.name}  {told}", flush=True)
        launcher.close()
    print(f"{count} mutants tried")
    return 0


if __name__ == "__main__":
    sys.exit(main())
