"""The power to fail, measured: `python -m benchmarks.power` leaves reports/power.md, from what it has written to
results/power/measured.json.gz before; `--page` writes the page from that file alone.

Every engine of tests/broken that trains on wrongly is run through the launcher and must fail the suite, or the clause
of conformance, that should catch it, with the right diagnosis; correct runs must not fail. Exits with 1 when a mutant
survives, is diagnosed as something else, or a correct run raises an alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.honest import Honest, honest_cases
from benchmarks.parallel_trials import Parts, make_runner, measure_groups, try_all
from benchmarks.power_page import Power, report, write_mutants
from benchmarks.smallest import Smallest, correct_case, find, searches, sizes
from benchmarks.trials import MutantRunner
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.environment import describe
from meshmark.errors import InputError
from meshmark.records.record import Record
from meshmark.report.kept_page import keep_page
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import SYNCHRONOUS, algorithm_presets
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.spec.workload import WORKLOADS, workload
from tests.broken.mutant import GPT, LAYOUTS, algorithm_of, layout_of, under
from tests.broken.mutants import BROKEN_ADAPTERS, MUTANTS, sized
from tests.correct.registry import cases as correct_cases

MEASURED = Path("results/power/measured.json.gz")
SEEDS = 4
"""Seeds of each algorithm that is not synchronous."""
SEEDS_BY_CHANCE = 24
"""Seeds of the algorithms whose steps depend on which replica comes first."""
SEEDED = 6
"""Adapters, the first of `BROKEN_ADAPTERS`, that run under other seeds and numbers of micro-batches too."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power", description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="mutants whose name contains TEXT (default: all)")
    parser.add_argument("--groups", type=int, default=24, help="problems of 64 correct runs each (default: 24)")
    parser.add_argument("--page", action="store_true", help=f"measure nothing: the page of {MEASURED} once more")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/power.md"))
    parsed = parser.parse_args(arguments)
    names = [m.name for m in MUTANTS if parsed.k in m.name]
    if not names:
        parser.error(f"no mutant's name contains {parsed.k!r}: nothing would be shown")
    missed = 0
    if not parsed.page:
        if parsed.k:
            return try_some(names)
        missed = try_every_defect()
        save(measure(names, parsed.groups), MEASURED)
    found = load(MEASURED)
    keep_page(report(found), parsed.output)
    write_mutants(found.trials, MEASURED.with_name("mutants.csv"))
    print(f"{parsed.output}: {'; '.join(found.complaints) or 'every mutant caught, no false alarm'}")
    return 1 if found.complaints or missed else 0


def try_some(names: Sequence[str]) -> int:
    """Try the mutants called `names`, and write no page. Returns 1 where one is missed or misnamed."""
    with tempfile.TemporaryDirectory() as folder:
        trials, _ = try_all(names, [], Parts(Path(folder) / "parts.jsonl", describe("cpu", "gloo", 1)))
    return int(not all(trial.caught and trial.named for trial in trials))


def try_every_defect() -> int:
    """Run the tests that train with algorithms' defects, and name them, which `make test` leaves out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "tests/test_algorithm_mutants.py"]
    return subprocess.run(command).returncode


def measure(names: Sequence[str], num_groups: int) -> Power:
    """Measure the mutants called `names`, and `num_groups` groups of correct runs."""
    here = describe("cpu", "gloo", 1)
    parts = Parts(MEASURED.with_name("parts.jsonl"), here)
    # Adapters that are not built in are make roster's.
    trials, cells = try_all(names, [key for key in LAYOUTS if key.partition("/")[0] in ADAPTERS], parts)
    sought = {(adapter, kind) for kind, adapter, _ in searches()}
    with make_runner([sized(adapter, kind, by) for adapter, kind in sought for by in sizes(kind, adapter)]) as (
        mutant_runner,
        launcher,
        folder,
    ):
        correct = functools.cache(mutant_runner.suites.observe)
        smallest = [
            parts.once("smallest", f"{kind} {case.id}", functools.partial(_find, mutant_runner, kind, case, correct))
            for kind, case in ((kind, correct_case(adapter, precision)) for kind, adapter, precision in searches())
        ]
        real = _observed(mutant_runner.suites, (*real_cases(), *cases_by_other_hands()), parts)
        algorithms = _observed(mutant_runner.suites, algorithm_cases(), parts)
        # As the suites run: attention's gradients shrink as training goes on, and with them what can be seen of them.
        suites = Runner(launcher, builtin_adapters(), RunOptions(), folder / "limits")
        limits = _observed(suites, limit_cases(), parts, "limits of ")
        suites.close()
    groups = measure_groups(honest_cases(num_groups), parts)
    return Power(
        trials=trials,
        smallest=smallest,
        cells=cells,
        real=[*real, *limits],
        algorithms=algorithms,
        limits=limits,
        honest=Honest(groups=groups),
        seconds=parts.seconds,
        environment=here,
    )


def _find(runner: MutantRunner, kind: str, case: Case, correct: Callable[[Case], Record]) -> Smallest:
    return find(runner, kind, correct(case))


def _observed(runner: Runner, cases: Iterable[Case], parts: Parts, what: str = "") -> list[Record]:
    """Records of `cases`, each of which is run at most once a campaign."""
    return [
        parts.once("record", f"{what}{case.id} seed {case.workload.seed}", functools.partial(runner.observe, case))
        for case in cases
    ]


def save(found: Power, path: Path) -> None:
    """Whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=1) as file:
        json.dump(encode(found), file)
    partial.replace(path)


