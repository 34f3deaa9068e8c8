"""Architectures of Hugging Face Transformers under four frameworks: reports/architectures.md.

`make architectures` trains every config of examples/transformers on two ranks, from random weights, and judges
equivalence, memory and communication by the suites.

    python -m studies.architectures               # runs the suites, then writes the page
    python -m studies.architectures --page-only   # writes the page from the records that are there
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.report.kept_page import keep_page
from meshmark.report.results import CaseResult, newest, results
from meshmark.report.table import Markup, inline
from meshmark.report.table import table as markdown
from meshmark.spec.own_model import OwnModelConfig
from meshmark.text import clip

FOLDER = Path("examples/transformers")
PAGE, RESULTS = Path("reports/architectures.md"), Path("results/architectures")
SUITES = ("equivalence", "memory", "communication")
ADAPTERS = ("ddp", "fsdp2", "deepspeed", "accelerate", "accelerate-fsdp2")
LAYOUTS = "dp2.mb2,dp2.zero3.mb2"
HEADS = {
    "bert": "AutoModelForMaskedLM",
    "clip": "AutoModelForZeroShotImageClassification",
    "resnet": "AutoModelForImageClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Those that are no causal language models, by the name of the config."""


def targets() -> list[str]:
    """Return the workloads, one a config."""
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    return [f"hf:{FOLDER / name}.json" + (f":{HEADS[name]}" if name in HEADS else "") for name in names]


def run() -> int:
    """Run the three suites over all targets, and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark"]
    command += [f"suites/test_{suite}.py" for suite in SUITES]
    command += ["--workload", ",".join(targets()), "--adapters", ",".join(ADAPTERS), "--layouts", LAYOUTS]
    return subprocess.run([*command, "--results", str(RESULTS)], check=False).returncode


def page(records: Sequence[Record]) -> str:
    """Return the page of what the records say."""
    every = results(records)
    found = [result for result in every if not result.skipped]
    refused = _refused(every, found)
    by_model: dict[str, dict[str, CaseResult]] = {}
    for result in (*found, *refused):
        by_model.setdefault(result.case.workload.name, {})[result.case.adapter] = result
    adapters = list(dict.fromkeys(result.case.adapter for result in found))
    rows: list[dict[str, object]] = []
    for own in by_model.values():
        model = next(iter(own.values())).case.workload.model
        assert isinstance(model, OwnModelConfig)
        path, _, head = model.target.removeprefix("hf:").partition(".json")
        rows.append(
            {
                "config": Markup(f"[{inline(Path(path).name)}](../{path}.json)"),
                "head": head.removeprefix(":") or "AutoModelForCausalLM",
                "parameters": f"{model.num_parameters:,}",
                "blocks": model.num_layers,
                **{name: _cell(own[name]) if name in own else "not run" for name in adapters},
            }
        )
    cells = Counter(_cell(result) for result in found)
    right = cells["yes"]
    why = [line for result in (*found, *refused) for line in _why(result)]
    beyond = list(dict.fromkeys(line for result in found for line in _beyond(result)))
    environment = newest(records).environment
    versions = ", ".join(f"{name} {number}" for name, number in sorted(environment.versions.items()))
    return f"""# Architectures

Models of Hugging Face Transformers, by its own modelling code, trained from random weights on two ranks with two
micro-batches each, in float32. Made by `make architectures` at commit {environment.commit} on {environment.machine}.

**{right} of {len(found)} cells are right in all three suites**: every gradient and update against the same module in
float64 (equivalence), the bytes of parameters, gradients, optimizer states and activations (memory), and every
collective (communication). A cell that is not says what differs, below.

{markdown(rows)}

## What differs

{chr(10).join(why) or "Nothing."}

## What is declared beyond the closed form

{chr(10).join(beyond) or "Nothing."}

What a framework does so is proved without Meshmark in [adapters/gaps](../adapters/gaps), listed in [gaps.md](gaps.md).

## How it was obtained

- Layouts: {LAYOUTS}. DDP and Accelerate keep whole replicas; FSDP2, Accelerate's FSDP2 and DeepSpeed run ZeRO-3.
- The smallest error of a gradient that would have been seen: {detection_range(found)} of its norm.
- Activations are counted in one plain process, by PyTorch's hooks on saved tensors, under each case's micro-batch.
- Versions: {versions}.
"""


def _cell(result: CaseResult) -> str:
    """Return *yes*, or the suites that failed; a dash for what the framework cannot train."""
    if result.skipped:
        return "–"
    record = result.observed
    if record is None or result.failed:
        return f"**{result.correctness.text}**"
    wrong = [name for name in SUITES if (verdict := record.verdict(name)) is None or not verdict.passed]
    return f"**{', '.join(wrong)}**" if wrong else "yes"


def _why(result: CaseResult) -> list[str]:
    record = result.observed
    if record is None:
        return []
    if result.skipped:
        return [f"- {result.case.workload.name}: {inline(record.outcome.message)}"]
    case = f"{result.case.workload.name} under {result.case.adapter}"
    if result.failed:
        first = result.failed.outcome.message.partition("\n")[0]  # what follows names files of this machine
        return [f"- {case}: {inline(clip(first, 300))}"]
    return [f"- {case}, {v.suite}: {inline(v.summary)}" for v in record.verdicts if not v.passed]


def _refused(every: Sequence[CaseResult], found: Sequence[CaseResult]) -> list[CaseResult]:
    """Return a result of every model that an adapter refuses in all layouts: in one that it runs other models in."""
    ran = {(result.case.workload.name, result.case.adapter) for result in found}
    runs = {(result.case.adapter, result.case.layout) for result in found}
    refused = {
        (result.case.workload.name, result.case.adapter): result
        for result in every
        if (result.case.adapter, result.case.layout) in runs
    }
    return [result for key, result in refused.items() if key not in ran]


def _beyond(result: CaseResult) -> list[str]:
    """Return what an adapter declares of activations: states and messages are as of any model."""
    declared = [each for own in (result.observed.memory.extra_memory if result.observed else []) for each in own]
    name, adapter = result.case.workload.name, result.case.adapter
    return [
        f"- {name} under {adapter}: {each.num_bytes:,.0f} bytes of activations a rank: {inline(each.reason)}"
        for each in declared
        if each.category == "activations"
    ]


def detection_range(found: Sequence[CaseResult]) -> str:
    """Return the smallest and the largest detection limit of the cases, as a text."""
    limits = [
        float(verdict.evidence["detection_limit"])
        for result in found
        if result.observed and (verdict := result.observed.verdict("equivalence"))
    ]
    return f"{min(limits):.1e} to {max(limits):.1e}" if limits else "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.architectures", description=__doc__.partition("\n")[0])
    parser.add_argument("--page-only", action="store_true", help="write the page from the records that are there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    parsed = parser.parse_args(arguments)
    status = 0 if parsed.page_only else run()
    keep_page(page(read_records(parsed.results, latest=True).records), parsed.output)
    return status


if __name__ == "__main__":
    sys.exit(main())
