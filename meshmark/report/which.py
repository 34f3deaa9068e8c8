"""The page "Which framework?" and the command `meshmark which`: from a need to a framework and a layout.

Memory, traffic and clauses are measured, and read from records. Needs of a model of real size on a real cluster are
planned, and marked as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.reproducers import Reproducer, failed_clauses, read_reproducers
from meshmark.environment import Environment
from meshmark.errors import InputError, ResultsError, refuse_page, refuse_strangers
from meshmark.models.transformer import ModelSpec
from meshmark.plan.frameworks import framework
from meshmark.plan.model_names import plan_model
from meshmark.plan.search import NothingFitsError, Search, search, simulate_first
from meshmark.plan.stacks import rates_for, stack_of
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.report.communication import sent_bytes
from meshmark.report.conformance import AdapterColumn, Conformance, judged, read_conformance
from meshmark.report.guard import write_page
from meshmark.report.memory_by_ranks import fullest_states
from meshmark.report.results import CaseResult, results
from meshmark.report.table import Cell, Markup, Rows, block, bytes_cell, inline, one_line, table
from meshmark.serial import decode
from meshmark.spec.hardware import GIB, Gpu, gpu
from meshmark.text import pluralize
from meshmark.theory.grid import SearchSpace

PLANNED = ("ddp", "deepspeed", "fsdp2", "torchtitan", "megatron-core")
"""Frameworks to plan for, the simplest first."""
_SEARCHED = 10
"""Number of layouts per framework whose bubbles are simulated."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """A need that a framework may meet, and the clauses that show it."""

    title: str
    clauses: tuple[str, ...]


NEEDS = (
    Need(title="Resume exactly from a checkpoint", clauses=("resume",)),
    Need(title="Train in bf16", clauses=("bf16 masters", "bf16 states")),
    Need(title="Resume exactly on another number of ranks", clauses=("reshard",)),
    Need(title="Go on after a lost rank or an error", clauses=("recovery", "error")),
    Need(title="Rows of unequal length, and gradient accumulation", clauses=("uneven tokens", "accumulation")),
    Need(title="Frozen, unused and tied parameters", clauses=("frozen", "unused", "tied embeddings")),
    Need(title="Reduce gradients in bf16", clauses=("bf16 reduction",)),
    Need(title="fp16 with loss scaling", clauses=("fp16 overflow",)),
    Need(title="Dropout, also where activations are recomputed", clauses=("dropout", "recomputed dropout")),
)
"""Needs that clauses of the conformance suite decide."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A model, and the GPUs to plan it on."""

    model: ModelSpec
    gpu: Gpu
    num_gpus: int
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class Loop:
    """An example that trains what a plain PyTorch loop trains, with a framework."""

    adapter: str
    """Adapter of the framework, with its ZeRO stage: `deepspeed ZeRO-1`."""
    path: str
    """The script, as a path in the repository."""
    num_statements: int
    """Statements of the script that the plain loop has not."""


def read_loops() -> list[Loop]:
    """Return the examples of examples/loops as `python -m studies.simplest` counted them, the fewest first."""
    loops: list[Loop] = decode(list[Loop], json.loads(LOOPS.read_text(encoding="utf-8")))
    return loops


LOOPS = Path(__file__).with_name("loops.json")
"""The counted examples, which an installed Meshmark has too."""


def _simplest(code: Sequence[Loop]) -> str:
    least = min(loop.num_statements for loop in code)
    best = [loop.adapter for loop in code if loop.num_statements == least]
    because = f"*Counted* in examples: {least} statements are not those of a plain PyTorch loop"
    return _answer("Change the least of a plain PyTorch loop", best, because)


def _code(code: Sequence[Loop], found: Sequence[AdapterColumn], in_reports: bool) -> list[str]:
    """Return the section about simple code: a row an example, and adapters that have none."""
    rows: Rows = [
        {
            "adapter": loop.adapter,
            "statements that are new": loop.num_statements,
            "example": Markup(f"[{Path(loop.path).name}](../{loop.path})") if in_reports else loop.path,
        }
        for loop in code
    ]
    names = {loop.adapter for loop in code}
    rows += [
        {"adapter": title, "statements that are new": "no example"}
        for title in dict.fromkeys(column.title for column in found)
        if title not in names
    ]
    return ["## Change the least of a plain PyTorch loop", _CODE, table(rows, keys=1)]


