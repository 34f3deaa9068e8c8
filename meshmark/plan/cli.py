"""The planner's verbs: `plan`, `predict`, `calibrate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshmark.errors import InputError, MeshmarkError, UnknownNameError
from meshmark.plan.arguments import DEFAULT_GPU, GPU_HELP, add_setting, machine_given, recipe_given
from meshmark.plan.model_names import plan_model
from meshmark.plan.predict_cli import add_predict
from meshmark.plan.predict_file import DEFAULT_RECIPE
from meshmark.plan.provenance import provenance
from meshmark.plan.rates import Rates
from meshmark.plan.search import (
    OFFLOAD_PLACES,
    Search,
    max_model,
    reason,
    search,
    simulate_first,
    stage_times,
)
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import GIB, Gpu
from meshmark.spec.layout import Offload, Schedule
from meshmark.spec.model_spec import Family, ModelSpec
from meshmark.theory.grid import SEARCHED_SCHEDULES, SearchSpace
from meshmark.theory.recipe import recipe

_DEFAULT_MODEL = "llama-8b"


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Arguments of `plan`; `run` raises `InputError` for a user's mistake."""
    parser.add_argument("--model", help=f"a preset, or a size such as gpt-175b; {_DEFAULT_MODEL} if not given")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    parser.add_argument("--gpu", help=f"{GPU_HELP}; {DEFAULT_GPU} if not given")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences in one optimizer step")
    parser.add_argument("--seq-len", type=int, help="tokens in a sequence, if not the model's own")
    parser.add_argument("--top", type=int, default=10, help="layouts to print")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--max-model", action="store_true", help="the largest model that fits, instead, of --model's family"
    )
    schedules = f"to search, of {', '.join(Schedule)}"
    parser.add_argument("--schedules", default=",".join(SEARCHED_SCHEDULES), help=schedules)
    parser.add_argument("--cp", help="context-parallel degrees to search; by default 1, and more for long sequences")
    parser.add_argument("--offload", choices=tuple(Offload), default="none", help="where optimizer states live")
    parser.add_argument("--timeline", type=Path, metavar="SVG", help="draw the best layout's pipeline schedule")
    add_setting(parser)
    parser.set_defaults(run=run_plan)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `calibrate`."""
    parser.add_argument("-o", "--output", type=Path, help="write both as JSON, for --gpu")
    parser.add_argument("--ranks", type=int, help="processes that measure together; by default one a GPU or core")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to spend")
    parser.set_defaults(run=run_calibrate)


def run_plan(arguments: argparse.Namespace) -> int:
    """Search and print."""
    (machine, given), using = machine_given(arguments), recipe_given(arguments) or recipe(DEFAULT_RECIPE)
    if arguments.max_model:
        return _print_max_model(arguments, machine, given)
    model = plan_model(arguments.model or _DEFAULT_MODEL)
    if arguments.seq_len is not None:
        model = dataclasses.replace(model, seq_len=arguments.seq_len)
    if arguments.top < 1:
        raise InputError(f"--top is {arguments.top}, expected at least 1")
    schedules = [_schedule(name.strip()) for name in arguments.schedules.split(",")]
    start = time.perf_counter()
    closed = search(model, dataclasses.replace(_space(arguments), schedules=schedules), machine, using, given)
    found = simulate_first(closed, arguments.top)
    elapsed = time.perf_counter() - start
    if arguments.json:
        print(json.dumps(_as_json(found, arguments.top, elapsed), indent=1))
    else:
        _print_search(found, model, arguments.top, elapsed)
    if arguments.timeline:
        _draw_timeline(found, arguments.timeline)
    return 0


def _space(arguments: argparse.Namespace) -> SearchSpace:
    return SearchSpace(
        num_gpus=arguments.gpus,
        global_batch=arguments.global_batch,
        offload=Offload(arguments.offload),
        contexts=_contexts(arguments.cp),
    )


def _contexts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--cp {text!r}: expected whole numbers with commas between") from error


def _schedule(name: str) -> Schedule:
    if name not in tuple(Schedule):
        raise UnknownNameError("schedule", name, Schedule)
    return Schedule(name)


def _print_search(found: Search, model: ModelSpec, top: int, elapsed: float) -> None:
    prediction = found.prediction
    size = f"{model.num_parameters / 1e9:.3g}B parameters"
    print(f"{model.name} ({size}) on {prediction.grid.num_gpus[0]} {prediction.gpu.name}: {found.num_examined} layouts")
    print(f"examined in {elapsed:.2f} s, {len(found.ranked)} fit; global batch {prediction.grid.global_batch[0]}")
    print(provenance(prediction.gpu, prediction.rates))
    print(f"\n{'layout':62} {'tok/s/gpu':>10} {'MFU':>6} {'step s':>9} {'GiB':>7} {'free':>7}")
    for row in found.ranked[:top]:
        print(_line(found, int(row)))
    best = int(found.ranked[0])
    print(f"\nThe best wins because {reason(found)}.")
    print(f"Its step: {_breakdown(found, best)}; HFU {100 * prediction.hfu[best]:.1f} %.")
    if host := float(prediction.memory.host_bytes[best]):
        layout, left = prediction.grid.layout(best), float(prediction.host_headroom_bytes[best])
        ranks = min(layout.world_size, prediction.gpu.gpus_per_node)
        place = f"a node {OFFLOAD_PLACES[layout.offload]}, of {ranks * (host + left) / GIB:.0f} there"
        print(f"Offloaded: {host / GIB:.1f} GiB a gpu, {ranks * host / GIB:.0f} GiB {place}.")
    if len(found.just_too_large):
        speed = prediction.tokens_per_second_per_gpu
        faster = speed[found.just_too_large[0]] > speed[best]
        print("Faster, but too large by:" if faster else "Too large (and no faster) by:")
        for row in found.just_too_large[:3]:
            print(f"  {_line(found, int(row))}")


def _breakdown(found: Search, row: int) -> str:
    """Where a step's time goes, the largest part first; below half a percent is left out."""
    prediction = found.prediction
    shares = {part: getattr(prediction.time, part)[row] / prediction.step_seconds[row] for part in PARTS}
    parts = sorted((part for part in PARTS if shares[part] >= 0.005), key=lambda part: -shares[part])
    return ", ".join(f"{part.replace('_', ' ')} {100 * shares[part]:.0f} %" for part in parts)


