"""Engines that generate text, judged: reports/inference.md.

python -m studies.inference               # runs the suite and times the engines, then writes the page
python -m studies.inference --speed       # times the engines in alternation, then writes the page
python -m studies.inference --page-only   # writes the page from the committed records
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshmark.adapter.registry import inference_adapters
from meshmark.inference.judge import FACTOR
from meshmark.inference.model import PRECISIONS
from meshmark.inference.process import load_engine
from meshmark.inference.run import InferenceRecord, read_inference
from meshmark.inference.speed import BASE, LOAD, EngineSpeed, ratios, read_speeds
from meshmark.inference.waste import LIMIT, MEAN_NEW, MEAN_PROMPT, NUM_REQUESTS, Sharing, Waste
from meshmark.report.inference import inference_page
from meshmark.report.table import table as markdown

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "reports" / "inference.md", ROOT / "results" / "inference"
KEPT = ROOT / "reports" / "records" / "inference.jsonl"
MUTANTS = ROOT / "reports" / "records" / "inference-mutants.jsonl"
"""Records of `make inference-power`, as the next two."""
WASTE = ROOT / "reports" / "records" / "inference-waste.jsonl"
SPEEDS = ROOT / "reports" / "records" / "inference-speed.jsonl"
"""Speeds that `time_engines` measured."""
ALARMS = ROOT / "reports" / "records" / "inference-alarms.jsonl"


def run() -> bool:
    """Run the suite over all engines, and keep its records. Return whether all are right."""
    records = RESULTS / "records.jsonl"
    records.unlink(missing_ok=True)
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "suites/test_inference.py"]
    command = [*base, "--precision", ",".join(PRECISIONS), "--results", str(RESULTS)]
    done = subprocess.run(command, check=False, cwd=ROOT)
    if not records.exists():
        raise SystemExit("no engine was judged: see what pytest says above")
    shutil.copy(records, KEPT)
    if reasons := [f"{name}: {reason}" for name in _missing(read_inference(KEPT)) if (reason := _refusal(name))]:
        print("not judged, so the page has no rows of", *reasons, sep="\n  ", file=sys.stderr)
    return done.returncode == 0


def time_engines() -> bool:
    """Time all engines in alternation, and keep what they did. Return whether it worked."""
    command = [sys.executable, "-m", "meshmark.inference.speed", "-o", str(SPEEDS)]
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def _missing(records: Sequence[InferenceRecord]) -> list[str]:
    """Return the engines that Meshmark has and the records have not."""
    judged = {record.case["engine"] for record in records}
    return [name for name in inference_adapters() if name not in judged]


def _refusal(name: str) -> str | None:
    return load_engine(inference_adapters()[name]).refusal()


def _left_out(records: Sequence[InferenceRecord]) -> str:
    """Say which engines were not judged where the records were made."""
    missing = _missing(records)
    if not missing:
        return ""
    environments = {load_engine(inference_adapters()[name]).virtual_environment for name in missing} - {""}
    how = " and ".join(f"`make env NAME={name}`" for name in sorted(environments)) or "their packages"
    return f"""
**Not judged: {", ".join(missing)}.** They could not run where this page was made. It takes {how} first.
"""


def page(records: Sequence[InferenceRecord]) -> str:
    """Return the page of what the records say."""
    between = f"{_waste()}\n{_speed(read_speeds(SPEEDS))}\n"
    links = "Made by `make inference`. [How engines are judged](../docs/inference.md)."
    return f"{inference_page(records, links, _left_out(records), between)}{_detects()}\n{_alarms()}"


def _speed(speeds: Sequence[EngineSpeed]) -> str:
    """Return the section of times, as ratios to those of one engine."""
    number, length, new = LOAD
    base = next(each for each in speeds if (each.engine, each.precision) == BASE)
    rows = [
        {"engine": each.engine, "precision": each.precision}
        | {text: "1" if each is base else "{:.2f} ± {:.2f}".format(*row[name]) for name, text in _RATES.items()}
        for each, row in zip(speeds, ratios(speeds), strict=True)
    ]
    rounds, decode = len(base.decode), statistics.median(base.decode)
    prefill, first = statistics.median(base.prefill), 1000 * statistics.median(base.first_token)
    return f"""## Speed

How many times as fast as `{" ".join(BASE)}`, with 95 % intervals. {number} requests of {length} tokens arrive at once,
and {new} tokens follow each. All engines are started once, and serve this load in {rounds} rounds, one after the other,
while the others are stopped. A ratio is of two loads of one round, so that other work on the machine falls on both.
The base: {prefill:,.0f} tokens/s of prefill, {decode:,.0f} of decode, {first:.1f} ms to the first token. With tp2
an engine has two processor cores, else one. By `python -m studies.inference --speed` at {base.commit} on
{base.machine}.

{markdown(rows)}

