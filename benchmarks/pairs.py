"""`make pairs`: resume, with every two of a case's variations together at least once.

A clause varies one thing. Here a few cases vary many: precision, accumulation, clipping, groups, frozen and tied
weights, optimizer, recomputation. Each is saved after its third step, resumed in other processes, and judged by the
clause "resume". Records stay in results/pairs; a run goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.options import chosen_adapters
from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import FROZEN, SCENARIOS, Scenario, plain_cells
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision

RESULTS = Path("results/pairs")
ADAPTERS = "ddp,fsdp1,fsdp2,ddp-zero1,deepspeed,fairscale-oss,accelerate,accelerate-fsdp2,fabric-ddp,fabric-fsdp"
STEPS = 7
"""Halfway is after the third step: an odd number, which the warm-up's 4 steps and the 2 micro-batches do not divide."""
MOMENTUM = {"kind": OptimizerKind.SGD, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ONE_PASS = {name: replace(SCENARIOS[name], vary=lambda base: base, steps=STEPS) for name in ("save", "resume")}
"""The two scenarios of the clause, without a variation of their own."""

Change = Callable[[Case], Case]


def _optimizer(**changes: object) -> Change:
    def change(case: Case) -> Case:
        spec: OptimizerSpec = replace(case.workload.optimizer, **changes)  # type: ignore[arg-type]
        return replace(case, workload=replace(case.workload, optimizer=spec))

    return change


def _model(**changes: object) -> Change:
    return lambda case: replace(
        case,
        workload=replace(case.workload, model=replace(case.workload.transformer, **changes)),  # type: ignore[arg-type]
    )


def _layout(**changes: object) -> Change:
    return lambda case: replace(case, layout=replace(case.layout, **changes))  # type: ignore[arg-type]


VARIATIONS: Mapping[str, Change] = {
    "bf16": lambda case: replace(case, precision=Precision.BF16),
    "accumulated": _layout(num_micro_batches=2),
    "clipped": _optimizer(clip_norm=0.5),
    "groups": _optimizer(decay_matrices_only=True),
    "warm-up": _optimizer(warmup_steps=4),
    "momentum": _optimizer(**MOMENTUM),
    "frozen": lambda case: replace(case, workload=replace(case.workload, frozen=FROZEN)),
    "tied": _model(tied_embeddings=True),
    "recomputed": _layout(recompute=Recompute.FULL),
}
"""Variations by name. Each is applied or not."""


def pairwise(names: Sequence[str]) -> list[frozenset[str]]:
    """Return few sets of `names`, by which every two names are together, apart either way, and both left out once.

    Greedy: always the set that brings most new pairs, the first of several.
    """
    sets = [frozenset(itertools.compress(names, bits)) for bits in itertools.product((0, 1), repeat=len(names))]

    def pairs(chosen: frozenset[str]) -> set[tuple[str, bool, str, bool]]:
        return {(a, a in chosen, b, b in chosen) for a, b in itertools.combinations(names, 2)}

    brought = {each: pairs(each) for each in sets}
    found, open_pairs = list[frozenset[str]](), set[tuple[str, bool, str, bool]]().union(*brought.values())
    while open_pairs:
        found.append(max(sets, key=lambda each: len(brought[each] & open_pairs)))
        open_pairs -= brought[found[-1]]
    return found


def cases(name: str, world_size: int) -> list[tuple[str, Case]]:
    """Return the varied cases of an adapter at its deepest ZeRO stage, each with the names of its variations."""
    adapter = load_adapter(builtin_adapters()[name])
    plain = [cell for cell in plain_cells(name, adapter, world_size) if isinstance(cell, Case)][-1:]
    found = []
    for base, chosen in itertools.product(plain, pairwise(list(VARIATIONS))):
        case = base
        for variation in chosen:
            case = VARIATIONS[variation](case)
        found.append(("+".join(each for each in VARIATIONS if each in chosen) or "plain", case))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__.partition("\n")[0])
    parser.add_argument("--adapters", default=ADAPTERS, metavar="NAME,...", help="(default: %(default)s)")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parsed = parser.parse_args(arguments)
    adapters = chosen_adapters(parsed.adapters, [])
    failed = 0
    with Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)
        for name in adapters:
            runner = Runner(launcher, adapters, RunOptions(), RESULTS, lambda what, case, record: None)
            failed += try_pairs(runner, cases(name, parsed.world))
            runner.close()
        launcher.close()
    return 1 if failed else 0


def try_pairs(runner: Runner, varied: Sequence[tuple[str, Case]], scenarios: Mapping[str, Scenario] = ONE_PASS) -> int:
    """Judge the clause "resume" of every case, and print a line for each. Returns how many fail."""
    judge, failed = ScenarioRunner(runner, scenarios), 0
    for what, case in varied:
        finding = judge.judge(CLAUSES["resume"], case)
        failed += finding.result in (ClauseResult.FAIL, ClauseResult.STALE_GAP)
        print(f"{finding.result:<12} {case.adapter:<16} {what:<60} {finding.evidence[:160]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
