"""Options of a run of the suites, and their values. All parsers raise `InputError`.

`pytest suites`, `meshmark cases` and suite files take the options from this one list.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

from meshmark.adapter.matrix import AUTO, LayoutChoice
from meshmark.adapter.registry import core_adapters, known_adapters, outside_name, select
from meshmark.errors import InputError, UnknownNameError
from meshmark.judge.deviation import ENDURANCE_STEPS, ENDURANCE_TIME, LARGEST_FULL
from meshmark.models.config import Dataset
from meshmark.models.model_text import KEYS, described_model, is_description
from meshmark.models.transformer import ModelSpec
from meshmark.regression.gate import DEFAULT_GATE
from meshmark.spec.case import NONE, WORDS
from meshmark.spec.layout import GLOSSARY, parse_layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import DEFAULT_WORKLOAD, WORKLOADS, Workload, workload

# --- The list of options.


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """One option. `help` is escaped as argparse wants it: `%%` is a percent sign."""

    name: str
    """Without dashes."""
    help: str
    metavar: str | None = None
    default: str | float | None = None
    kind: type[str | int | float] = str
    """Type of the value."""
    is_flag: bool = False
    """True if it takes no value."""
    repeated: bool = False
    """True if it may be given several times. Others take commas."""
    file: tuple[str, ...] = ()
    """Tables of a suite file that may set it: "cases" for one run, "options" for all runs."""
    listed: bool = False
    """True if it chooses cases, so that `meshmark cases` has it."""

    def add_to(self, add: Callable[..., object]) -> None:
        """Add it to a parser of argparse or pytest, by the parser's own method."""
        if self.is_flag:
            add(f"--{self.name}", action="store_true", help=self.help)
        elif self.repeated:
            add(f"--{self.name}", action="append", default=[], metavar=self.metavar, help=self.help)
        else:
            add(f"--{self.name}", type=self.kind, default=self.default, metavar=self.metavar, help=self.help)


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    for option in RUN_OPTIONS:
        if option.listed:
            option.add_to(parser.add_argument)


