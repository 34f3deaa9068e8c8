"""`meshmark plan --run`: train the layout that a plan chooses, with the suites."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence

from meshmark.cli.suite_file import run_pytest
from meshmark.errors import InputError
from meshmark.models.config import Dataset
from meshmark.models.model_text import describe, described_model, is_description
from meshmark.plan import cli
from meshmark.plan.arguments import framework_given
from meshmark.plan.frameworks import FRAMEWORKS
from meshmark.plan.search import Search
from meshmark.spec.case import Case, InvalidLayout, cell
from meshmark.spec.layout import parse_layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

_TRIED = 200
"""Number of layouts, the fastest first, that are checked against the adapter."""
_RANKS_A_CORE = 4
"""Largest number of ranks per core. With more processes, ranks would mostly wait."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the planner's arguments, and `--run`."""
    cli.add_plan(parser)
    told = (
        "train the choice here, by the suites; OPTIONS are pytest's, such as '--steps 6 -k equivalence', or "
        "'--workload FILE.py:CLASS' to train a model of your own in the layout that was planned for --model"
    )
    parser.add_argument("--run", nargs="?", const="", dest="hand_on", metavar="OPTIONS", help=told)
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan and print, then train if requested. Returns pytest's exit code."""
    if arguments.hand_on is not None:
        _adapter_of(arguments)  # a mistake is told before the search
        if arguments.model and is_description(arguments.model):
            described_model(arguments.model)  # what is planned without, as a scaled rotation, would be trained without
    found = cli.run_plan(arguments)
    if arguments.hand_on is None:
        return 0
    if found is None:
        raise InputError("--run trains a plan's choice; --max-model and --gpu-template make none")
    options = shlex.split(arguments.hand_on)
    return run_pytest([*suite_arguments(found, _adapter_of(arguments), _user_workload(options)), *options])


def _user_workload(options: Sequence[str]) -> Workload | None:
    """Return the user's own workload that OPTIONS name, which is trained instead of the planned model.

    Raises `InputError` if they name several.
    """
    from meshmark.cli.options import chosen_workloads
    from meshmark.spec.workload import DEFAULT_WORKLOAD

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--workload", default=DEFAULT_WORKLOAD)
    named = chosen_workloads(parser.parse_known_args(options)[0].workload, None, None)
    if not any(work.dataset is Dataset.OWN for work in named):
        return None
    if len(named) > 1:
        raise InputError(f"--run: --workload names {len(named)} workloads; a plan's choice is for one")
    return named[0]


def _adapter_of(arguments: argparse.Namespace) -> str:
    named = framework_given(arguments)
    if named is None or named.adapter is None:
        can = ", ".join(name for name, each in FRAMEWORKS.items() if each.adapter)
        raise InputError(f"--run needs a --framework that has an adapter: {can}")
    return named.adapter


def suite_arguments(found: Search, adapter: str, own: Workload | None = None) -> list[str]:
    """Return pytest's arguments to train the fastest layout that the adapter supports.

    `own` is a workload to train instead of the planned model. Raises `InputError` when the adapter supports none of
    the layouts, or when there are more ranks than this machine can run.
    """
    from meshmark.adapter.registry import known_adapters, load_adapter  # with PyTorch, which no plan takes
    from meshmark.environment import num_gpus

    model, grid = found.prediction.model, found.prediction.grid
    ranks, there = int(grid.num_gpus[0]), num_gpus() or _RANKS_A_CORE * (os.cpu_count() or 1)
    reason = ""
    for case in _tried(found, adapter, own):
        if isinstance(case, InvalidLayout):
            reason = reason or case.reason
            continue
        device = "cuda" if num_gpus() else "cpu"
        backend = "nccl" if 0 < ranks <= num_gpus() else "gloo"
        refused = load_adapter(known_adapters()[adapter]).refusal(case, device, backend)
        if refused is not None:
            reason = reason or refused
            continue
        words = ["--pyargs", "meshmark.suites", f"--adapters={adapter}", f"--layouts={case.layout.id}"]
        if own is None:
            words += [f"--model={describe(model)}", f"--global-batch={case.workload.global_batch}"]
        words += [f"--precision={case.precision}", f"--device={device}"]
        if ranks > there:
            typed = shlex.join(["pytest", *words])
            raise InputError(f"{ranks} ranks are more than this machine runs; on each of enough nodes: {typed}")
        return words
    raise InputError(f"--run: {adapter} trains none of the plan's layouts: {reason or 'none fits the model'}")


def _tried(found: Search, adapter: str, own: Workload | None) -> Iterator[Case | InvalidLayout]:
    """Yield the cases to try: in the plan's precision first, then in fp32, which every adapter supports."""
    from meshmark.cli.options import chosen_workloads
    from meshmark.spec.workload import DEFAULT_WORKLOAD

    grid, model = found.prediction.grid, found.prediction.model
    work = own or chosen_workloads(DEFAULT_WORKLOAD, describe(model), int(grid.global_batch[0]))[0]
    for precision in dict.fromkeys((found.prediction.recipe.arithmetic, "fp32")):
        for row in found.ranked[:_TRIED]:
            layout = parse_layout(grid.layout(int(row)).id)  # as the suites will read it
            yield cell(adapter=adapter, workload=work, layout=layout, precision=Precision.PRESETS[precision])
