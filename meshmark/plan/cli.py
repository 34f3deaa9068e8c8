"""The planner's commands: `plan`, `predict`, `calibrate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshmark.errors import InputError, UnknownNameError, refuse_records
from meshmark.models.model_text import is_description
from meshmark.models.transformer import Family, ModelSpec
from meshmark.plan.arguments import (
    DEFAULT_GPU,
    GPU_HELP,
    Given,
    add_other_names,
    add_setting,
    framework_given,
    given_by,
    refuse_other_name,
)
from meshmark.plan.frameworks import Asked, Framework, default_framework
from meshmark.plan.gpu_file import gpu_template
from meshmark.plan.layout_columns import METHODS, modules_of
from meshmark.plan.model_names import plan_model, size_note
from meshmark.plan.provenance import provenance
from meshmark.plan.search import (
    Search,
    layout_id,
    max_model,
    search,
    simulate_first,
    stage_times,
)
from meshmark.plan.search_text import print_paragraph, print_search, search_json
from meshmark.plan.stacks import stack_of
from meshmark.spec.hardware import GIB, Gpu
from meshmark.spec.layout import AXES, Layout, Offload, Recompute, RecomputeModule, Schedule, glossary
from meshmark.theory.grid import SEARCHED_SCHEDULES, SearchSpace, module_code
from meshmark.theory.recipe import NARROW, adapted

_USUAL_TOKENS = 8192
"""Longest sequence that models are usually trained on before they are extended."""
_DEFAULT_MODEL = "llama-8b"
_MOST = 10**9
_ONLY = {
    "dp": "data-parallel degrees",
    "tp": "tensor-parallel degrees",
    "pp": "pipeline stages",
    "virtual_stages": "chunks a stage",
    "zero_stage": "ZeRO stages",
    "micro_batch": "sequences in a micro-batch",
}
"""Options that narrow a search, by column of a grid."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`. Its `run` raises `InputError` for a user's mistake."""
    parser.epilog = glossary()
    parser.add_argument(
        "--model", help=f"a preset, a size such as gpt-175b, or a config.json; {_DEFAULT_MODEL} if none is given"
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs")
    parser.add_argument("--gpu", help=f"{GPU_HELP}; {DEFAULT_GPU} if not given")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences in one optimizer step")
    parser.add_argument("--seq-len", type=int, help="tokens in a sequence, if not the model's own")
    parser.add_argument(
        "--top", type=int, default=10, help="shapes to print, each with its fastest layout; with --json, layouts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--max-model", action="store_true", help="find the largest model of --model's family that fits")
    schedules = f"schedules to search: {', '.join(Schedule)}; by default {', '.join(SEARCHED_SCHEDULES)}"
    parser.add_argument("--schedules", metavar="A,B", help=schedules)
    parser.add_argument(
        "--cp", help="context-parallel degrees to search; by default those with 4,096 tokens or more per rank"
    )
    parser.add_argument("--ep", metavar="N,M", help="expert-parallel degrees to search; by default all")
    for name, told in _ONLY.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N,M", help=f"{told} to search; by default all")
    recomputed = f"kinds of recomputation to search: {', '.join(Recompute)}; by default all"
    parser.add_argument("--recompute", metavar="A,B", help=recomputed)
    parser.add_argument("--recompute-method", choices=METHODS, help="layers that full recomputation repeats")
    parser.add_argument(
        "--recompute-num-layers", type=int, metavar="N", help="number of layers per unit, or of a chunk's first layers"
    )
    parser.add_argument(
        "--recompute-modules", metavar="A,B", help=f"of selective recomputation: {', '.join(RecomputeModule)}"
    )
    parser.add_argument("--offload", choices=tuple(Offload), default="none", help="where optimizer states live")
    parser.add_argument(
        "--offload-layers", type=int, metavar="N", help="layers of a rank whose activations are in host memory"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA's adapters of this rank alone")
    parser.add_argument("--quantize", metavar="FORMAT", help="with --lora, frozen weights in nf4, as QLoRA has them")
    parser.add_argument("--replicas", type=int, metavar="N", help="groups of ranks that each hold all shards (HSDP)")
    parser.add_argument("--etp", type=int, metavar="N", help="tensor-parallel degree of each expert; by default 1")
    parser.add_argument("--gpu-template", action="store_true", help="print a template of a file for --gpu, and exit")
    parser.add_argument("--timeline", type=Path, metavar="SVG", help="draw the best layout's pipeline schedule")
    add_setting(parser)
    add_other_names(parser)
    parser.set_defaults(run=run_plan)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.add_argument("-o", "--output", type=Path, help="write the machine and its rates as JSON, for --gpu")
    parser.add_argument("--ranks", type=int, help="processes that measure together; by default one per GPU or core")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to spend")
    parser.set_defaults(run=run_calibrate)


def run_plan(arguments: argparse.Namespace) -> Search | None:
    """Search and print. Returns None if there is nothing to search."""
    refuse_other_name(arguments)
    model = plan_model(arguments.model or _DEFAULT_MODEL)
    family = Family.GPT if arguments.max_model and not arguments.model else model.family
    given = given_by(arguments, family)
    if arguments.gpu_template:
        print(gpu_template(given.machine, given.rates), end="")
        return None
    if arguments.gpus is None:
        raise InputError("--gpus is missing: how many GPUs are there?")
    _check_nodes(arguments)
    if arguments.timeline:
        _check_timeline(arguments)
    if arguments.max_model:
        _print_max_model(arguments, given, model if arguments.model else plan_model("gpt3-1.3b"))
        return None
    if told := size_note(arguments.model or _DEFAULT_MODEL):
        print(f"meshmark: {told}", file=sys.stderr)
    if arguments.seq_len is not None:
        model = dataclasses.replace(model, seq_len=arguments.seq_len)
    elif model.seq_len > _USUAL_TOKENS and is_description(text := arguments.model or "") and "seq_len=" not in text:
        told = f"sequences of {model.seq_len:,} tokens are the longest that the file allows; --seq-len plans others"
        print(f"meshmark: {told}", file=sys.stderr)
    if arguments.top < 1:
        raise InputError(f"--top is {arguments.top}, expected at least 1")
    start = time.perf_counter()
    space = _space(arguments, given.machine, model)
    using = adapted(given.using, _count(arguments, "lora") or 0, model, arguments.quantize or "")
    closed = search(model, space, given.machine, using, given.rates)
    found = simulate_first(closed, arguments.top)
    elapsed = time.perf_counter() - start
    if arguments.json:
        print(json.dumps(search_json(found, arguments.top, elapsed), indent=1))
    else:
        print_search(found, arguments.top, elapsed)
        print_paragraph(_trained_by(arguments, given))
    if arguments.timeline:
        _draw_timeline(found, arguments.timeline)
    return found


def _check_nodes(arguments: argparse.Namespace) -> None:
    """Raise `InputError` if the GPUs of more than one node do not fill nodes of --gpus-per-node."""
    gpus, node = arguments.gpus, arguments.gpus_per_node
    if node is not None and gpus > node and gpus % node:
        raise InputError(f"--gpus {gpus} --gpus-per-node {node}: expected whole nodes, so a multiple of {node} GPUs")


def _check_timeline(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for a --timeline that could not be written, before the search, which takes its time."""
    if arguments.max_model:
        raise InputError("--timeline with --max-model: a timeline is drawn of a searched layout; leave one of them out")
    path: Path = arguments.timeline
    if path.is_dir():
        raise InputError(f"--timeline {path}: it is a folder; name a file, such as {path / 'timeline.svg'}")
    if not path.parent.is_dir():
        raise InputError(f"--timeline {path}: there is no folder {str(path.parent)!r}; make it first")


def _space(arguments: argparse.Namespace, machine: Gpu, model: ModelSpec) -> SearchSpace:
    named = framework_given(arguments) or (default_framework(machine) if arguments.recipe is None else None)
    fixed = _fixed(arguments, model)
    asked = Asked(
        recompute_layers=arguments.recompute_num_layers is not None,
        recompute_modules=arguments.recompute_modules is not None,
        offload_layers="offload_layers" in fixed,
        lora=bool(arguments.lora),
        quantized=bool(arguments.quantize),
        precision=arguments.precision if arguments.precision in NARROW else "",
    )
    only = {name: _numbers(name, text) for name in _ONLY if (text := getattr(arguments, name)) is not None}
    contexts, schedules = _contexts(arguments.cp), _schedules(arguments.schedules)
    if named and (told := _lacking(named, asked, {**only, "cp": contexts or [1]}, schedules or ())):
        raise InputError(f"{told}; name another --framework, or only a --recipe")
    if schedules is None:
        interleaves = named is None or named.interleaves
        schedules = [each for each in SEARCHED_SCHEDULES if interleaves or each is not Schedule.INTERLEAVED]
    axes, recomputes = named.axes if named else AXES, _recomputes(arguments)
    if named and named.is_megatron_core and "offload_layers" in fixed:  # it has them neither in pipelines nor beside
        axes = tuple(axis for axis in axes if axis != "pp")
        if Recompute.NONE not in recomputes:
            raise InputError(f"framework {named.name} does not train with --offload-layers beside recomputation")
        recomputes = [Recompute.NONE]
    return SearchSpace(
        num_gpus=arguments.gpus,
        global_batch=arguments.global_batch,
        offload=Offload(arguments.offload),
        schedules=schedules,
        contexts=contexts,
        experts=_experts(arguments.ep, named),
        axes=axes,
        zero_stages=named.zero_stages if named else None,
        recomputes=recomputes,
        fixed=fixed,
        only=only,
    )


def _lacking(
    named: Framework, asked: Asked, degrees: Mapping[str, Sequence[int]], schedules: Sequence[Schedule]
) -> str | None:
    """Return the options of the command line that a framework does not support, in words, or None."""
    parts: dict[str, int | Schedule] = {axis: 2 for axis in AXES if max(degrees.get(axis, (1,))) > 1}
    if Schedule.INTERLEAVED in schedules or max(degrees.get("virtual_stages", (1,))) > 1:
        parts |= {"pp": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED}
    for stage in degrees.get("zero_stage", named.zero_stages[:1]):
        layout = Layout(**{"dp": 2, **parts}, zero_stage=stage)  # type: ignore[arg-type]
        if told := named.beyond(layout, asked):
            return told
    return None


def _experts(text: str | None, named: Framework | None) -> list[int] | None:
    """Return the expert-parallel degrees to search, or None for all. A framework without experts has degree one."""
    degrees = None if text is None else _numbers("ep", text)
    if named is None or named.experts:
        return degrees
    if degrees and set(degrees) != {1}:
        raise InputError(
            f"--ep {text}: framework {named.name} has no expert parallelism; name another framework, or only a --recipe"
        )
    return [1]


def _recomputes(arguments: argparse.Namespace) -> list[Recompute]:
    """Return the recomputation to search. Layers go with full recomputation alone, and modules with selective."""
    text = arguments.recompute
    counted = arguments.recompute_method is not None or arguments.recompute_num_layers is not None
    if counted and arguments.recompute_modules is not None:
        raise InputError("--recompute-modules is for selective recomputation, --recompute-method for full: omit one")
    needed = Recompute.FULL if counted else Recompute.SELECTIVE if arguments.recompute_modules is not None else None
    names = list(Recompute) if text is None else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in tuple(Recompute):
            raise UnknownNameError("recomputation", name, Recompute)
    if needed and text is not None and set(names) != {needed}:
        option = "--recompute-method" if counted else "--recompute-modules"
        raise InputError(f"--recompute {text}: {option} is of {needed} recomputation; say {needed}, or leave it out")
    return [needed] if needed else [Recompute(name) for name in names]


def _fixed(arguments: argparse.Namespace, model: ModelSpec) -> dict[str, int]:
    """Return the columns of a grid that the command line fixes."""
    method, count = arguments.recompute_method, _count(arguments, "recompute_num_layers")
    if (method is None) != (count is None):
        raise InputError("--recompute-method and --recompute-num-layers come together; one is missing")
    found = {name: _count(arguments, name) for name in ("replicas", "etp", "offload_layers")}
    found["recompute_layers" if method == "block" else "recompute_unit"] = count
    if arguments.recompute_modules is not None:
        found["recompute_modules"] = module_code(modules_of(arguments.recompute_modules, model))
    if found["etp"] and not model.routing_share:
        raise InputError(f"--etp {found['etp']}: {model.name!r} has no experts")
    if found["offload_layers"] and arguments.offload == Offload.NVME:
        raise InputError("--offload-layers with --offload nvme: activations are planned in host memory; say cpu")
    return {name: value for name, value in found.items() if value is not None}


def _count(arguments: argparse.Namespace, name: str) -> int | None:
    value: int | None = getattr(arguments, name)
    if value is not None and not 1 <= value <= _MOST:
        raise InputError(f"--{name.replace('_', '-')} is {str(value)[:40]}, expected 1 to {_MOST:,}")
    return value


def _numbers(name: str, text: str) -> list[int]:
    option, least = f"--{name.replace('_', '-')} {text!r}", 0 if name == "zero_stage" else 1
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{option}: expected whole numbers with commas between") from error
    if min(numbers) < least:
        raise InputError(f"{option}: {min(numbers)} is too small, expected at least {least}")
    return numbers


def _trained_by(arguments: argparse.Namespace, given: Given) -> str:
    """Return a sentence about the framework or recipe whose bytes per parameter were used."""
    if named := framework_given(arguments):
        return f"Planned for {named.name}: {named.describe(given.using)}."
    if arguments.recipe is not None:
        return f"Planned by recipe {arguments.recipe}, with any axis; --framework plans for one that has a name."
    usual = default_framework(given.machine)
    return f"Planned for {usual.name}, as no --framework is given: {usual.describe(given.using)}."


def _contexts(text: str | None) -> list[int] | None:
    return None if text is None else _numbers("cp", text)


def _schedules(text: str | None) -> list[Schedule] | None:
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in tuple(Schedule):
            raise UnknownNameError("schedule", name, Schedule)
    return None if text is None else [Schedule(name) for name in names]


def _print_max_model(arguments: argparse.Namespace, given: Given, model: ModelSpec) -> None:
    machine, family = given.machine, model.family
    if arguments.lora:
        raise InputError("--lora with --max-model: adapters are planned of a model; name one, without --max-model")
    model, grid, held = max_model(
        _space(arguments, machine, model), machine, given.using, given.rates, family=family, seq_len=arguments.seq_len
    )
    least = int(held.argmin())
    named = layout_id(grid, least)
    if arguments.json:
        answer = {
            "num_parameters": model.num_parameters,
            "model": dataclasses.asdict(model),
            "layout": named,
            "memory_bytes": float(held[least]),
            "rates": provenance(machine, given.rates, stack_of(given.using.name)),
        }
        print(json.dumps(answer, indent=1))
        return
    kind, size = "GPT" if family is Family.GPT else "LLaMA", f"{model.num_parameters / 1e9:.3g}B parameters"
    shape = f"{model.num_layers} layers, hidden {model.hidden}, {model.seq_len} tokens"
    held_gib = f"{held[least] / GIB:.1f} GiB a gpu"
    told = f"the largest {kind} on {arguments.gpus} {machine.name}: {size} ({shape}), as {named}, {held_gib}"
    print_paragraph(told)
    print_paragraph(provenance(machine, given.rates, stack_of(given.using.name)))


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
    """Measure this machine. Raises `InputError` for an output that holds records."""
    from meshmark.plan.calibrate import calibrate_here

    if arguments.output:
        refuse_records(arguments.output)  # before the measurement, which takes its time
    return calibrate_here(arguments.output, arguments.seconds, arguments.ranks)
