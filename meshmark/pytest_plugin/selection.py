"""Options of the command line of `pytest suites`, and what they select.

The files of optional suites are added to those that pytest is given. Names of inference engines are taken from among
the adapters. `--shard 2/4` selects the second of four parts of a run, for tasks of a job array and for CI.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.matrix import LayoutChoice
from meshmark.adapter.registry import (
    ENGINE_PRECISIONS,
    inference_adapters,
    load_adapter,
    outside_name,
    working_directory_kept,
)
from meshmark.cli.options import (
    RUN_OPTIONS,
    chosen_adapters,
    chosen_device,
    chosen_layouts,
    chosen_workloads,
    duration,
    part,
    split_values,
)
from meshmark.conformance.gap_file import read_gaps
from meshmark.environment import describe, num_gpus, threads_of_ranks
from meshmark.errors import AdapterError, InputError, MeshmarkError, UnknownNameError
from meshmark.inference.process import is_engine, load_engine
from meshmark.judge.deviation import ENDURANCE_STEPS, Assess
from meshmark.launch.cluster import ClusterSpec, cluster_of, node_loss
from meshmark.launch.folders import users_caches
from meshmark.launch.launch import LAUNCHERS, expect_interfaces, unheeded_variables
from meshmark.passes.observe import WATCHED_STEP
from meshmark.records.record import sources_of
from meshmark.reference.data import check_data, on_corpus
from meshmark.regression.baseline import find_baseline
from meshmark.regression.baseline_gate import PER_TEST, BaselineGate, baseline_gate, expect_conditions
from meshmark.regression.gate import DEFAULT_GATE, parse_gate
from meshmark.run.runner import RunOptions
from meshmark.spec.case import NONE, Cell, Tuning
from meshmark.spec.precision import Precision, precision
from meshmark.spec.workload import Workload

# --- Names of inference engines among the adapters of the command line.

_CHOSEN = pytest.StashKey[dict[str, str]]()
_PRECISIONS = pytest.StashKey[list[str]]()


def take_engines(config: pytest.Config) -> None:
    """Take engines out of `--adapters` and `--adapter`, and their own precisions out of `--precision`.

    The other suites then see only what trains. If the inference suite is not asked for, all names stay, and the other
    suites report engines as unknown adapters. Raises `pytest.UsageError` for an adapter that cannot be imported.
    """
    if _CHOSEN in config.stash:
        return
    asked = any("test_inference" in argument for argument in config.args)
    known, named, outside = inference_adapters() if asked else {}, config.getoption("--adapters"), list[str]()
    if asked:
        try:
            with working_directory_kept():
                outside = [target for target in config.getoption("--adapter") if ":" in target and is_engine(target)]
        except AdapterError as error:
            raise pytest.UsageError(str(error)) from error
    given = _parts(named) if named else [] if outside else list(known)
    if config.args and all("test_inference" in argument for argument in config.args):
        _refuse_what_is_for_training(config, given, known, outside)
    own = {outside_name(target): target for target in outside}
    if clash := sorted(own.keys() & known.keys()) or ([] if len(own) == len(outside) else sorted(own)):
        raise pytest.UsageError(f"--adapter: {', '.join(clash)} would stand for two engines; rename the class")
    config.stash[_CHOSEN] = {name: known[name] for name in given if name in known} | own
    if config.stash[_CHOSEN]:
        config.option.adapters = ",".join(name for name in given if name not in known) or None
        config.option.adapter = [target for target in config.getoption("--adapter") if target not in outside]
    config.stash[_PRECISIONS] = _parts(config.getoption("--precision"))
    if asked and any(name in ENGINE_PRECISIONS for name in config.stash[_PRECISIONS]):
        left = [name for name in config.stash[_PRECISIONS] if name not in ENGINE_PRECISIONS]
        config.option.precision = ",".join(left) or "fp32"


def _refuse_what_is_for_training(
    config: pytest.Config, given: list[str], known: dict[str, str], outside: list[str]
) -> None:
    """Raise `pytest.UsageError` for options that the inference suite alone cannot heed."""
    try:
        for name in given:
            if name not in known:
                raise UnknownNameError("engine", name, known)
        precisions = (*Precision.PRESETS, *ENGINE_PRECISIONS)
        for name in _parts(config.getoption("--precision")):
            if name not in precisions:
                raise UnknownNameError("precision", name, precisions)
        for target in config.getoption("--adapter"):
            if target not in outside:
                load_engine(target)  # says what is expected of an engine
    except (AdapterError, UnknownNameError) as error:
        raise pytest.UsageError(str(error)) from error
    if worlds := config.getoption("--world"):
        raise pytest.UsageError(f"--world {worlds}: an engine has the ranks of its name, such as paged-tp2")


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def chosen_engines(config: pytest.Config) -> dict[str, str]:
    """Return the engines that `--adapters` and `--adapter` name, or all: name to target."""
    take_engines(config)
    return config.stash[_CHOSEN]


def chosen_precisions(config: pytest.Config) -> list[str]:
    """Return the precisions that `--precision` names, engines' own included."""
    take_engines(config)
    return config.stash[_PRECISIONS]


