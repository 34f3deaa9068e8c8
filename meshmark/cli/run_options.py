"""Options of a run of the suites. `pytest suites`, `meshmark cases` and suite files take them from this one list."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from meshmark.judge.sample import ENDURANCE_STEPS, ENDURANCE_TIME, LARGEST_FULL
from meshmark.regression.gate import DEFAULT_GATE
from meshmark.spec.layout_id import GLOSSARY
from meshmark.spec.model_text import KEYS
from meshmark.spec.precision import Precision
from meshmark.spec.tuning import NONE, WORDS
from meshmark.spec.workload import DEFAULT_WORKLOAD, WORKLOADS


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
        help="adapters by name, framework (accelerate: all of the core that wrap it) or shell pattern (default: the "
        "core; '*': all; '*,!NAME': all but one)",
    ),
    RunOption(
        name="adapter",
        file=("cases",),
        listed=True,
        repeated=True,
        metavar="FILE.py:CLASS",
        help="an adapter from outside the repo, or package.module:Class; alone unless --adapters is given too",
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
        help="these layouts in the place of the matrix's, by the ids that reports print, such as dp2.tp2.mb4, or auto: "
        "of each world size, few by which every two choices that an adapter supports come together; "
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
        name="precision",
        file=("cases",),
        listed=True,
        default="fp32",
        metavar="P,Q",
        help=f"of {', '.join(Precision.PRESETS)} (default: fp32)",
    ),
    RunOption(
        name="tuning",
        file=("cases",),
        repeated=True,
        metavar="P,Q",
        help=f"how every case is tuned, of {', '.join([*WORDS, NONE])}, proved to be in use; given again: each case "
        f"under each (default: {NONE})",
    ),
    RunOption(
        name="workload",
        file=("cases",),
        listed=True,
        default=DEFAULT_WORKLOAD,
        metavar="NAME,NAME",
        help=f"of {', '.join(WORKLOADS)} (default: {DEFAULT_WORKLOAD})",
    ),
    RunOption(
        name="model",
        file=("cases",),
        listed=True,
        metavar="KEY=N,...",
        help=f"the workload's model in another size, of {', '.join(KEYS)}; or a Hugging Face FILE.json, and such keys",
    ),
    RunOption(name="global-batch", file=("cases",), kind=int, metavar="N", help="sequences a step (default: preset's)"),
    RunOption(name="corpus", file=("cases",), metavar="PATH", help="train on a file, byte by byte, or image folder"),
    RunOption(
        name="conformance",
        file=("cases",),
        is_flag=True,
        help="collect suites/test_conformance.py too, as naming it does; it trains gpt-mini, in precisions of its own",
    ),
    RunOption(
        name="profile",
        is_flag=True,
        help="collect suites/test_profile.py too: where a step's time goes, with a Chrome trace in DIR/traces",
    ),
    RunOption(
        name="scale",
        is_flag=True,
        help="collect suites/test_scale.py too: memory and traffic of single ranks of a fake world of --world ranks, "
        "each alone in one process",
    ),
    RunOption(
        name="assess",
        metavar="HOW",
        help="what is held against the float64 truth: full, sampled (all tensors of 2 steps, by few noise runs) or off "
        f"(default: full up to {LARGEST_FULL // 10**6} million parameters, sampled beyond)",
    ),
    RunOption(
        name="localise",
        is_flag=True,
        help="run every case that is not equivalent once more, and name the module in which it begins to deviate "
        "(default: short ones whose diagnosis leaves that open)",
    ),
    RunOption(
        name="steps",
        file=("cases", "options"),
        kind=int,
        metavar="N",
        help="optimizer steps of a pass (default: 5 observed, 3 where that is sampled, at least 10 timed)",
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
        help="seconds of timed steps a case, until its rate is known to within 2 %% (default: 1.5; 0: --steps alone)",
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
        help="run nothing that DIR holds already for the same case, code (a clean commit) and machine",
    ),
    RunOption(
        name="allow-skipped",
        file=("cases",),
        is_flag=True,
        help="pass though every case was skipped, which otherwise fails",
    ),
    RunOption(name="shard", metavar="2/4", help="the second of four parts of the cases, for job arrays and CI"),
    RunOption(
        name="max-time",
        file=("cases",),
        metavar="30m",
        help="start no further test after this time, such as 90s, 30m or 1h; one case of each adapter comes first",
    ),
    RunOption(name="baseline", metavar="NAME", help="fail tests that are worse than baselines/NAME, or a folder's"),
    RunOption(
        name="fail-on",
        default=DEFAULT_GATE,
        metavar="KIND,...",
        help=f"with --baseline: kinds of changes that fail, and from which share on (default: {DEFAULT_GATE})".replace(
            "%", "%%"
        ),
    ),
    RunOption(name="across", is_flag=True, help="compare with --baseline though machine, versions or settings differ"),
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
    RunOption(name="node-rank", file=("options",), kind=int, help="which of them this is"),
    RunOption(name="rdzv", file=("options",), metavar="HOST:PORT", help="address of node 0 and a free port on it"),
    RunOption(
        name="on-node-loss",
        default="end",
        metavar="end|continue",
        help="continue: without it, with the cases that fit the nodes that are left (default: end the run)",
    ),
)
