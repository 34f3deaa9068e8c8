"""The objective that trainers which own their loop really optimise: reports/trainers.md.

`make trainers` runs every adapter of a loop on two ranks, with two micro-batches and rows of unequal length, and judges
it by the suites and by the clauses on checkpoints.

    python -m studies.trainers               # runs the suites, then writes the page
    python -m studies.trainers --page-only   # writes the page from the records that are there
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshmark.adapter.loop import GREENLET
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.finding import ClauseResult
from meshmark.judge.faults import Diagnosis, Fault
from meshmark.models.transformer import Family
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.report.conformance import AdapterColumn, columns
from meshmark.report.results import CaseResult, newest, results
from meshmark.report.table import inline
from meshmark.report.table import table as markdown
from meshmark.text import clip, pluralize
from studies.adapter_list import summary
from studies.architectures import detection_range

PAGE, RESULTS = Path("reports/trainers.md"), Path("results/trainers")
MODELS = (
    "hf:examples/transformers/llama.json",
    "hf:examples/transformers/gpt2.json",
    "hf:examples/transformers/bert.json:AutoModelForMaskedLM",
    "hf:examples/transformers/t5.json:AutoModelForSeq2SeqLM",
)
"""Trained by adapters of models of Transformers alone; of these, TRL takes the causal ones."""
OF_TRANSFORMERS = ("hf-trainer-model-loss", "trl-sft")
WORKLOADS = ("gpt-mini", "llama-mini")
"""A GPT, and a LLaMA for trainers that bring one of their own."""
LAYOUTS = "dp2.mb2,dp2.zero2.mb2,dp2.zero3.mb2,tp2.mb2,pp2.1f1b.mb2"
SUITES = ("equivalence", "memory", "communication")
RESUMES = "resume"


def adapters() -> list[str]:
    """Return the names of all adapters of loops."""
    return [name for name, target in builtin_adapters().items() if GREENLET in load_adapter(target).requires]


def run(chosen: Sequence[str], folder: Path) -> None:
    """Run the suites and the clause on resuming over the `chosen` adapters, with records in `folder`."""
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "--results", str(folder)]
    suites = [*(f"suites/test_{suite}.py" for suite in SUITES), "--layouts", LAYOUTS]
    for workload in WORKLOADS:
        if others := [name for name in chosen if name not in OF_TRANSFORMERS and _workload(name) == workload]:
            named = ["--adapters", ",".join(others)]
            subprocess.run([*base, *named, *suites, "--workload", workload], check=False)
            subprocess.run([*base, *named, "suites/test_conformance.py", "-k", RESUMES], check=False)
    if models := [name for name in chosen if name in OF_TRANSFORMERS]:
        named = ["--adapters", ",".join(models), "--workload", ",".join(MODELS)]
        subprocess.run([*base, *named, *suites], check=False)


def _workload(name: str) -> str:
    """Return what an adapter is judged on: the GPT, unless it trains a LLaMA alone."""
    return WORKLOADS[Family.GPT not in load_adapter(builtin_adapters()[name]).capabilities.families]


def page(records: Sequence[Record], clauses: Sequence[AdapterColumn]) -> str:
    """Return the page of what the records and the judged clauses say."""
    every = [result for result in results([r for r in records if not r.conformance.scenario]) if not result.skipped]
    rows = [_row(result, clauses) for result in sorted(every, key=lambda result: adapters().index(result.case.adapter))]
    rows.sort(key=lambda row: row["optimises"] != _RIGHT)
    environment = newest(records).environment
    right = sum(row["optimises"] == _RIGHT for row in rows)
    kinds = [
        f"- **{name}**: {inline(summary(load_adapter(builtin_adapters()[name])))}"
        for name in adapters()
        if any(result.case.adapter == name for result in every)
    ]
    return f"""# What your trainer really optimises

Trainers that own their loop, built by their own arguments, run by themselves, and stopped where gradients are complete
and where a step is done. Made by `make trainers` at commit {environment.commit} on {environment.machine}: two ranks,
two micro-batches each, rows of unequal length, in float32.

**{right} of {len(rows)} optimise the mean over all tokens of the global batch**, with the optimizer that they were
asked for. What the others do instead is in the table; it is what they do by the arguments that they have here.
`hf-trainer` is `transformers.Trainer`, `lightning-trainer` is `lightning.Trainer`, `trl-sft` is TRL's `SFTTrainer`,
`torchtitan` is torchtitan's own Trainer.

By default:

{_defaults(every, clauses)}

{markdown(rows)}

## What each is

{chr(10).join(kinds)}

## How it was obtained

- *optimises*: every gradient and update of five steps is held against one process in float64. What fails is explained
  by the fault that would look like it. The smallest error of a gradient that would have been seen is
  {detection_range(every)} of its norm.
- *memory and traffic*: bytes by category and collectives by group, against theory and what the adapter declares.
- *resumes*: half of the steps, a checkpoint by the trainer's own means, and the other half in new processes are one
  run.
