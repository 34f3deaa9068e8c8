"""Time engines in alternation: all are started, and each serves one load a round while the others are stopped.

python -m meshmark.inference.speed                                    # every engine and precision, a line of JSON each
python -m meshmark.inference.speed --adapter generate.py:Generate -o speed.jsonl

What else a machine does falls on all engines alike, and a ratio is of two loads of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark import environment
from meshmark.adapter.registry import inference_adapters, outside_name
from meshmark.errors import InputError, MeshmarkError, UnknownNameError
from meshmark.inference.contract import Request, Served
from meshmark.inference.model import PRECISIONS, prompts, write_model
from meshmark.inference.process import EngineError, EngineProcess, load_engine
from meshmark.inference.run import InferenceCase
from meshmark.measure.laps import in_rounds, ratio_interval

LOAD = (16, 64, 32)
"""Requests that arrive at once, tokens of each prompt, new tokens of each."""
ROUNDS, WARM_UP = 16, 2
BASE = ("transformers-generate", "fp32")
"""Engine and precision that others are divided by."""


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """Speeds of one engine, round by round."""

    engine: str
    precision: str
    prefill: list[float]
    """Tokens a second, up to the last request's first token."""
    decode: list[float]
    """Tokens a second, after the last request's first token."""
    first_token: list[float]
    """Median seconds to a request's first token."""
    versions: dict[str, str]
    commit: str
    machine: str
    date: str


def read_speeds(path: Path) -> list[EngineSpeed]:
    """Return the lines of a file."""
    return [EngineSpeed(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def ratios(speeds: Sequence[EngineSpeed], base: tuple[str, str] = BASE) -> list[dict[str, tuple[float, float]]]:
    """Return how many times as fast as the base each is, with half the 95 % interval: of each rate by its name.

    Raises `ValueError` if the base is not there.
    """
    bases = [each for each in speeds if (each.engine, each.precision) == base]
    if not bases:
        raise ValueError(f"{' '.join(base)} was not timed, by which the others are divided")
    return [
        {
            "prefill": ratio_interval(each.prefill, bases[0].prefill),
            "decode": ratio_interval(each.decode, bases[0].decode),
            "first_token": ratio_interval(bases[0].first_token, each.first_token),
        }
        for each in speeds
    ]


def load() -> list[Request]:
    """Return the requests of the timed load."""
    number, length, new = LOAD
    return [
        Request(name=f"load-{index}", prompt=prompt, max_new_tokens=new, wants_prompt=False)
        for index, prompt in enumerate(prompts([length] * number, seed=4))
    ]


def rates(served: Served) -> dict[str, float]:
    """Return prefill and decode in tokens a second, and the median time to the first token in seconds.

    Raises `EngineError` if a request was not served to its end.
    """
    number, length, new = LOAD
    done = served.completions
    if short := [c for c in done if len(c.tokens) != new]:
        raise EngineError(f"{short[0].request}: {len(short[0].tokens)} tokens of {new}; {short[0].error}")
    start = max(c.first_token for c in done)
    return {
        "prefill": number * length / start,
        "decode": number * (new - 1) / max(max(c.last_token for c in done) - start, 1e-9),
        "first_token": statistics.median(c.first_token - c.arrived for c in done),
    }


def measure(targets: Mapping[str, str], precisions: Sequence[str], logs: Path, rounds: int) -> list[EngineSpeed]:
    """Time engines, by name and target, in each of these precisions that they have."""
    cases = [
        InferenceCase(engine=name, target=target, precision=precision)
        for name, target in targets.items()
        for precision in precisions
        if precision in load_engine(target).precisions
    ]
    if not cases:
        raise InputError(f"no engine of {', '.join(targets)} has a precision of {', '.join(precisions)}")
    around, requests = environment.describe("cpu", "", 1), load()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshmark-model-")))
        engines = dict[str, EngineProcess]()
        for case in cases:
            bits = PRECISIONS[case.precision].weight_bits
            if not (folder := root / f"{case.model}-{bits}").exists():
                write_model(case.model, folder, weight_bits=bits)
            process = EngineProcess(case.target, folder, case.options(), logs / f"{case.id}.log")
            engines[case.id] = stack.enter_context(process)
            process.pause()  # an engine that waits may spin
            print(f"{case.engine} {case.precision} has started", file=sys.stderr, flush=True)

        def lap(engine: EngineProcess) -> Callable[[], dict[str, float]]:
            def serve() -> dict[str, float]:
                engine.resume()
                try:
                    return rates(engine.serve(requests))
                finally:
                    engine.pause()

            return serve

        found = in_rounds({name: lap(engine) for name, engine in engines.items()}, rounds, WARM_UP)
        return [
            EngineSpeed(
                engine=case.engine,
                precision=case.precision,
                **{name: [one[name] for one in found[case.id]] for name in ("prefill", "decode", "first_token")},
                versions=dict(engines[case.id].versions),
                commit=around.commit,
                machine=around.machine,
                date=around.date,
            )
            for case in cases
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m meshmark.inference.speed", description=__doc__.partition("\n")[0])
    known = inference_adapters()
    parser.add_argument("--adapters", metavar="A,B", help="engines (default: all)")
    parser.add_argument(
        "--adapter", metavar="FILE.py:CLASS", action="append", default=[], help="an engine from outside"
    )
    parser.add_argument("--precision", metavar="A,B", default=",".join(PRECISIONS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default: {ROUNDS})")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write lines of JSON there")
    parsed = parser.parse_args(arguments)
    try:
        speeds = _measure(parsed, known)
        shown = ratios(speeds)
    except (MeshmarkError, ValueError) as error:
        print(f"meshmark: {error}", file=sys.stderr)
        return 2
    if parsed.output:
        lines = (json.dumps(dataclasses.asdict(each)) + "\n" for each in speeds)
        parsed.output.write_text("".join(lines), encoding="utf-8")
    print(f"times as fast as {' '.join(BASE)}, with 95 % intervals: prefill, decode, first token")
    for each, row in zip(speeds, shown, strict=True):
        text = ", ".join(f"{ratio:.2f} ± {half:.2f}" for ratio, half in row.values())
        print(f"{each.engine} {each.precision}: {text}")
    return 0


def _measure(parsed: argparse.Namespace, known: Mapping[str, str]) -> list[EngineSpeed]:
    names = parsed.adapters.split(",") if parsed.adapters else list(known)
    for name in names:
        if name not in known:
            raise UnknownNameError("engine", name, known)
    targets = {BASE[0]: known[BASE[0]]} | {name: known[name] for name in names}
    targets |= {outside_name(target): target for target in parsed.adapter}
    for name, target in tuple(targets.items()):
        if reason := load_engine(target).refusal():
            print(f"{name} is not timed: {reason}", file=sys.stderr)
            del targets[name]
    return measure(targets, parsed.precision.split(","), Path("results", "inference", "logs"), parsed.rounds)


if __name__ == "__main__":
    sys.exit(main())
