"""The `meshmark` command. Commands of the planner and of regressions define their own arguments."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from meshmark.errors import MeshmarkError
from meshmark.text import pluralize

EPILOG = """examples:
  meshmark doctor                       what can run here, and what would be skipped
  srun -N8 meshmark doctor --cluster    what differs between nodes, and which link is slow
  pytest --pyargs meshmark.suites       run every adapter on two CPU ranks, append to results/records.jsonl
  pytest --pyargs meshmark.suites --adapters ddp,fsdp2 --world 2,4 -k equivalence
  meshmark report results -o report.md  render what was recorded
  meshmark compare before after         what became better or worse; --fail-on wrong,slower:3% sets the exit code
  meshmark plan --model llama-8b --gpus 64 --gpu h100
"""


AddArguments = Callable[[argparse.ArgumentParser], None]


class _Command(argparse.ArgumentParser):
    """A command that adds its arguments only when it is called, because their imports are slow."""

    add_arguments: AddArguments | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if add := self.add_arguments:
            self.add_arguments = None
            add(self)
        return super().parse_known_args(args, namespace or argparse.Namespace())


class _Help(argparse.HelpFormatter):
    """Help formatter that keeps names such as gpt-tiny on one line, where a search finds them."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C, SIGTERM or SIGHUP ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 if a gate failed, 2 for a user's mistake, or `INTERRUPTED`."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and records may hold what no encoding can write
        sys.stdout.reconfigure(errors="backslashreplace")
    parsed = _parser().parse_args(arguments)
    try:
        with _plain_warnings(), contextlib.redirect_stdout(cast(TextIO, _UnreadOutput(sys.stdout))):
            code = parsed.run(parsed) or 0
            sys.stdout.flush()  # here, where a failure can still be reported
        return code
    except MeshmarkError as error:
        from meshmark.report.table import visible

        told = "\n".join(visible(line) for line in str(error).splitlines())  # records and file names may say anything
        print(f"meshmark: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("meshmark: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:  # Python's own code, 1, would say that a gate failed, or that a script trains wrong
        if error.filename is None and error.errno in _UNWRITABLE:
            _silence_stdout()
            print(f"meshmark: what it found cannot be written: {error.strerror}", file=sys.stderr)
        elif error.errno in _OF_A_PATH:
            print(f"meshmark: {_about_path(error)}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2
    except Exception:
        traceback.print_exc()  # a defect of Meshmark's own
        return 2


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings of Meshmark's own code as remarks, without the line of source that issued them."""
    before = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        own = category is UserWarning and _PACKAGE in Path(filename).parents
        return f"meshmark: {message}\n" if own else before(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


class _UnreadOutput:
    """Standard output that does not fail when its reader leaves, as `head` does: a gate still decides the exit code."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _silence_stdout()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _silence_stdout()


_PACKAGE = Path(__file__).parent.parent

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO)
"""Errors of a standard output that is full or closed."""


_OF_A_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
"""Errors of a file or folder that a user can mend."""


def _about_path(error: OSError) -> str:
    """Return a line about a file or folder that cannot be read or written."""
    from meshmark.report.table import visible

    where = f"{visible(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
    return f"{where}{error.strerror}"


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null, where all that is written from now on succeeds, and Python's flush at exit too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshmark",
        description="Benchmark and conformance suite for distributed training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Command)
    for name, (told, add) in _COMMANDS.items():
        command = commands.add_parser(name, help=told, allow_abbrev=name != "cases", formatter_class=_Help)
        command.add_arguments = add
    return parser


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    from meshmark.cli.cluster_doctor import add_cluster, examine

    add_cluster(doctor)
    doctor.set_defaults(run=lambda parsed: examine(parsed) if parsed.cluster else _doctor())


def _add_cases(cases: argparse.ArgumentParser) -> None:
    from meshmark.cli.options import add_case_options

    add_case_options(cases)
    cases.set_defaults(run=_cases)


def _add_check(parser: argparse.ArgumentParser) -> None:
    from meshmark.check.cli import add_check

    add_check(parser)


def _of_report(name: str) -> AddArguments:
    def add(parser: argparse.ArgumentParser) -> None:
        from meshmark.regression.baseline import find_baseline
        from meshmark.report import cli

        parser.set_defaults(find_baseline=find_baseline)
        {"report": cli.add_report, "show": cli.add_show, "schema": cli.add_schema}[name](parser)

    return add


def _add_gaps(parser: argparse.ArgumentParser) -> None:
    from meshmark.report.gaps import add_gaps

    add_gaps(parser)


def _add_which(parser: argparse.ArgumentParser) -> None:
    from meshmark.report.which import add_which

    add_which(parser)


def _of_planner(name: str) -> AddArguments:
    def add(parser: argparse.ArgumentParser) -> None:
        from meshmark.cli import plan_run
        from meshmark.plan import cli, predict_cli

        {"plan": plan_run.add_plan, "predict": predict_cli.add_predict, "calibrate": cli.add_calibrate}[name](parser)

    return add


def _add_run(parser: argparse.ArgumentParser) -> None:
    from meshmark.cli.suite_file import add_run

    add_run(parser)


def _add_submit(parser: argparse.ArgumentParser) -> None:
    from meshmark.cli.submit import add_submit

    add_submit(parser)


def _of_regression(name: str) -> AddArguments:
    def add(parser: argparse.ArgumentParser) -> None:
        from meshmark.regression import ab_cli, cli, history_cli

        {
            "compare": cli.add_compare,
            "baseline": cli.add_baseline,
            "ab": ab_cli.add_ab,
            "bisect": ab_cli.add_bisect,
            "history": history_cli.add_history,
        }[name](parser)

    return add


_COMMANDS: dict[str, tuple[str, AddArguments]] = {
    "doctor": ("frameworks, devices, and what would be skipped and why", _add_doctor),
    "check": ("your own training script: does it train correctly, and what does it optimise?", _add_check),
    "cases": ("the matrix that `pytest --pyargs meshmark.suites` would run", _add_cases),
    "run": ("the runs and gates of a suite file, for CI", _add_run),
    "submit": ("the matrix as a job array of SLURM, gathered into one folder", _add_submit),
    "plan": ("the best layout for a model on a cluster", _of_planner("plan")),
    "predict": ("predict every layout of a CSV file", _of_planner("predict")),
    "calibrate": ("measure this machine and what of it is reached", _of_planner("calibrate")),
    "report": ("a page of recorded results, markdown or HTML", _of_report("report")),
    "show": ("all that is recorded of one case", _of_report("show")),
    "schema": ("the JSON schema of a record, and what may change of it", _of_report("schema")),
    "gaps": ("what frameworks get wrong, each with a script that shows it", _add_gaps),
    "which": ("which framework and layout for what, from recorded results", _add_which),
    "compare": ("what became better or worse between two results", _of_regression("compare")),
    "baseline": ("accept results as what `pytest suites --baseline` gates by", _of_regression("baseline")),
    "ab": ("two commits, environments or packages in alternation on this machine", _of_regression("ab")),
    "bisect": ("the first bad commit, or release, between a good and a bad one", _of_regression("bisect")),
    "history": ("where a series of runs changed, with date and commit", _of_regression("history")),
}


def _doctor() -> None:
    import torch

    from meshmark.adapter.registry import known_adapters, load_adapter
    from meshmark.environment import describe, num_gpus, versions
    from meshmark.errors import AdapterError
    from meshmark.spec.layout import Schedule

    gpus = num_gpus()
    device = "cuda" if gpus else "cpu"
    environment = describe(device, "nccl" if gpus else "gloo", 1)
    print(f"machine     {environment.machine}, {environment.num_cpus} CPUs, {environment.memory_bytes / 2**30:.0f} GiB")
    print(f"devices     cpu{f', cuda x {gpus}' if gpus else ' (no CUDA device)'}")
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    print(f"backends    {', '.join(backends)}")
    print("versions    " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    print("adapters")
    width = max(map(len, known_adapters()))
    for name, target in known_adapters().items():
        try:
            adapter = load_adapter(target)
        except AdapterError as error:
            print(f"  {name:<{width}} broken: {error}")
            continue
        missing = [reason for requirement in adapter.requires if (reason := requirement.missing)]
        can = adapter.capabilities
        axes = "+".join(sorted(can.degrees)) or "one process"
        stages = f", ZeRO {'/'.join(map(str, sorted(can.zero_stages)))}" if can.zero_stages != {0} else ""
        orders = f", {'/'.join(s for s in Schedule if s in can.schedules)}" if "pp" in can.degrees else ""
        elsewhere = "" if device in can.devices else f" (not on {device})"
        state = f"skipped: {missing[0]}" if missing else f"ready{elsewhere}"
        print(f"  {name:<{width}} {axes}{stages}{orders}; {', '.join(sorted(map(str, can.precisions)))}; {state}")


def _cases(parsed: argparse.Namespace) -> None:
    from meshmark.adapter.matrix import counts, matrix
    from meshmark.adapter.registry import load_adapter
    from meshmark.cli.options import chosen_adapters, chosen_device, chosen_layouts, chosen_workloads, split_values
    from meshmark.spec.case import Case, expect_fit
    from meshmark.spec.precision import precision

    targets = chosen_adapters(parsed.adapters, parsed.adapter)
    adapters = {name: load_adapter(target) for name, target in targets.items()}
    worlds, layouts = chosen_layouts(parsed.world, parsed.layouts)
    workloads = chosen_workloads(parsed.workload, parsed.model, None)
    precisions = [precision(text) for text in split_values("--precision", parsed.precision)]
    cells = matrix(adapters, worlds, workloads, precisions, layouts)
    expect_fit(cells)
    backend = "nccl" if chosen_device(parsed.device) == "cuda" else "gloo"
    for cell in cells:
        if isinstance(cell, Case):
            reason = adapters[cell.adapter].refusal(cell, parsed.device, backend)
        else:
            reason = cell.reason
        print(f"{cell.id:<60} {f'skipped: {reason}' if reason else ''}".rstrip())
    print(counts(adapters, worlds, cells))
    print(pluralize(len(cells), "case"))