- Versions: {_versions(records)}.
"""


def _versions(records: Sequence[Record]) -> str:
    """Return the versions of packages, and of each further environment those that differ."""
    found: dict[str, dict[str, str]] = {}
    for record in records:
        versions = dict(record.environment.versions)
        found.setdefault(versions.pop(_ENVIRONMENT, ""), {}).update(versions)
    own = found.pop("", {})
    told = [", ".join(f"{name} {number}" for name, number in sorted(own.items()))]
    for environment, versions in sorted(found.items()):
        other = [f"{name} {number}" for name, number in sorted(versions.items()) if own.get(name) != number]
        told.append(f"in the environment {environment} {', '.join(other)}")
    return "; ".join(filter(None, told))


_ENVIRONMENT = "virtual environment"
"""Key under which a record's versions tell of another environment than Meshmark's own."""


_RIGHT = "the mean over all tokens"
DEFAULTS = {
    "hf-trainer-recommended": "`transformers.Trainer` with a loss over `num_items_in_batch`, and its own optimizer",
    "hf-trainer-model-loss": "`transformers.Trainer` with the loss that the model computes",
    "lightning-trainer-recommended": "`lightning.Trainer` with a `training_step` as its examples write it",
    "trl-sft": "TRL's `SFTTrainer` on tokenized rows, in float32",
    "torchtitan": "torchtitan's Trainer, in float32",
    "accelerate-loop": "Accelerate's loop as its guide writes it",
    "accelerate-loop-recommended": "Accelerate's loop as its example writes it",
}
"""Descriptions of what a user gets who follows the trainer's own examples, by the adapter that runs it."""
_CELL = 1000
"""Characters of a cell. Long ones become notes below the table."""
_SAME_BITS = "bitwise equal"
"""How the clause's evidence starts where both halves are one run."""


def _defaults(every: Sequence[CaseResult], clauses: Sequence[AdapterColumn]) -> str:
    """Return a line for each trainer as its own examples have it: what it optimises, by model where models differ."""
    lines = []
    for name, what in DEFAULTS.items():
        models: dict[str, list[str]] = {}
        own = [result for result in every if result.case.adapter == name]
        for result in own:
            models.setdefault(_default(result), []).append(result.case.workload.name.partition(".")[0])
        if own:
            said = [text if len(models) == 1 else f"{text} ({', '.join(names)})" for text, names in models.items()]
            inexact = any(_resumes(result, clauses) not in ("yes", "–") for result in own)
            lines.append(f"- {what}: {'; '.join(said)}.{' It does not resume exactly.' if inexact else ''}")
    return "\n".join(lines)


def _default(result: CaseResult) -> str:
    """Return what a run optimises in a sentence. An update is at fault only where every gradient is right."""
    equivalence = result.observed.verdict("equivalence") if result.observed else None
    if result.observed is None or equivalence is None:
        return inline(result.correctness.text)
    diagnosis = result.observed.equivalence.diagnosis
    if equivalence.passed:
        return _RIGHT
    if diagnosis is None:
        return "not judged"
    if diagnosis.fault is Fault.UPDATE:
        return f"{_RIGHT}, but by **{inline(_wrong(diagnosis))}**"
    detail = re.split("(?:; )?weights of the ", diagnosis.detail)[0]  # numbers of this batch, which the table has
    return f"**{inline(f'{diagnosis.fault}: {detail}' if detail else str(diagnosis.fault))}**"


def _row(result: CaseResult, clauses: Sequence[AdapterColumn]) -> dict[str, object]:
    record = result.observed
    workload = result.case.workload.name.partition(".")[0]
    row: dict[str, object] = {"trainer": result.case.adapter, "model": workload, "layout": result.case.layout.id}
    if record is None or result.failed:
        return {**row, "optimises": f"**{inline(result.correctness.text)}**"}
    equivalence = record.verdict("equivalence")
    right = equivalence is not None and equivalence.passed
    return {
        **row,
        "optimises": _RIGHT if right else f"**{inline(clip(_wrong(record.equivalence.diagnosis), _CELL))}**",
        "memory and traffic": _as_planned(record),
        "resumes": _resumes(result, clauses),
    }


def _as_planned(record: Record) -> str:
    """Return which of memory and traffic differs from its plan, or has none."""
    verdicts = {name: record.verdict(name) for name in ("memory", "communication")}
    if other := [name for name, verdict in verdicts.items() if verdict is not None and not verdict.passed]:
        return f"**not as planned: {', '.join(other)}**"
    unplanned = [name for name, verdict in verdicts.items() if verdict is None]
    return f"as planned; no plan of {', '.join(unplanned)}" if unplanned else "as planned"


def _wrong(diagnosis: Diagnosis | None) -> str:
    """Return what a run does instead; of an update rule, with the parameters that it is of."""
    if diagnosis is None:
        return "not judged"
    text = f"{diagnosis.fault}: {diagnosis.detail}" if diagnosis.detail else str(diagnosis.fault)
    if diagnosis.fault is not Fault.UPDATE or not diagnosis.names:
        return text
    return f"{text}, on {pluralize(diagnosis.num_names, 'parameter')} such as {diagnosis.names[0]}"


def _resumes(result: CaseResult, clauses: Sequence[AdapterColumn]) -> str:
    """Return the finding of the clause for this trainer and ZeRO stage."""
    case = result.case
    bases = [c for c in clauses if (c.base.adapter, c.base.layout.zero_stage) == (case.adapter, case.layout.zero_stage)]
    found = next((c.findings[RESUMES] for c in bases if RESUMES in c.findings), None)
    if found is None or found.result is ClauseResult.UNSUPPORTED:
        return "–"
    same = found.evidence.startswith(_SAME_BITS)  # which is what resuming is about, whatever it trains
    return "yes" if same or found.result is ClauseResult.PASS else f"**{inline(clip(found.evidence, _CELL))}**"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.trainers", description=__doc__.partition("\n")[0])
    parser.add_argument("--page-only", action="store_true", help="write the page from the records that are there")
    parser.add_argument("--adapters", default="", metavar="NAMES", help="run these alone (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    parsed = parser.parse_args(arguments)
    if not parsed.page_only:
        chosen = parsed.adapters.split(",") if parsed.adapters else adapters()
        run(chosen, parsed.results)  # what fails is what the page tells of
    records = read_records(parsed.results, latest=True).records
    parsed.output.write_text(page(records, columns(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