RUN_OPTIONS = (
    RunOption(
        name="adapters",
        file=("cases",),
        listed=True,
        metavar="A,B",
        help="adapters by name, framework (accelerate: all core adapters that wrap it) or shell pattern (default: the "
        "core; '*': all; '*,!NAME': all but one)",
    ),
    RunOption(
        name="adapter",
        file=("cases",),
        listed=True,
        repeated=True,
        metavar="FILE.py:CLASS",
        help="an adapter from outside the repo, or package.module:Class; only it runs unless --adapters is given too",
    ),
    RunOption(
        name="world",
        file=("cases",),
        listed=True,
        metavar="N,M",
        help="world sizes (default: 2); `single` always runs on 1",
    ),
    RunOption(
        name="layouts",
        file=("cases",),
        listed=True,
        metavar="ID,ID",
        help="run these layouts instead of the matrix's; ids are those that reports print, such as dp2.tp2.mb4; auto "
        "takes a few layouts per world size that cover every pair of choices that an adapter supports; "
        + "; ".join(f"{part}: {meaning}" for part, meaning in GLOSSARY.items()),
    ),
    RunOption(
        name="device",
        file=("options",),
        listed=True,
        default="cpu",
        help="cpu or cuda (default: cpu)",
    ),
    RunOption(name="backend", file=("options",), help="gloo or nccl (default: nccl where every rank has its own GPU)"),
    RunOption(
        name="oversubscribe",
        file=("options",),
        is_flag=True,
        help="run more ranks than there are GPUs over nccl: ranks that share a GPU are told apart by NCCL_HOSTID and "
        "communicate through sockets; for correctness, memory and traffic, not for times",
    ),
    RunOption(
        name="precision",
        file=("cases",),
        listed=True,
        default="fp32",
        metavar="P,Q",
        help=f"precisions to run: {', '.join(Precision.PRESETS)} (default: fp32)",
    ),
    RunOption(
        name="tuning",
        file=("cases",),
        repeated=True,
        metavar="P,Q",
        help=f"tuning of every case: {', '.join([*WORDS, NONE])}; its use is verified; if given several times, cases "
        f"run under each (default: {NONE})",
    ),
    RunOption(
        name="workload",
        file=("cases",),
        listed=True,
        default=DEFAULT_WORKLOAD,
        metavar="NAME,NAME",
        help=f"workloads to run: {', '.join(WORKLOADS)} (default: {DEFAULT_WORKLOAD})",
    ),
    RunOption(
        name="model",
        file=("cases",),
        listed=True,
        metavar="KEY=N,...",
        help=f"change the workload's model by keys {', '.join(KEYS)}, or take a Hugging Face FILE.json and such keys",
    ),
    RunOption(name="global-batch", file=("cases",), kind=int, metavar="N", help="sequences per step (default: preset)"),
    RunOption(name="corpus", file=("cases",), metavar="PATH", help="train on a file, byte by byte, or image folder"),
    RunOption(
        name="conformance",
        file=("cases",),
        is_flag=True,
        help="also collect suites/test_conformance.py; it trains gpt-mini; clauses about a precision choose it",
    ),
    RunOption(
        name="profile",
        is_flag=True,
        help="collect suites/test_profile.py too: where a step's time goes, with a Chrome trace in DIR/traces",
    ),
    RunOption(
        name="scale",
        is_flag=True,
        help="also collect suites/test_scale.py: it measures memory and traffic of single ranks in a fake world of "
        "--world ranks, one process per rank",
    ),
    RunOption(
        name="assess",
        metavar="HOW",
        help="what is compared with the float64 truth: full, sampled (all tensors of 2 steps, few noise runs) or off "
        f"(default: full up to {LARGEST_FULL // 10**6} million parameters, sampled beyond)",
    ),
    RunOption(
        name="localise",
        is_flag=True,
        help="run every case that is not equivalent again, to name the module in which it begins to deviate "
        "(default: only short cases whose diagnosis does not name it)",
    ),
    RunOption(
        name="steps",
        file=("cases", "options"),
        kind=int,
        metavar="N",
        help="optimizer steps per pass (default: 5 observed, or 3 if sampled; at least 10 timed)",
    ),
    RunOption(
        name="endurance",
        is_flag=True,
        help=f"for nightly runs: observe {ENDURANCE_STEPS} steps, each judged and metered, and give that pass "
        f"{ENDURANCE_TIME} times --time-limit",
    ),
    RunOption(
        name="timing-budget",
        file=("cases", "options"),
        kind=float,
        default=1.5,
        metavar="S",
        help="most seconds of timed steps per case; timing ends once the rate is known to within 2 %% (default: 1.5; "
        "0: only --steps)",
    ),
    RunOption(
        name="time-limit",
        file=("cases", "options"),
        kind=float,
        default=120.0,
        metavar="S",
        help="seconds a pass may take (default: 120)",
    ),
    RunOption(
        name="launcher",
        file=("options",),
        default="forkserver",
        help="how ranks are started: forkserver or torchrun (default: forkserver)",
    ),
    RunOption(
        name="results",
        file=("options",),
        default="results",
        metavar="DIR",
        help="where records.jsonl is appended (default: results)",
    ),
    RunOption(
        name="resume",
        file=("options",),
        is_flag=True,
        help="skip passes that DIR already holds for the same case, code (a clean commit) and machine",
    ),
    RunOption(
        name="allow-skipped",
        file=("cases",),
        is_flag=True,
        help="pass even if every case was skipped",
    ),
    RunOption(name="shard", metavar="2/4", help="the second of four parts of the cases, for job arrays and CI"),
    RunOption(
        name="max-time",
        file=("cases",),
        metavar="30m",
        help="start no further test after this time, such as 90s, 30m or 1h; one case of each adapter comes first",
    ),
    RunOption(name="baseline", metavar="NAME", help="fail tests that are worse than in baselines/NAME or a folder"),
    RunOption(
        name="fail-on",
        default=DEFAULT_GATE,
        metavar="KIND,...",
        help=f"with --baseline: kinds of changes that fail, with the smallest share (default: {DEFAULT_GATE})".replace(
            "%", "%%"
        ),
    ),
    RunOption(name="across", is_flag=True, help="compare with --baseline even if machine, versions or settings differ"),
    RunOption(
        name="known-gaps",
        file=("options",),
        metavar="FILE.toml",
        help="known failures, in addition to those that adapters declare",
    ),
    RunOption(
        name="nnodes",
        file=("options",),
        kind=int,
        help="nodes that run this same command (default: from SLURM or torchrun)",
    ),
    RunOption(name="node-rank", file=("options",), kind=int, help="number of this node, from 0"),
    RunOption(name="rdzv", file=("options",), metavar="HOST:PORT", help="address of node 0 and a free port on it"),
    RunOption(
        name="on-node-loss",
        default="end",
        metavar="end|continue",
        help="continue: run the cases that fit the remaining nodes if a node is lost (default: end the run)",
    ),
)


# --- Values of options.

