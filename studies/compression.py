"""Models made smaller, judged: reports/compression.md.

python -m studies.compression                       # runs every method, then writes the page
python -m studies.compression --only torchao-int8   # runs some, and keeps the committed records of the others
python -m studies.compression --costs               # measures loss and speed side by side, and nothing else
python -m studies.compression --page-only           # writes the page from the committed records
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from meshmark.adapter.registry import compression_methods
from meshmark.compression.judge import FACTOR
from meshmark.compression.run import PAIRS, CompressionRecord, load_method, read_compression, run_case
from meshmark.records.judged_case import CaseVerdict
from meshmark.report.table import inline
from meshmark.report.table import table as markdown
from studies import compression_costs

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "reports" / "compression.md", ROOT / "results" / "compression"
KEPT = ROOT / "reports" / "records" / "compression.jsonl"


def run(only: Sequence[str]) -> bool:
    """Run the methods, or those of `only`, and keep their records. Return whether all are right."""
    (RESULTS / "records.jsonl").unlink(missing_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if only and KEPT.exists():
        shutil.copy(KEPT, RESULTS / "records.jsonl")
    right = True
    for name, target in compression_methods().items():
        if only and name not in only:
            continue
        if reason := load_method(target).refusal():
            print(f"{name}: skipped: {reason}")
            continue
        record = run_case(name, target, RESULTS)
        right &= record.passed
        print(f"{name}: {'right' if record.passed else 'wrong'}")
    if not only:
        compression_costs.run()
    KEPT.write_text("".join(record.line() for record in read_compression(RESULTS / "records.jsonl")))
    return right


def page(records: Sequence[CompressionRecord]) -> str:
    """Return the page of what the records say."""
    newest = max(records, key=lambda record: record.date)
    versions = sorted({f"{name} {version}" for record in records for name, version in record.versions.items()})
    holding = sum(verdict.passed for record in records for verdict in record.verdicts)
    total = sum(len(record.verdicts) for record in records)
    right = sum(record.passed for record in records)
    models = [record for record in records if "logits" in _by_name(record)]
    optimizers = [record for record in records if "logits" not in _by_name(record)]
    case = newest.case
    return f"""# Models made smaller

**{right} of {len(records)} methods are right** ({holding} of {total} verdicts). Made by `make compression` at commit
{newest.commit} on {newest.machine}, with {", ".join(versions)}. [How methods are judged](../docs/compression.md).

{markdown([_answer(record) for record in records])}

*bytes* are those of the compressed weights or moments, divided by those of float32. *loss* is the mean on held-out
rows, of `{case["workload"]}` after {case["steps"]} steps, before and after; for an optimizer, after 100 more steps by
PyTorch's AdamW and by the method. *speed* is the original's time divided by the method's, over {PAIRS} pairs in turn in
one process, with its 95 % interval: above 1, the method is faster. The model is a toy on a CPU: these times say
nothing about GPUs.

## Correct

Largest errors, relative to the largest value, against the specification in float64. *detects* is the smallest error
that fails: {FACTOR:g} times the noise of correct orders of the same sums.

{markdown([row for record in models for row in _errors(record, ("weights", "layers", "logits", "loss"))])}

{markdown([row for record in optimizers for row in _errors(record, ("update", "first moment", "second moment"))])}

Of inputs rounded to 8 bits as they come, a layer is judged at its own inputs. Over the whole model rounding moves some
inputs past the middle of two codes, so logits of `torchao-int8-dynamic` have much more noise.

## Bytes

{markdown([_bytes(record) for record in records])}

{_nearest(optimizers)}{compression_costs.section()}
{_failures(records)}"""


def _by_name(record: CompressionRecord) -> dict[str, CaseVerdict]:
    return {verdict.name: verdict for verdict in record.verdicts}


def _answer(record: CompressionRecord) -> dict[str, object]:
    numbers, speed = _by_name(record)["bytes"].numbers, record.speed
    return {
        "method": record.case["method"],
        "right": "yes" if record.passed else "**no**",
        "bytes": f"{numbers['bytes'] / numbers['before']:.3f}" if numbers else "",
        "loss": f"{record.loss['before']:.4f}, then {record.loss['after']:.4f}",
        "speed": f"{speed['ratio']:.2f} ± {speed['half_width']:.2f}",
    }


def _errors(record: CompressionRecord, names: Sequence[str]) -> list[dict[str, object]]:
    found, rows = _by_name(record), list[dict[str, object]]()
    for name in names:
        if name in found and (numbers := found[name].numbers):
            off = f"{numbers['largest']:.1e}"
            shown = off if found[name].passed else f"**{off}**"
            rows.append(
                {"method": record.case["method"], "what": name, "off by": shown, "detects": f"{numbers['detects']:.1e}"}
            )
    return rows


def _bytes(record: CompressionRecord) -> dict[str, object]:
    verdict = _by_name(record)["bytes"]
    return {"method": record.case["method"], "bytes": inline(verdict.text if verdict.passed else f"**{verdict.text}**")}


def _nearest(optimizers: Sequence[CompressionRecord]) -> str:
    shares = [_by_name(record)["bytes"].numbers["not_nearest"] for record in optimizers]
    if not shares:
        return ""
    return f"""{100 * max(shares):.2f} % of 8-bit codes of moments are not the nearest: on a CPU bitsandbytes looks
codes up in a table of 2^16 entries. A code may be 2^-15 of the block's largest further away than the nearest.

"""


def _failures(records: Sequence[CompressionRecord]) -> str:
    lines = [
        f"- {record.case['method']}, {verdict.name}: {inline(verdict.text)}"
        for record in records
        for verdict in record.verdicts
        if not verdict.passed
    ]
    return "## What fails\n\n" + "\n".join(lines) + "\n" if lines else "Nothing fails.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.compression", description=__doc__.partition("\n")[0])
    parser.add_argument("--page-only", action="store_true", help="write the page from the committed records")
    parser.add_argument("--costs", action="store_true", help="measure loss and speed side by side alone")
    parser.add_argument("--only", default="", help="methods to run, separated by commas")
    options = parser.parse_args(arguments)
    only, known = [name for name in options.only.split(",") if name], compression_methods()
    if unknown := [name for name in only if name not in known]:
        parser.error(f"--only {unknown[0]}: no such method; there are {', '.join(known)}")
    if options.costs:
        compression_costs.run()
    right = options.page_only or options.costs or run(only)
    PAGE.write_text(page(read_compression(KEPT)), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