_CODE = """Each example trains the same model on the same rows as the plain loop, and ends with the same loss on two
ranks (a test runs them). Counted are its statements that the plain loop has not, the heads of blocks among them.
Limits: the authors of this page wrote the examples, as short as they could, for a model of two layers on a CPU.
Saving, resuming, mixed precision, accumulation and launchers are not in them, and a difference of one or two statements
means little. *No example*: none was written, or it does not run on a plain CPU installation."""


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `meshmark which`."""
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folders with records.jsonl, or files: NAME.jsonl.gz, NAME.clauses.jsonl",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="markdown (default: DIR/which.md)")
    parser.add_argument("--model", default="llama-7b", help="model to plan (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs to plan it on (default: %(default)s)")
    parser.add_argument("--gpu", default="a100-40", help="kind of GPU (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences in a step (default: %(default)s)")
    parser.set_defaults(run=_which)


def _which(parsed: argparse.Namespace) -> None:
    clauses = [path for path in parsed.results if path.suffixes[-2:] == [".clauses", ".jsonl"]]
    folders = [path for path in parsed.results if path not in clauses]
    readings = [read_records(folder, latest=True) for folder in folders]
    records = [record for reading in readings for record in reading.records]
    for complaint in (each for reading in readings for each in reading.complaints):
        print(f"meshmark: left out {one_line(complaint)}", file=sys.stderr)
    cluster = Cluster(
        model=plan_model(parsed.model), gpu=gpu(parsed.gpu), num_gpus=parsed.gpus, global_batch=parsed.global_batch
    )
    first = parsed.results[0] if parsed.results[0].is_dir() else parsed.results[0].parent
    output = parsed.output or first / "which.md"
    refuse_page(output, *parsed.results)
    if not parsed.output:
        refuse_strangers(first)
    command = ["meshmark", "which", *map(str, parsed.results)]
    for name in ("output", "model", "gpus", "gpu", "global_batch"):
        if (value := getattr(parsed, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    try:
        write_page(output, which_page(records, cluster, shlex.join(command), [*map(read_conformance, clauses)]))
    except OSError as error:
        raise ResultsError(f"{str(output)!r} cannot be written: {error.strerror}") from error
    print(f"{output}: {pluralize(len(records), 'record')}")


def which_page(
    records: Sequence[Record],
    cluster: Cluster,
    command: str,
    kept: Sequence[Conformance] = (),
    *,
    in_reports: bool = False,
) -> list[str]:
    """Return the page as paragraphs: a list of answers, then the evidence of each, then how it was obtained.

    `kept` are clauses that were judged before, beside those of the records. A page `in_reports` links to the pages
    beside it, as GitHub and the site have them. Elsewhere these pages are only named.

    Raises `InputError` if no record is of a correct case of the matrix.
    """
    correct = [r for r in results(r for r in records if not r.conformance.scenario) if r.correct and r.comparable]
    if not correct:
        raise InputError("no record of a case that trains correctly: run `pytest suites --results DIR` first")
    kept = [*kept, *filter(None, [judged(records)])]
    found = [column for each in kept for column in each.columns if column.base.world_size > 1]
    plans = dict(_plans(cluster))
    answers = [_fits(plans, cluster)]
    answers += _least(correct, _state_bytes, "Fit a larger model into the same memory", "model states a rank")
    answers += [_simplest(code := read_loops())]
    answers += [_kept(need, found) for need in NEEDS if _was_run(need, found)]
    answers += _least(correct, sent_bytes, "Send less over the network", "bytes sent a rank")
    replicas = [r for r in correct if r.case.layout.dp == r.case.world_size]
    answers += _least(replicas, sent_bytes, "Send less, by data parallelism alone", "bytes sent a rank")
    environments = [*(record.environment for record in records), *(each.environment for each in kept)]
    devices = sorted({{"cpu": "CPUs", "cuda": "GPUs"}.get(each.device, each.device) for each in environments})
    parts = ["# Which framework?", _introduction(devices, in_reports), "\n".join(answers)]
    parts += _planned(plans, cluster)
    parts += ["## Memory and traffic, measured", _MEASURED, table(measured_rows(correct), keys=3)]
    parts += _code(code, found, in_reports)
    for need in NEEDS:
        if _was_run(need, found):
            statements = "\n".join(f"- *{name}*: {CLAUSES[name].statement}" for name in need.clauses)
            parts += [f"## {need.title}", statements, _clause_table(need, found)]
    parts += ["## Known defects of the frameworks", _DEFECTS, table(_defect_rows(in_reports), keys=1)]
    return [*parts, *_origin(environments, command)]


def _introduction(devices: Sequence[str], in_reports: bool) -> str:
    """Return what *measured*, on `devices`, and *planned* mean, with links where the pages are beside this one."""

    def page(words: str, path: str) -> str:
        return f"[{words}]({path})" if in_reports else words

    return (
        f"*Measured*: trained by the suites on {' and '.join(map(inline, devices))}, and equal to float64. "
        f"*Planned*: computed for GPUs that were not at hand, speed with its interval and memory without one; "
        f"{page('published runs', 'validation.md')} show how far both may be off. "
        f"What frameworks get wrong is {page('listed with scripts that show it', 'gaps.md')} (`meshmark gaps`). "
        f"{page('The glossary', '../docs/glossary.md')} explains names of layouts such as `dp4.zero3.mb2`."
    )


_MEASURED = """Bytes do not depend on the machine. *Model states* are parameters, gradients and optimizer states of the
fullest rank; *sent* is what a rank hands to its links in one step. In brackets is the share of what DDP has on as many
ranks with the same model. Activations, which grow with the batch, are in the peak alone."""


_DEFECTS = """Each has a script that shows it without Meshmark. A framework that more adapters use was looked at more:
a small number does not mean few defects. *Fails a clause*: so many make an adapter fail a clause of conformance,
some of them an adapter for an option, which stands in the roster alone."""


def _defect_rows(in_reports: bool) -> Rows:
    """Return a row per framework, the one with most known defects first, with links if the page of gaps is beside."""
    failed = failed_clauses()
    by_framework: dict[str, list[Reproducer]] = {}
    for each in read_reproducers():
        by_framework.setdefault(each.framework, []).append(each)
    return [
        {
            "framework": f"{name} {own[0].versions[name]}",
            "known defects": Markup(f"[{len(own)}](gaps.md#{own[0].name})") if in_reports else len(own),
            "fails a clause": sum(bool(failed.get(each.name)) for each in own),
            "reported upstream": sum(bool(each.upstream) for each in own),
        }
        for name, own in sorted(by_framework.items(), key=lambda pair: -len(pair[1]))
    ]


Measure = Callable[[Record], float]


def _state_bytes(record: Record) -> float:
    """Return the bytes of model states on the fullest rank."""
    return fullest_states(record.memory.readings)


def _peak_bytes(record: Record) -> float:
    """Return the highest peak of any rank."""
    return max(reading.peak.total for reading in record.memory.readings)


def _shares(found: Sequence[CaseResult], measure: Measure) -> dict[str, float]:
    """Return each case's share of what DDP needs on as many ranks with the same model, by case id.

    Contains only cases on several ranks.
    """
    observed = [r.observed for r in found if r.observed and r.observed.memory.readings and r.case.world_size > 1]
    ddp = {
        (record.case.workload.name, record.case.world_size): measure(record)
        for record in observed
        if record.case.adapter == "ddp"
    }
    bases = {record.case.id: ddp.get((record.case.workload.name, record.case.world_size)) for record in observed}
    return {record.case.id: measure(record) / base for record in observed if (base := bases[record.case.id])}


def measured_rows(found: Sequence[CaseResult]) -> Rows:
    """Return memory and traffic of correct cases on several ranks, the smallest states of each number of ranks first.

    Cases without a DDP run of the same model on as many ranks are left out.
    """
    measures = {"model states / rank": _state_bytes, "peak / rank": _peak_bytes, "sent / rank": sent_bytes}
    shares = {name: _shares(found, measure) for name, measure in measures.items()}
    rows = []
    for result in found:
        record = result.observed
        if record is None or not result.correct or result.case.id not in shares["model states / rank"]:
            continue
        row: dict[str, object] = {
            "adapter": result.case.adapter,
            "layout": result.case.layout.id,
            "ranks": result.case.world_size,
        }
        for name, measure in measures.items():
            size, share = bytes_cell(measure(record)), shares[name].get(result.case.id)
            text = size.text if share is None else f"{size.text} ({100 * share:.0f} %)"
            row[name] = dataclasses.replace(size, text=text)
        rows.append((result.case.world_size, shares["model states / rank"][result.case.id], row))
    return [row for _, _, row in sorted(rows, key=lambda one: one[:2])]


def _least(found: Sequence[CaseResult], measure: Measure, need: str, what: str) -> Iterator[str]:
    """Yield the answer that a measure decides, for the largest number of ranks measured."""
    of_ddp = _shares(found, measure)
    shares = {r.case.id: (share, r.case) for r in found if (share := of_ddp.get(r.case.id))}
    if not shares:
        return
    most = max(case.world_size for _, case in shares.values())
    share, _ = min((pair for pair in shares.values() if pair[1].world_size == most), key=lambda pair: pair[0])
    best = [case for other, case in shares.values() if case.world_size == most and other <= 1.01 * share]
    because = f"*Measured*: {what} are {100 * share:.0f} % of DDP's on {most} ranks"
    yield _answer(need, [f"{case.adapter} {case.layout.id}" for case in best], because)


def _plans(cluster: Cluster) -> Iterator[tuple[str, Search | str]]:
    """Yield the best layouts of every planned framework, or why none fits."""
    for name in PLANNED:
        of = framework(name)
        using = of.recipe_on(cluster.gpu, cluster.model.family)
        space = SearchSpace(
            num_gpus=cluster.num_gpus,
            global_batch=cluster.global_batch,
            axes=of.axes,
            zero_stages=of.zero_stages,
        )
        rates = rates_for(cluster.gpu, stack_of(using.name))
        try:
            yield name, simulate_first(search(cluster.model, space, cluster.gpu, using, rates), _SEARCHED)
        except NothingFitsError as error:
            yield name, str(error)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """The best layout of a framework on the cluster."""

    name: str
    layout: str
    num_axes: int
    """Number of ways of parallelism that the layout combines."""
    memory_bytes: float
    tokens_per_second: float
    """Tokens a second on one GPU."""
    interval: tuple[float, float] | None
    """Tokens a second within which nine runs in ten lie. None if the planner knows no interval."""

    def meets(self, other: _Planned) -> bool:
        """Return whether the intervals of two plans overlap, so that neither is known to be faster."""
        if self.interval is None or other.interval is None:
            return self.tokens_per_second == other.tokens_per_second
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


def _best(name: str, plan: Search, cluster: Cluster) -> _Planned:
    row, predicted = int(plan.ranked[0]), plan.prediction
    layout, interval = predicted.grid.layout(row), predicted.step_seconds_interval
    tokens = cluster.global_batch * cluster.model.seq_len / cluster.num_gpus
    return _Planned(
        name=name,
        layout=layout.id,
        num_axes=sum(degree > 1 for degree in (layout.dp, layout.tp, layout.pp, layout.cp)),
        memory_bytes=float(predicted.memory_bytes[row]),
        tokens_per_second=float(predicted.tokens_per_second_per_gpu[row]),
        interval=(tokens / float(interval[1][row]), tokens / float(interval[0][row])) if interval else None,
    )


def _ranked(plans: Mapping[str, Search | str], cluster: Cluster) -> tuple[list[_Planned], list[_Planned]]:
    """Return the frameworks whose speed cannot be told from the fastest one's, and the others.

    Of those that tie, the layout with the fewest ways of parallelism comes first, then the one with least memory. The
    others are sorted by speed.
    """
    fitting = [_best(name, plan, cluster) for name, plan in plans.items() if isinstance(plan, Search)]
    fitting.sort(key=lambda each: -each.tokens_per_second)
    tied = [each for each in fitting if each.meets(fitting[0])]
    slower = [each for each in fitting if not each.meets(fitting[0])]
    return sorted(tied, key=lambda each: (each.num_axes, each.memory_bytes)), slower


def _answer(need: str, take: Sequence[str], because: str) -> str:
    return f"- **{need}**: {', '.join(map(inline, take)) or 'none'}. {because}."


def _fits(plans: Mapping[str, Search | str], cluster: Cluster) -> str:
    """Return the answer about the cluster."""
    need = f"Train {cluster.model.name} on {cluster.num_gpus} {cluster.gpu.name}"
    tied, _ = _ranked(plans, cluster)
    if not tied:
        return _answer(need, [], "*Planned*: no layout of these frameworks fits")
    speeds, memory = [each.tokens_per_second for each in tied], [each.memory_bytes / GIB for each in tied]
    because = f"*Planned*: {_span(speeds, ',.0f')} tokens/s a GPU in {_span(memory, '.1f')} GiB"
    if len(tied) > 1:
        because += "; their intervals overlap, so that none is known to be faster; the simplest layout comes first"
    return _answer(need, [f"{each.name} {each.layout}" for each in tied], because)


def _span(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest value, or one of them where they read the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _planned(plans: Mapping[str, Search | str], cluster: Cluster) -> list[str]:
    """Return the section about the cluster: the best layout of each framework, and why others have none."""
    tied, slower = _ranked(plans, cluster)
    fastest = max((each.tokens_per_second for each in tied), default=0.0)
    rows: Rows = [
        {
            "framework": each.name,
            "layout": each.layout,
            "memory, GiB": Cell(text=f"{each.memory_bytes / GIB:.1f}"),
            "tokens/s a GPU": Cell(text=f"{each.tokens_per_second:,.0f}"),
            "nine runs in ten": "not known" if each.interval is None else "{:,.0f} to {:,.0f}".format(*each.interval),
            "speed": "within noise of the fastest"
            if each in tied
            else f"{100 * (1 - each.tokens_per_second / fastest):.0f} % slower",
        }
        for each in (*tied, *slower)
    ]
    reasons = [f"- {name}: {inline(plan)}" for name, plan in plans.items() if isinstance(plan, str)]
    rows += [{"framework": name, "layout": "none fits"} for name, plan in plans.items() if isinstance(plan, str)]
    title = f"## {cluster.model.name} on {cluster.num_gpus} {cluster.gpu.name}, planned"
    about = (
        f"The fastest layout of each framework that fits {cluster.gpu.memory_bytes / GIB:.0f} GiB, of all that it has, "
        f"with {cluster.global_batch} sequences of {cluster.model.seq_len:,} tokens in a step. *Within noise*: its "
        "interval overlaps the fastest one's; of these the simplest layout comes first. `meshmark plan --model "
        f"{cluster.model.name} --gpus {cluster.num_gpus} --gpu {cluster.gpu.name}` prints more of them."
    )
    return [title, about, table(rows, keys=1), *(["\n".join(reasons)] if reasons else [])]


_WORDS = {
    ClauseResult.PASS: "yes",
    ClauseResult.FAIL: "**no**",
    ClauseResult.KNOWN_GAP: "gap",
    ClauseResult.STALE_GAP: "yes",
    ClauseResult.UNSUPPORTED: "–",
    ClauseResult.UNDECIDED: "too slow",
    ClauseResult.TOLD: "reported",
}


def _results(need: Need, column: AdapterColumn) -> list[ClauseResult]:
    """Return the results of those clauses of a need that were checked for an adapter."""
    return [column.findings[name].result for name in need.clauses if name in column.findings]


def _was_run(need: Need, found: Iterable[AdapterColumn]) -> bool:
    return any(_results(need, column) for column in found)


def _keeps(need: Need, column: AdapterColumn) -> bool:
    """Return whether every clause of a need was checked for an adapter, and holds."""
    asked = _results(need, column)
    return len(asked) == len(need.clauses) and all(result is ClauseResult.PASS for result in asked)


def _kept(need: Need, found: Sequence[AdapterColumn]) -> str:
    """Return the answer that clauses decide: which adapters keep them, which fail one, and which lack an answer."""
    asked = [column for column in found if _results(need, column)]
    kept = [column for column in asked if _keeps(need, column)]
    others = [column for column in asked if not _keeps(need, column)]
    broken = [c for c in others if {ClauseResult.FAIL, ClauseResult.KNOWN_GAP} & set(_results(need, c))]
    silent = [column for column in others if column not in broken]
    because = f"*Measured* by the clause{'s' * (len(need.clauses) > 1)} {', '.join(need.clauses)}"
    if of := _bitwise(need, kept):
        because += f". {of}"
    if broken:
        because += f". A clause fails in {', '.join(map(inline, _listed(broken)))}"
    if silent:
        because += f". Not supported, or not judged, in {', '.join(map(inline, _listed(silent)))}"
    take = _listed(kept)
    if not others:
        take[0] = f"all {len(kept)} that run on several ranks: {take[0]}"
    return _answer(need.title, take, because)


def _bitwise(need: Need, kept: Sequence[AdapterColumn]) -> str:
    """Return how many adapters go on bit for bit after a resume; empty for needs that are not about that."""
    evidence = [column.findings[name].evidence for column in kept for name in need.clauses]
    same = sum(text.startswith("bitwise equal to a run that never stopped") for text in evidence)
    if not any("bitwise equal to a run that never stopped" in text for text in evidence):
        return ""
    if same == len(evidence):
        return "Bit for bit equal to a run that never stopped: all"
    return (
        f"Bit for bit equal to a run that never stopped: {same}; the others are equal within rounding noise, for they "
        "add up in another order"
    )


def _listed(columns: Sequence[AdapterColumn]) -> list[str]:
    """Return the adapters' names, those of one adapter together: `deepspeed ZeRO-1/2/3`."""
    titles: dict[str, list[str]] = {}
    for column in columns:
        name, _, stage = column.title.partition(" ZeRO-")
        titles.setdefault(name, []).append(stage)
    return [f"{name} ZeRO-{'/'.join(stages)}" if any(stages) else name for name, stages in titles.items()]