The model is a toy, so these are times of schedulers and Python, not of products of matrices. They say nothing about a
real model.
"""


_RATES = {"prefill": "prefill", "decode": "decode", "first_token": "first token"}


def _detects() -> str:
    """Return the table of planted defects, and which verdicts fail by each."""
    mutants = [json.loads(line) for line in MUTANTS.read_text().splitlines()]
    planted = [mutant for mutant in mutants if mutant["name"]]
    rows = [
        {
            "defect": mutant["text"],
            "caught by": "; ".join(f"{variant}: {', '.join(names)}" for variant, names in mutant["caught"].items())
            or "**not caught**",
        }
        for mutant in planted
    ]
    caught = sum(bool(mutant["caught"]) for mutant in planted)
    (right,) = (mutant for mutant in mutants if not mutant["name"])
    alarms = "passes every variant" if not right["caught"] else f"**fails {right['caught']}**"
    return f"""
## What this suite detects

The paged engine with one defect each: **{caught} of {len(planted)} are caught**. Without a defect it {alarms}. Each
defect runs in the variant and the precision that are meant for it, on llama-tiny. Of defects of an fp8 cache the first
verdict that fails is shown. Made by `make inference-power`.

{markdown(rows)}
"""


def _waste() -> str:
    """Return the tables of what a paged cache wastes and what sharing saves."""
    lines = [json.loads(line) for line in WASTE.read_text().splitlines()]
    commits = sorted({line["commit"] for line in lines})
    found: dict[str, list[dict[str, object]]] = {"waste": [], "sharing": []}
    for line in lines:
        kind, _, _ = line.pop("table"), line.pop("engine"), line.pop("commit")
        found[kind].append(_waste_row(Waste(**line)) if kind == "waste" else _sharing_row(Sharing(**line)))
    return f"""### Waste

{NUM_REQUESTS} requests arrive at once at the paged engine. Lengths are exponentially distributed. Their means are
{MEAN_PROMPT} tokens of a prompt and {MEAN_NEW} of a completion, as in PagedAttention's ShareGPT load
(arXiv:2309.06180), whose waste is under 4 %. Bytes are means over the engine's steps. Blocks in use are read from the
engine's pool, and at every step are those of each sequence's tokens. *contiguous* reserves {LIMIT} tokens for each
sequence. By `make inference-power` at {", ".join(commits)}.

{markdown(found["waste"])}

Blocks in use at the peak where sequences begin alike: parallel samples, and a prefix cache.

{markdown(found["sharing"])}
"""


def _waste_row(row: Waste) -> dict[str, object]:
    return {
        "block": row.block_size,
        "reserved": f"{row.reserved_bytes:,.0f} bytes",
        "used": f"{row.used_bytes:,.0f} bytes",
        "waste": f"{row.waste:.1%}",
        "contiguous": f"{row.contiguous_bytes:,.0f} bytes",
        "its waste": f"{row.contiguous_waste:.1%}",
    }


def _sharing_row(row: Sharing) -> dict[str, object]:
    found = f"{row.blocks}" if row.blocks == row.closed_form else f"**{row.blocks}**"
    return {
        "load": row.kind,
        "block": row.block_size,
        "blocks": found,
        "closed form": row.closed_form,
        "without sharing": row.unshared,
        "saved": f"{row.saved:.0%}",
    }


def _alarms() -> str:
    """Return how often correct engines were accused, and how much room the tolerance leaves."""
    lines = [json.loads(line) for line in ALARMS.read_text().splitlines()]
    commits = sorted({line["commit"] for line in lines})
    rows = []
    for engine, precision in dict.fromkeys((line["engine"], line["precision"]) for line in lines):
        part = [line for line in lines if (line["engine"], line["precision"]) == (engine, precision)]
        rows.append(
            {
                "engine": engine,
                "precision": precision,
                "runs": len(part),
                "accused": sum(bool(line["accused"]) for line in part),
                "drawn sequences that part": f"{sum(line['parted'] for line in part):.0f}",
                **{
                    f"{text} / noise": "" if part[0][name] is None else f"{max(line[name] for line in part):.2f}"
                    for name, text in (("largest", "largest error"), ("rms", "mean error"), ("apart", "half of apart"))
                },
            }
        )
    accused = sum(bool(line["accused"]) for line in lines)
    return f"""## False alarms

**{accused} of {len(lines)} correct runs are accused.** Each seed is a model and prompts of its own. Judged are log
probabilities, greedy tokens, and the same requests one after the other in reverse; of paged engines also the clauses
*seeds* and *parallel samples*. One engine sums in another order for each size of a batch, so that drawn sequences part
by rounding. With an fp8 cache there are longer prompts too, whose own log probabilities are not told. The last columns
are the largest of all runs, where {FACTOR:g} fails: so much room does the factor leave.
By `make inference-power` at {", ".join(commits)}.

{markdown(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.inference", description=__doc__.partition("\n")[0])
    parser.add_argument("--page-only", action="store_true", help="write the page from the committed records")
    parser.add_argument("--speed", action="store_true", help="time the engines in alternation, and judge none")
    parsed = parser.parse_args(arguments)
    if parsed.speed:
        right = time_engines()
    else:
        right = parsed.page_only or (run() & time_engines())
    PAGE.write_text(page(read_inference(KEPT)), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