# --- Add the files of optional suites to the files that pytest is given.

_FOLDER = (Path(__file__).parent.parent / "suites").resolve()
_PACKAGE = "meshmark.suites."
OPTIONAL = ("conformance", "profile", "scale")
"""Suites that run only if `--NAME` or their file is given."""


def with_optional_suites(arguments: Sequence[str], asked: Iterable[str], folder: Path) -> list[str]:
    """Return pytest's positional `arguments`, with the files of the optional suites in `asked`.

    Files are added only if `arguments`, relative to `folder`, name files of the suites. For a test of one case, only
    the profile of that case is added.
    """
    found = list(arguments)
    for suite in asked:
        for argument in arguments:
            sibling = _sibling(argument, suite, folder)
            if sibling and sibling.partition("::")[0] not in arguments and sibling not in found:
                found.append(sibling)
    return found


def module_of(file: Path) -> str | None:
    """Return the name by which `--pyargs` finds a file of the suites, or None for any other file."""
    return f"{_PACKAGE}{file.stem}" if file.resolve().parent == _FOLDER else None


def _sibling(argument: str, suite: str, folder: Path) -> str | None:
    """Return the file of `suite` next to the one in `argument`, or None for folders and other files."""
    name, _, test = argument.partition("::")
    if name.startswith(f"{_PACKAGE}test_"):
        sibling = f"{_PACKAGE}test_{suite}"
    elif (folder / name).resolve().parent == _FOLDER and name.endswith(".py"):
        sibling = str(Path(name).with_name(f"test_{suite}.py"))
    else:
        return None
    case = test.partition("[")[2] if suite in ("profile", "scale") else ""
    return f"{sibling}::test_profile[{case}" if case else sibling


# --- Options of the command line of `pytest suites`, and their checked values.


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The checked values of the command line."""

    targets: dict[str, str]
    """Adapter name to "module:Class"."""
    adapters: dict[str, type[Adapter]]
    worlds: list[int]
    """World sizes. If `layouts` are given, those of the layouts."""
    layouts: LayoutChoice
    """Chosen layouts. None uses the matrix's."""
    workloads: list[Workload]
    global_batch: int | None
    """Global batch of every workload. None keeps each workload's own."""
    corpus: str | None
    """Corpus of every workload."""
    precisions: list[Precision]
    tunings: list[Tuning]
    options: RunOptions
    results: Path
    """Absolute path, because code of adapters and tests may change the working directory."""
    cluster: ClusterSpec
    launcher: str
    """A key of LAUNCHERS."""
    baseline_gate: BaselineGate | None
    """The gate of `--baseline`."""
    resume: bool = False
    """True if cases in `results` are not run again."""
    shard: tuple[int, int] = (1, 1)
    """Number of the part to run, and the number of parts."""
    max_seconds: float | None = None
    """Time in seconds after which no further test starts."""


SELECTION = pytest.StashKey[Selection]()
_MOST_STEPS = 100_000
MOST_SECONDS = 1_000_000
"""Upper bound of a time limit, in seconds."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options of `pytest suites`."""
    group = parser.getgroup("meshmark", "Meshmark: which cases to run, and where")
    for option in RUN_OPTIONS:
        option.add_to(group.addoption)


def selection(config: pytest.Config) -> Selection:
    """Return the checked command line. Raises `pytest.UsageError` for invalid values."""
    if SELECTION not in config.stash:
        try:
            config.stash[SELECTION] = _select(config)
        except MeshmarkError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[SELECTION]


