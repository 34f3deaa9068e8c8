"""The page of a model of the size that people run: its verdicts, and what each took."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from meshmark.judge.deviation import unsampled
from meshmark.models.module import parameter_shapes
from meshmark.records.record import Record
from meshmark.report.table import Rows, bytes_text, inline, table
from meshmark.text import pluralize

_NOTES = """Every case is judged by a sample ([reading.md](../docs/reading.md)): every tensor of the steps that *judged*
names, by the noise of so many runs. *smallest detectable error*: the smallest relative error of a gradient that this
verdict would have caught. *beside*: the most memory that bringing tensors together took on any rank beside what the
engine held, told also in largest tensors of the model; it is to be two. What is sharded unevenly and gathered by gloo
takes half of one more: the padded part, the whole, and gloo's copy of it. **broken** engines are wrong on purpose: *no*
is right.

*Seconds* and *CPU seconds* are of all an adapter's processes, imports among them; *launches* are its cases alone, as
their records tell. What lies between is above all the noise, measured once for each number of micro-batches.
*Peak*: of all its processes together, pages that they share counted once. *Load*: processes that wanted a core at the
same time, in the mean, where an adapter's own are some two: others' work on the machine lengthens seconds, and nothing
else."""


class Cost(Protocol):
    """Cost of an adapter's run."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    load: float


def page(
    records: Sequence[Record],
    costs: Mapping[str, Cost],
    adapters: Mapping[str, bool],
    gaps: Mapping[str, str],
    made_on: str,
) -> str:
    """Markdown; `adapters`: those that are to be here, and whether each is wrong on purpose; `gaps`: why others are
    known to be; `made_on`: the machine."""
    count = Counter(record.environment.commit for record in records)
    commits = (
        ", ".join(f"{pluralize(number, 'record')} at {commit}" for commit, number in count.items()) or "no records"
    )
    missing = [inline(name) for name in adapters if name not in {record.case.adapter for record in records}]
    models = sorted({_model(record) for record in records})
    parts = [
        "# At the size that people run",
        f"Made by `make size` on {inline(made_on)}, of {commits}: {'; '.join(models)}.",
        table([_verdict(record, adapters.get(record.case.adapter, False)) for record in records]) or "Nothing was run.",
        "\n".join(f"- **Known gap** of {inline(name)}: {reason}." for name, reason in gaps.items()),
        f"**Not run, so not judged:** {', '.join(missing)}." if missing else "",
        table(_took(records, costs)),
        _NOTES,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _model(record: Record) -> str:
    workload = record.case.workload
    size = f"{workload.model.num_parameters / 1e6:.0f} million parameters"
    return f"{inline(workload.name)}, {size}, {workload.global_batch} x {workload.model.seq_len} tokens a step"


def _verdict(record: Record, broken: bool) -> dict[str, object]:
    found, verdict = record.equivalence, record.verdict("equivalence")
    correct = "not judged" if verdict is None else "cannot tell" if verdict.undecided else "no"
    correct = "yes (sampled)" if verdict and verdict.passed else correct
    why = verdict.summary if verdict else f"{record.outcome.status}: {record.outcome.message or unsampled(record.case)}"
    limit = verdict.evidence.get("detection_limit") if verdict else None
    most = max(found.gathering_bytes, default=None)
    return {
        "adapter": f"{inline(record.case.adapter)}{' (**broken**)' if broken else ''}",
        "layout": record.case.layout.id,
        "correct": correct,
        "judged": found.sample.text if verdict and found.sample else "–",
        "smallest detectable error": f"{limit:.2g}" if isinstance(limit, float) else "–",
        "seconds": f"{record.launch.seconds:.0f}",
        "beside": "–" if most is None else f"{bytes_text(most)} ({most / _largest_bytes(record):.1f})",
        "why": inline(f"{found.diagnosis.fault}: {why}" if found.diagnosis else why, 160),
    }


def _largest_bytes(record: Record) -> int:
    """Return the bytes of the model's largest tensor, in the precision of its masters."""
    shapes = parameter_shapes(record.case.workload.model).values()
    return max(map(math.prod, shapes)) * record.case.precision.master.itemsize


def _took(records: Sequence[Record], costs: Mapping[str, Cost]) -> Rows:
    return [
        {
            "adapter": inline(name),
            "seconds": f"{cost.seconds:.0f}",
            "launches": f"{sum(r.launch.seconds for r in records if r.case.adapter == name):.0f}",
            "CPU seconds": f"{cost.cpu_seconds:.0f}" if cost.cpu_seconds else "–",
            "peak": bytes_text(cost.peak_bytes),
            "load": f"{cost.load:.1f}" if cost.load else "–",
        }
        for name, cost in costs.items()
    ]