def _clause_table(need: Need, found: Sequence[AdapterColumn]) -> str:
    """Return a table with a row per adapter, those with the most passing clauses first, with reasons for failures.

    Where every adapter keeps every clause, a sentence says so.
    """
    asked = [column for column in found if _results(need, column)]
    if all(_keeps(need, column) for column in asked):
        return f"All {len(asked)} rows of the conformance table with several ranks: {', '.join(_listed(asked))}."
    rows = []
    for column in asked:
        results = _results(need, column)
        findings = {name: column.findings[name] for name in need.clauses if name in column.findings}
        failed = [finding.evidence for finding in findings.values() if finding.result is not ClauseResult.PASS]
        row: dict[str, object] = {"adapter": column.title, "layout": column.base.layout.id}
        row |= {name: _WORDS[finding.result] for name, finding in findings.items()}
        rows.append((-results.count(ClauseResult.PASS), {**row, "why not": "; ".join(dict.fromkeys(failed))}))
    return table([row for _, row in sorted(rows, key=lambda one: one[0])], keys=1)


def _origin(environments: Sequence[Environment], command: str) -> list[str]:
    environment = max(environments, key=lambda each: each.date)
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    commits = sorted({each.commit or "unknown" for each in environments})
    return [
        "## How it was obtained",
        block(command),
        inline(
            f"From records on {environment.machine}, {environment.num_cpus} CPUs, "
            f"of commit {', '.join(commits)}. {versions}."
        ),
    ]