def _select(config: pytest.Config) -> Selection:
    option = config.getoption
    targets = chosen_adapters(option("--adapters"), option("--adapter"))
    adapters = {name: load_adapter(target) for name, target in targets.items()}  # whose modules may bring workloads
    corpus, batch = option("--corpus"), option("--global-batch")
    workloads = [on_corpus(each, corpus) for each in chosen_workloads(option("--workload"), option("--model"), batch)]
    for chosen in workloads:
        check_data(chosen)
        for target in targets.values():
            sources_of(target, chosen)  # of what is loaded here; a later change is noticed
    worlds, layouts = chosen_layouts(option("--world"), option("--layouts"))
    given = {"nnodes": option("--nnodes"), "node_rank": option("--node-rank"), "rdzv": option("--rdzv")}
    return Selection(
        targets=targets,
        adapters=adapters,
        worlds=worlds,
        layouts=layouts,
        workloads=workloads,
        global_batch=batch,
        corpus=corpus,
        precisions=[precision(text) for text in split_values("--precision", option("--precision"))],
        tunings=list(dict.fromkeys(Tuning.parse(text) for text in option("--tuning") or [NONE])),
        options=_run_options(config),
        results=config.invocation_params.dir / option("--results"),
        cluster=cluster_of(os.environ, **given),
        launcher=_launcher(option("--launcher")),
        resume=option("--resume"),
        shard=(1, 1) if option("--shard") is None else part("--shard", option("--shard")),
        max_seconds=None if option("--max-time") is None else duration("--max-time", option("--max-time")),
        baseline_gate=_gatekeeper(config),
    )


def expect_spread(chosen: Selection, worlds: Collection[int]) -> None:
    """Raise `InputError` if the nodes can run none of the cases. Otherwise the run would pass with only skips."""
    spec = chosen.cluster
    if worlds and all(world % spec.nnodes for world in worlds):
        raise InputError(
            f"{' or '.join(map(str, sorted(worlds)))} ranks cannot be spread evenly over {spec.text}: --world takes "
            f"multiples of {spec.nnodes} here; or start one task a node (srun --ntasks-per-node=1), which has all of "
            "its ranks"
        )


def expect_gpus(chosen: Selection, worlds: Collection[int]) -> None:
    """Raise `InputError` if NCCL was requested and cannot serve the ranks of every world size."""
    if chosen.options.oversubscribe and (chosen.options.device != "cuda" or chosen.options.backend == "gloo"):
        raise InputError(
            f"--oversubscribe with --device {chosen.options.device} --backend {chosen.options.backend or 'gloo'}: it "
            "is for ranks that share GPUs over nccl; give --device cuda and no --backend gloo, or leave it out"
        )
    if chosen.options.backend != "nccl":
        return
    if chosen.options.device != "cuda":
        raise InputError(
            f"--backend nccl with --device {chosen.options.device}: NCCL sends tensors of GPUs alone; give --device "
            "cuda, or leave --backend out"
        )
    spec, gpus = chosen.cluster, chosen.options.num_gpus
    for world in sorted(worlds):
        ranks = world // (spec.nnodes if spec.gpus_by_task else spec.num_hosts)
        if told := chosen.options.refuses_to_share(ranks):
            raise InputError(
                f"{told}: give --world {gpus * world // ranks} or less, --oversubscribe to share GPUs all the same, or "
                "--backend gloo"
            )


def crowding(chosen: Selection) -> list[str]:
    """Return warnings for readers of times: ranks that share cores or GPUs."""
    spec, world = chosen.cluster, max(chosen.worlds, default=1)
    ranks, served = world // spec.num_hosts, world // (spec.nnodes if spec.gpus_by_task else spec.num_hosts)
    threads = threads_of_ranks(os.environ)
    cores, gpus = len(os.sched_getaffinity(0)), chosen.options.num_gpus
    if chosen.options.device == "cuda" and served > gpus:
        by_task = "; each task sees but its own: start one a GPU, or one a node without --gpus-per-task"
        told = f"{served} ranks share {gpus} GPU{'s' * (gpus != 1)}: their times are those of sharing"
        return [f"{told}{by_task if spec.gpus_by_task else ''}"]
    if chosen.options.device == "cpu" and ranks * threads > cores:
        each = f" of {threads} threads" if threads > 1 else ""
        return [f"{ranks} ranks{each} share {cores} core{'s' * (cores != 1)}: their times are those of sharing"]
    return []


def unheeded(environment: Mapping[str, str]) -> list[str]:
    """Return a warning of the shell's variables that would configure a framework, if there are any."""
    names = unheeded_variables(environment)
    told = f"ranks are not given {', '.join(names)} of this shell: cases say themselves how they are trained"
    return [told] if names else []