WORKLOADS_GROUP = "meshmark.workloads"
"""Entry point group for distributions that provide workloads: `name = "package.module:Class"`."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DIGITS = 5
"""Digits of the largest number of ranks. No cluster has more."""


def chosen_device(name: str) -> str:
    """Return a device that Meshmark knows. Raises `UnknownNameError` for others."""
    if name not in ("cpu", "cuda"):
        raise UnknownNameError("device", name, ["cpu", "cuda"])
    return name


def split_values(option: str, text: str) -> list[str]:
    """Return the distinct values of `a,b`. At least one is required."""
    values = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not values:
        raise InputError(f"{option} {text!r}: expected at least one value")
    return values


def chosen_adapters(patterns: str | None, outside: list[str]) -> dict[str, str]:
    """Return the adapters to use, as a mapping from name to target.

    `patterns` is the value of `--adapters` (names or patterns; by default the core), `outside` that of `--adapter`
    (targets). If only `outside` is given, only these are used.
    """
    for target in outside:
        if ":" not in target:
            raise InputError(
                f"--adapter {target!r}: expected FILE.py:CLASS or package.module:Class; --adapters takes names"
            )
    named = split_values("--adapters", patterns) if patterns is not None else []
    if files := [name for name in named if ":" in name]:
        raise InputError(f"--adapters {', '.join(files)}: expected names or patterns; --adapter takes FILE.py:CLASS")
    own = {outside_name(target): target for target in outside}
    clash = sorted(own.keys() & known_adapters().keys()) if own else []
    if clash or len(own) < len(outside):
        raise InputError(f"--adapter: {', '.join(clash or own)} would stand for two adapters; rename the class")
    if patterns is None:
        return own or core_adapters()
    return select(named, known_adapters(), core_adapters()) | own


def chosen_layouts(world: str | None, layouts: str | None) -> tuple[list[int], LayoutChoice]:
    """Return world sizes and layouts.

    They are the sizes of `--world` (2 by default), with no layouts or `auto`; or the layouts of `--layouts` with their
    sizes.
    """
    if layouts is None or layouts.strip() == AUTO:
        worlds = [positive("--world", text) for text in split_values("--world", "2" if world is None else world)]
        return worlds, None if layouts is None else AUTO
    if world is not None:
        raise InputError(f"--world {world} and --layouts {layouts!r}: give one of them; layouts say how many ranks")
    parsed = [parse_layout(text) for text in split_values("--layouts", layouts)]
    return sorted({layout.world_size for layout in parsed}), parsed


def chosen_workloads(names: str, model: str | None, global_batch: int | None) -> list[Workload]:
    """Return the workloads of `--workload`: presets and users' own.

    A preset with another model or batch is renamed, because its numbers differ. A user's own workload is
    FILE.py:CLASS, package.module:Class, or a name of the entry points `meshmark.workloads`. The id of an algorithm may
    follow a class after a hyphen.
    """
    return [_in_batches(_of_model(_named(name), model), global_batch) for name in split_values("--workload", names)]


def _named(name: str) -> Workload:
    points = importlib.metadata.entry_points(group=WORKLOADS_GROUP, name=name)
    target = next((point.value for point in points), name)
    if ":" not in target:
        return workload(name)
    from meshmark.reference.own_model import algorithm_of, describe  # torch, which presets do not need

    where, _, cls = target.rpartition(":")
    cls, dash, algorithm = cls.partition("-")
    if not (dash and cls.isidentifier()) or target.endswith(".json"):  # in "hf:some-file.json" a name
        return describe(target)
    return dataclasses.replace(describe(f"{where}:{cls}"), algorithm=algorithm_of(name, algorithm))


def _of_model(preset: Workload, text: str | None) -> Workload:
    if text is None:
        return preset
    if not is_description(text):
        raise InputError(f"--model {text!r}: expected KEY=VALUE,... or FILE.json; --workload takes names")
    if not isinstance(preset.model, ModelSpec):
        raise InputError(f"--model {text!r}: workload {preset.name!r} trains {preset.model.name!r}, no model of text")
    model = described_model(text if preset.model.causal or "causal=" in text else f"{text},causal=0")
    name = model.name if preset.name == DEFAULT_WORKLOAD else f"{preset.name}.{model.name}"
    dataset = Dataset.TEXT if model.causal else Dataset.MASKED_TEXT
    return dataclasses.replace(preset, name=name, model=model, dataset=dataset)


def _in_batches(preset: Workload, global_batch: int | None) -> Workload:
    if global_batch is None or global_batch == preset.global_batch:
        return preset
    if preset.dataset is Dataset.OWN:
        raise InputError(
            f"--global-batch {global_batch}: workload {preset.name!r} makes batches of its own size"
            f", {preset.global_batch} rows; change its batch()"
        )
    return dataclasses.replace(preset, name=f"{preset.name}.b{global_batch}", global_batch=global_batch)


def positive(option: str, text: str) -> int:
    """Parse a whole number of at least 1, such as a world size. It is limited, because each rank is a process."""
    if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
        raise InputError(f"{option} {text[:40]!r}: expected a whole number of at least 1, of at most {_DIGITS} digits")
    return int(text)


def part(option: str, text: str) -> tuple[int, int]:
    """Parse `2/4` into number and count."""
    number, slash, count = text.partition("/")
    found = positive(option, number), positive(option, count if slash else "")
    if found[0] > found[1]:
        raise InputError(f"{option} {text!r}: expected a part such as 2/4, from 1 to the number of parts")
    return found


def duration(option: str, text: str) -> float:
    """Parse `90`, `90s`, `30m` or `2h` into seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    if not number.isdecimal() or len(number) > _DIGITS or not int(number):
        raise InputError(f"{option} {text[:40]!r}: expected a time such as 90s, 30m or 2h")
    return int(number) * _UNITS[unit]
