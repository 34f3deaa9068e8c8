"""How often correct engines are accused: many models, prompts and precisions, through the verdicts on every run.

python -m benchmarks.inference_alarms        # reports/records/inference-alarms.jsonl, which reports/inference.md shows

Each run has a model of its own (weights by the seed) and prompts of its own. The tolerance is a factor times the noise,
so the largest ratio of a correct engine's error to the noise says how much room the factor leaves. Engines of
tests/correct/paged.py round in another way for each size of a batch, and draw in two ways. Draws of paged engines are
judged by the clauses "seeds" and "parallel samples".
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
from meshmark.inference.clauses import ClauseContext, parallel_samples, seeds
from meshmark.inference.contract import Request
from meshmark.inference.judge import Judge
from meshmark.inference.local import LocalEngine
from meshmark.inference.model import prompts, write_model
from meshmark.inference.process import load_engine
from meshmark.inference.run import InferenceCase

KEPT = Path(__file__).parents[1] / "reports" / "records" / "inference-alarms.jsonl"
CORRECT = "tests.correct.paged"
ENGINES = {
    **{name: (inference_adapters()[name], ("fp32", "bf16")) for name in ("paged", "transformers-generate")},
    "paged, fp8 cache": (inference_adapters()["paged"], ("fp8-cache",)),
    "paged, rounds by batch": (f"{CORRECT}:RoundsByBatch", ("bf16",)),
    "paged, rounds by batch, draws by inverse CDF": (f"{CORRECT}:RoundsByBatchInverseCdf", ("bf16",)),
}
"""Engines by what the page calls them: the adapter, and the precisions that it runs in."""
LENGTHS, NEW_TOKENS = (1, 7, 31, 33, 65), 8
LONG = (150, 200, 200)
"""Tokens of further prompts where the cache rounds. Their own log probabilities are not asked for: so roundings that
could go either way are many, and what the engine says of them is little."""


def run(seed: int, engines: Sequence[str] = tuple(ENGINES)) -> list[dict[str, object]]:
    """Return what each correct engine is accused of on one model, and its errors over the noise."""
    rows = list[dict[str, object]]()
    requests = [
        Request(name=f"p{index}", prompt=prompt, max_new_tokens=NEW_TOKENS)
        for index, prompt in enumerate(prompts(LENGTHS, seed=seed))
    ]
    long = [
        Request(name=f"long{index}", prompt=prompt, max_new_tokens=NEW_TOKENS, wants_prompt=False)
        for index, prompt in enumerate(prompts(LONG, seed=1000 + seed))
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = write_model("llama-tiny", Path(name), seed=seed)
        judges = {p: Judge(folder, p) for p in {p for engine in engines for p in ENGINES[engine][1]}}
        for engine in engines:
            target, precisions = ENGINES[engine]
            for precision in precisions:
                judge, case = judges[precision], InferenceCase(engine=engine, target=target, precision=precision)
                adapter = load_engine(target)
                rounds = judge.truth.rounds_cache
                asked = requests + long if rounds else requests
                apart = [dataclasses.replace(request, arrives=20 * index) for index, request in enumerate(asked[::-1])]
                with LocalEngine(adapter().build(folder, case.options())) as served_by:
                    served, again = served_by.serve(asked), served_by.serve(apart)
                    noise = judge.noise(asked, served.completions)
                    context = ClauseContext(
                        engine=served_by, judge=judge, setting=case.setting(), served=served, noise=noise
                    )
                    drawn = [seeds(context), parallel_samples(context)] if adapter.pages else []
                logprobs = judge.logprobs(asked, served.completions, noise)
                same = judge.same("alone", asked, (served, again), noise)
                verdicts = [logprobs, judge.greedy(asked, served.completions, noise), same, *drawn]
                rows.append(
                    {
                        "seed": seed,
                        "engine": engine,
                        "precision": precision,
                        "accused": [verdict.name for verdict in verdicts if not verdict.passed],
                        "largest": logprobs.numbers.get("largest", 0.0) / noise.largest,
                        "rms": logprobs.numbers.get("rms", 0.0) / noise.rms,
                        "parted": sum(verdict.numbers.get("tokens", 0) for verdict in drawn),
                        # Two runs may round a key or value to two sides: they differ by more than noise.
                        "apart": None if rounds else same.numbers.get("apart", 0.0) / (2 * noise.largest),
                    }
                )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inference_alarms", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=60, help="models, each served by every engine")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="go on here, after what is kept")
    parser.add_argument("-k", default="", metavar="TEXT", help="engines whose name contains TEXT (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=KEPT)
    parsed = parser.parse_args(arguments)
    commit = describe("cpu", "", 1).commit
    if parsed.first == 1:
        parsed.output.write_text("")
    accused, engines = 0, [name for name in ENGINES if parsed.k in name]
    for seed in range(parsed.first, parsed.seeds + 1):
        for row in run(seed, engines):
            accused += bool(row["accused"])
            with parsed.output.open("a") as file:
                file.write(json.dumps({**row, "commit": commit}) + "\n")
        print(seed, accused, flush=True)
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