def _gatekeeper(config: pytest.Config) -> BaselineGate | None:
    gate, name = parse_gate(config.getoption("--fail-on")), config.getoption("--baseline")
    if name is None:
        if config.getoption("--fail-on") != DEFAULT_GATE or config.getoption("--across"):
            raise InputError("--fail-on and --across are for a comparison: give --baseline NAME too, or leave them out")
        return None
    if unasked := [str(kind) for kind in gate.limits if kind not in PER_TEST]:
        raise InputError(
            f"--fail-on {','.join(unasked)}: a session with --baseline compares each case as it ends, in "
            f"{', '.join(PER_TEST)}; meshmark compare {name} {config.getoption('--results')} --fail-on "
            f"{','.join(unasked)} compares the folders afterwards"
        )
    keeper = baseline_gate(find_baseline(name, config.invocation_params.dir), gate)
    if not config.getoption("--across"):
        nnodes = config.getoption("--nnodes") or 1
        expect_conditions(keeper, describe(config.getoption("--device"), "", nnodes))
    return keeper


def _launcher(name: str) -> str:
    if name not in LAUNCHERS:
        raise UnknownNameError("launcher", name, LAUNCHERS)
    return name


def _run_options(config: pytest.Config) -> RunOptions:
    device, backend, steps = (config.getoption(name) for name in ("--device", "--backend", "--steps"))
    chosen_device(device)
    if backend not in (None, "gloo", "nccl"):
        raise UnknownNameError("backend", backend, ["gloo", "nccl"])
    runs_here = not config.option.collectonly  # `meshmark submit` collects on a node that may have no GPU
    if device == "cuda" and runs_here and not num_gpus():
        raise InputError("--device cuda, but PyTorch sees no CUDA device here; `meshmark doctor` shows what it sees")
    if steps is not None and steps > _MOST_STEPS:
        raise InputError(f"--steps {steps}: at most {_MOST_STEPS}, because every step is recorded")
    if steps is not None and steps <= WATCHED_STEP:
        raise InputError(f"--steps {steps}: at least {WATCHED_STEP + 1} are needed; the last one is metered")
    limit, budget = config.getoption("--time-limit"), config.getoption("--timing-budget")
    if not 0 < limit <= MOST_SECONDS:  # neither is true of nan
        raise InputError(f"--time-limit {limit:g}: expected seconds above 0, at most {MOST_SECONDS:,} (11 days)")
    if not 0 <= budget < limit:
        raise InputError(f"--timing-budget {budget:g}: expected seconds from 0 to below --time-limit, {limit:g}")
    users_caches(os.environ)
    expect_interfaces(os.environ)
    threads_of_ranks(os.environ)
    counts = {} if steps is None else {"observed_steps": steps, "timed_steps": steps}
    if config.getoption("--endurance"):
        if steps is not None:
            raise InputError(
                f"--endurance observes {ENDURANCE_STEPS} steps, and --steps {steps} others: give one of them"
            )
        counts = {"observed_steps": ENDURANCE_STEPS}
    chosen = RunOptions(
        device=device,
        backend=backend,
        num_gpus=num_gpus(),
        oversubscribe=config.getoption("--oversubscribe"),
        time_limit_seconds=limit,
        assess=_assess(config),
        localise=config.getoption("--localise") or None,
        on_node_loss=node_loss(config.getoption("--on-node-loss")),
    )
    named = config.getoption("--known-gaps")
    gaps = read_gaps(config.invocation_params.dir / named) if named else ()
    chosen = dataclasses.replace(chosen, timing_budget_seconds=budget, known_gaps=gaps)
    return dataclasses.replace(chosen, **counts)


def _assess(config: pytest.Config) -> Assess | None:
    how = config.getoption("--assess")
    if how is not None and how not in list(Assess):
        raise UnknownNameError("--assess", how, list(Assess))
    return None if how is None else Assess(how)


# --- `--shard 2/4`: the second of four parts of a run, for tasks of a job array and for CI.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of this part.

    All tests of a case are in one part, because they share launches. Cases are dealt in turn, because neighbours take
    similar time. Tests without a case are in the first part.
    """
    if config.getoption("--shard") is None:
        return
    number, parts = selection(config).shard
    chosen = in_part([_cell(item) for item in items], number, parts)
    config.hook.pytest_deselected(items=[item for item, mine in zip(items, chosen, strict=True) if not mine])
    items[:] = [item for item, mine in zip(items, chosen, strict=True) if mine]


def in_part(cells: Sequence[str | None], number: int, parts: int) -> list[bool]:
    """Return whether each test, given its case, is in part `number` of `parts`."""
    places: dict[str, int] = {}
    turns = [places.setdefault(cell, len(places)) if cell else 0 for cell in cells]
    return [turn % parts == number - 1 for turn in turns]


def _cell(item: pytest.Item) -> str | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    for name in ("case", "conforming"):
        if isinstance(cell := parameters.get(name), Cell):
            return f"{name} {cell.id}"
    return None
