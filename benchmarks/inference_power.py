"""The power of the inference suite: the paged engine, right and with one defect each, goes through the suite.

python -m benchmarks.inference_power        # reports/records/inference-mutants.jsonl, which reports/inference.md shows
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path

from meshmark.adapter.registry import inference_adapters
from meshmark.inference.clauses import judge_engine
from meshmark.inference.judge import Judge
from meshmark.inference.local import LocalEngine
from meshmark.inference.model import PRECISIONS, write_model
from meshmark.inference.process import EngineError, EngineProcess, load_engine
from meshmark.inference.run import VARIANTS, InferenceCase
from tests.broken.paged import MUTANTS, PagedMutant

KEPT = Path(__file__).parents[1] / "reports" / "records" / "inference-mutants.jsonl"
NUM_LEAK = 60


def failures(target: str, variant: str, judge: Judge, folder: Path, precision: str = "fp32") -> Generator[str]:
    """Yield the names of verdicts that an engine fails in a variant, as soon as each is judged."""
    case = InferenceCase(engine="paged", target=target, variant=variant, precision=precision)
    try:
        if load_engine(target).tp > 1:
            process = EngineProcess(target, folder, case.options(), folder / "log")
        else:
            process = LocalEngine(load_engine(target)().build(folder, case.options()))
        with process as engine:
            for verdict in judge_engine(engine, judge, case.setting(NUM_LEAK)):
                if not verdict.passed:
                    yield verdict.name
    except EngineError:
        yield "the engine ends"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inference_power", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "-k", default="", metavar="TEXT", help="mutants whose name contains TEXT (default: all, and the right engine)"
    )
    parser.add_argument("--all", action="store_true", help="every variant, not the one that is meant for the defect")
    parser.add_argument(
        "--first", action="store_true", help="go on at the first verdict that fails: it is the quickest"
    )
    parser.add_argument("-o", "--output", type=Path, default=KEPT)
    parsed = parser.parse_args(arguments)
    survivors, rows = list[str](), dict[str, str]()
    if parsed.k and parsed.output.exists():  # what is run again takes its own row's place
        rows = {json.loads(line)["name"]: line for line in parsed.output.read_text().splitlines()}
    chosen = [mutant for mutant in MUTANTS if parsed.k in mutant.name]
    right = PagedMutant(name="", text="nothing is wrong")
    with tempfile.TemporaryDirectory() as name:
        judges = dict[str, tuple[Judge, Path]]()
        for precision in dict.fromkeys(["fp32", *(mutant.precision for mutant in chosen)]):
            bits = PRECISIONS[precision].weight_bits
            folder = write_model("llama-tiny", Path(name) / precision, weight_bits=bits)
            judges[precision] = Judge(folder, precision), folder
        for mutant in [*([] if parsed.k else [right]), *chosen]:
            target = mutant.target if mutant.name else inference_adapters()["paged"]
            variants = [mutant.variant] if mutant.name and not parsed.all else list(VARIANTS)
            most = 1 if parsed.first and mutant.name else None
            found = {
                v: list(islice(failures(target, v, *judges[mutant.precision], mutant.precision), most))
                for v in variants
            }
            if not mutant.name:
                others = [p for p in judges if p != "fp32"]
                in_each = [(variant, p) for p in others for variant in ("plain", "all-at-once")]
                found |= {f"{v}, {p}": list(failures(target, v, *judges[p], p)) for v, p in in_each}
            found = {variant: verdicts for variant, verdicts in found.items() if verdicts}
            rows[mutant.name] = json.dumps({"name": mutant.name, "text": mutant.text, "caught": found})
            if bool(found) != bool(mutant.name):
                survivors.append(mutant.name or "the right engine")
            print(mutant.name or "right", found, flush=True)
    parsed.output.write_text("\n".join(rows.values()) + "\n")
    print(f"{len(chosen)} mutants; {', '.join(survivors) or 'none'} not as expected")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