def _line(found: Search, row: int) -> str:
    p = found.prediction
    return (
        f"{p.grid.layout(row).id:62} {p.tokens_per_second_per_gpu[row]:10.1f} {100 * p.mfu[row]:5.1f}% "
        f"{p.step_seconds[row]:9.3f} {p.memory_bytes[row] / GIB:7.1f} {found.headroom_bytes(row) / GIB:+7.1f}"
    )


def _as_json(found: Search, top: int, elapsed: float) -> dict[str, object]:
    rows = [_layout_json(found, int(row)) for row in found.ranked[:top]]
    near = [_layout_json(found, int(row)) for row in found.just_too_large[:3]]
    return {
        "model": found.prediction.model.name,
        "gpu": found.prediction.gpu.name,
        "num_examined": found.num_examined,
        "num_fit": len(found.ranked),
        "seconds": round(elapsed, 3),
        "layouts": rows,
        "reason": reason(found),
        "just_too_large": near,
        "rates": provenance(found.prediction.gpu, found.prediction.rates),
    }


def _layout_json(found: Search, row: int) -> dict[str, object]:
    p = found.prediction
    return {
        "layout": dataclasses.asdict(p.grid.layout(row)),
        "id": p.grid.layout(row).id,
        "micro_batch": int(p.grid.micro_batch[row]),
        "memory_bytes": float(p.memory_bytes[row]),
        "headroom_bytes": found.headroom_bytes(row),
        "host_bytes": float(p.memory.host_bytes[row]),
        "step_seconds": float(p.step_seconds[row]),
        "tokens_per_second_per_gpu": float(p.tokens_per_second_per_gpu[row]),
        "mfu": float(p.mfu[row]),
        "hfu": float(p.hfu[row]),
        "seconds": {part: float(getattr(p.time, part)[row]) for part in PARTS},
    }


def _print_max_model(arguments: argparse.Namespace, machine: Gpu, given: Rates) -> int:
    using = recipe_given(arguments) or recipe(DEFAULT_RECIPE)
    family = plan_model(arguments.model).family if arguments.model else Family.GPT
    model, grid, held = max_model(_space(arguments), machine, using, given, family=family, seq_len=arguments.seq_len)
    least = int(held.argmin())
    layout = grid.layout(least)
    if arguments.json:
        answer = {
            "num_parameters": model.num_parameters,
            "model": dataclasses.asdict(model),
            "layout": layout.id,
            "memory_bytes": float(held[least]),
            "rates": provenance(machine, given),
        }
        print(json.dumps(answer, indent=1))
        return 0
    kind, size = "GPT" if family is Family.GPT else "LLaMA", f"{model.num_parameters / 1e9:.3g}B parameters"
    shape = f"{model.num_layers} layers, hidden {model.hidden}, {model.seq_len} tokens"
    held_gib = f"{held[least] / GIB:.1f} GiB a gpu"
    print(f"the largest {kind} on {arguments.gpus} {machine.name}: {size} ({shape}), as {layout.id}, {held_gib}")
    print(provenance(machine, given))
    return 0


def _draw_timeline(found: Search, path: Path) -> None:
    from meshmark.plan.simulator import simulate
    from meshmark.plan.timeline import timeline_svg

    prediction, row = found.prediction, int(found.ranked[0])
    layout = prediction.grid.layout(row)
    # Reductions and the optimizer follow the pipeline and are not drawn.
    run = simulate(layout, stage_times(found, row))
    try:
        path.write_text(timeline_svg(run, f"{prediction.model.name}, {layout.id}, passes alone"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"timeline: {path}", file=sys.stderr)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine."""
    from meshmark.plan.calibrate import calibrate_here

    return calibrate_here(arguments.output, arguments.seconds, arguments.ranks)


def main(arguments: list[str] | None = None) -> int:
    """`python -m meshmark.plan.cli`."""
    parser = argparse.ArgumentParser(prog="meshmark", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="verb")
    for name, add in {"plan": add_plan, "predict": add_predict, "calibrate": add_calibrate}.items():
        add(verbs.add_parser(name))
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except MeshmarkError as error:
        print(f"meshmark: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