def load(path: Path) -> Power:
    """Read what `save` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: Power = decode(Power, json.load(file))
    return found


def real_cases() -> Iterable[Case]:
    """The adapters that the mutants break, as they are, over seeds and numbers of micro-batches."""
    for seed, num_micro_batches in ((0, 4), (1, 2), (2, 1)):
        problem = dataclasses.replace(GPT, name=f"{GPT.name}-seed{seed}", seed=seed)  # an id does not tell seeds apart
        for adapter, layout in list(BROKEN_ADAPTERS.items())[: None if seed == 0 else SEEDED]:
            fixed = layout.pp > 1 or algorithm_of(adapter) is not SYNCHRONOUS  # which may not divide otherwise
            own = layout if fixed else dataclasses.replace(layout, num_micro_batches=num_micro_batches)
            yield Case(
                adapter=adapter.partition("/")[0], workload=under(adapter, problem), layout=own
            )  # a stage may follow


def cases_by_other_hands() -> Iterable[Case]:
    """Correct engines that compute in other ways than adapters do, in micro-batches whose rows can be reordered."""
    return [dataclasses.replace(case, workload=GPT) for case in correct_cases()]


def algorithm_cases() -> Iterable[Case]:
    """Every algorithm that is not synchronous, on the first adapter and preset that have it, over seeds."""
    for end in algorithm_presets():
        case = next(_cases_of(end))
        by_chance = case.workload.algorithm.steps_until_chance is not None
        for seed in range(SEEDS_BY_CHANCE if by_chance else SEEDS):
            yield dataclasses.replace(case, workload=dataclasses.replace(case.workload, seed=seed))


def _cases_of(end: str) -> Iterator[Case]:
    """Return the cases of the algorithm that ends the names of its presets; not every optimizer has one."""
    names = [name for name in BROKEN_ADAPTERS if algorithm_of(name) is not SYNCHRONOUS]
    engines = {name: load_adapter(builtin_adapters()[name])() for name in names}
    for start in (name for name in WORKLOADS if name.startswith(GPT.name)):
        with contextlib.suppress(InputError):
            problem = workload(f"{start}-{end}")
            for name, engine in engines.items():
                case = Case(adapter=name, workload=problem, layout=layout_of(name))
                if engine.supports(case, "cpu", "gloo") is None:
                    yield case


def limit_cases() -> Iterable[Case]:
    """Whose detection limits are told: the workloads of the suites; and in other precisions the mutants', in 16 bits of
    layouts that split no product and of one that does."""
    for name in ("gpt-tiny", "llama-tiny"):
        yield Case(adapter="ddp", workload=workload(name), layout=LAYOUTS["ddp"])
    for precision in (Precision.FP32, Precision.BF16, Precision.FP16, Precision.FP64):
        yield Case(adapter="ddp", workload=GPT, layout=LAYOUTS["ddp"], precision=precision)
    for adapter, precision in (("fsdp2", Precision.BF16), ("fsdp2", Precision.FP16), ("gpipe", Precision.BF16)):
        yield Case(adapter=adapter, workload=GPT, layout=LAYOUTS[adapter], precision=precision)
    for precision in (Precision.FP32, Precision.BF16):
        yield Case(adapter="megatron", workload=GPT, layout=LAYOUTS["megatron"], precision=precision)


if __name__ == "__main__":
    sys.exit(main())
