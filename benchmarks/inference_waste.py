"""Memory that a paged KV cache wastes, by block size, and what sharing saves.

python -m benchmarks.inference_waste         # reports/records/inference-waste.jsonl, which reports/inference.md shows
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshmark.adapter.registry import inference_adapters
from meshmark.environment import describe
from meshmark.inference.model import shape_of, write_model
from meshmark.inference.process import EngineProcess
from meshmark.inference.waste import load, measure_sharing, measure_waste, waste_options

KEPT = Path(__file__).parents[1] / "reports" / "records" / "inference-waste.jsonl"
MODEL = "llama-tiny-2k"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inference_waste", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--block-sizes", default="8,16,32,64")
    parser.add_argument("-o", "--output", type=Path, default=KEPT)
    parsed = parser.parse_args(arguments)
    commit, target = describe("cpu", "", 1).commit, inference_adapters()["paged"]
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(MODEL, Path(name))
        for size in map(int, parsed.block_sizes.split(",")):
            with (
                EngineProcess(target, folder, waste_options(size), folder / "log") as plain,
                EngineProcess(target, folder, waste_options(size, prefix_caching=True), folder / "log") as prefix,
            ):
                waste = measure_waste(plain.serve(load()), size, shape_of(MODEL))
                found = [("waste", waste), *(("sharing", each) for each in measure_sharing(plain, prefix, size))]
            for kind, row in found:
                lines.append(
                    json.dumps({"table": kind, "engine": "paged", **dataclasses.asdict(row), "commit": commit})
                )
                print(lines[-1], flush=True)
    parsed.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
