"""Noise runs: how far rounding alone moves a run from the truth.

They give the tolerance model of every equivalence verdict.

The adapter `single` trains in a case's precision, in as many micro-batches as all of the case's ranks together. It
does so repeatedly, under perturbations as large as that precision's rounding: other orders of rows, changed last bits
of the initial values and, in mixed precision, both ways of casting (autocast, and casting the weights). A correct
framework differs from `single` only in this way, unless it was asked to round gradients before they are sent to other
ranks. In that case `single` rounds them as that many ranks would.

Sums over more rows at once round differently: the noise of a gradient in one micro-batch may be 1.6 times that in
eight. Runs with several numbers of micro-batches would give a mixture, and all runs of the noisiest number would lie
in its tail.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter, Arithmetic, Casting
from meshmark.adapter.engine import Engine, RankContext, begin_step
from meshmark.adapter.single import SingleEngine, reduced_backward
from meshmark.algorithms.contract import GradientRule, Tensors
from meshmark.environment import installed, machine
from meshmark.judge.deviation import Sample, num_replicas
from meshmark.judge.equivalents import with_equivalents
from meshmark.judge.layered import all_cores, assess_pieces
from meshmark.judge.tolerance_model import Comparisons, NoiseFloor, noise_run
from meshmark.judge.trace import Trace, host_copies, stored_copies
from meshmark.judge.truth import assess_replicas
from meshmark.judge.twin import Twin
from meshmark.models.config import ModelConfig
from meshmark.models.module import Block, random_bits, row_blocks
from meshmark.passes.judging import fingerprint
from meshmark.passes.kernels import ATTENTION, VARIABLES
from meshmark.passes.observe import MOST_LEFT_OUT
from meshmark.records.rank_report import RankReport
from meshmark.records.record import code_digest_of
from meshmark.records.request import Request
from meshmark.reference.data import Batch, data_digest
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import SYNCHRONOUS
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.precision import Dtype

# --- The optimizer of one replica, in the precision of its engine, for algorithms that ask for it.


class EngineRule:
    """Update rule of one replica, computed by an engine in its precision. Implements `UpdateRule`."""

    def __init__(self, engine: SingleEngine) -> None:
        self.engine = engine
        self.norm: float | None = None
        """Norm of the gradients of the last step, as reported by the engine."""

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        put(self.engine.parameters(), parameters)
        put(self.engine.gradients(), gradients)
        norm = self.engine.update()
        self.norm = None if norm is None else float(norm)
        return host_copies(self.engine.parameters())


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], values: Tensors) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(values[name]))


# --- Noise runs of pipelines whose gradients are of older weights.


def note_pipelined_step(
    gradient_rule: GradientRule,
    trace: Trace,
    rule: EngineRule,
    batch: Batch,
    arrange: Callable[[Batch], Batch],
) -> None:
    """Train one step by `gradient_rule` and note it in `trace`. `arrange` orders the rows of a part."""
    engine: SingleEngine = rule.engine
    trace.evaluations.append(float(engine.evaluate(arrange(batch))))

    def compute(parameters: Tensors, part: Batch, changed: Tensors | None) -> tuple[float, Tensors]:
        engine.optimizer.zero_grad()
        put(engine.parameters(), parameters)
        with nullcontext() if changed is None else _changed_between(engine, changed):
            loss = engine.backward(arrange(part))
        return float(loss), host_copies(engine.gradients())

    found = gradient_rule.step(trace.parameters, batch, compute)
    after = rule.step(trace.parameters[-1], found.gradients)
    there = found.after or after
    put(engine.parameters(), there)
    trace.losses.append(found.loss)
    trace.gradients.append(found.gradients)
    trace.left_out.append(0)
    trace.loss_scales.append(engine.loss_scale())
    trace.norms.append(rule.norm)
    trace.parameters.append(there)
    trace.buffers[0].append(host_copies(engine.buffers()))


@contextmanager
def _changed_between(engine: SingleEngine, values: Tensors) -> Iterator[None]:
    """Replace the parameters by `values` after the forward pass, so that the backward pass uses them."""

    def change(*_: object) -> None:
        for name, parameter in engine.parameters().items():
            parameter.data.copy_(torch.from_numpy(values[name]))

    handle = engine.module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


# --- Noise runs: the tolerance model of every equivalence verdict.

NUM_RUNS = 24
NUM_RANKS = 2
"""Number of processes that share the runs."""
TIME_LIMIT_SECONDS = 600.0
_PARTIAL = ".partial"
FORMAT = 14
"""Part of every key.

Raise it when anything that affects the noise changes: model, data, objective, truth, this file.
"""
_FILE_FORMAT = 3
"""Part of every key. Raise it when a file holds other fields."""


ARITHMETIC = (
    "OMP_",
    "MKL_",
    "KMP_",
    "ONEDNN_",
    "DNNL_",
    "ATEN_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_TF32_",
    "TORCH_ALLOW_TF32",
)
"""Prefixes of environment variables that choose kernels, their threads or their formats."""


def noise_key(case: Case, steps: int, device: str = "cpu", sample: Sample | None = None) -> str:
    """Return a content hash of everything that the noise of `case` depends on: the problem, and what computes it."""
    content = [
        FORMAT,
        _FILE_FORMAT,
        *_arithmetic(device),
        sample.steps if sample else steps,
        sample.noise_runs if sample else NUM_RUNS,
        encode(case.precision),
        encode(case.workload),
        data_digest(case.workload),
        num_chunks(case),
        *([case.layout.dp] if case.precision.narrows_reduction else []),
        *([num_replicas(case)] if num_replicas(case) > 1 else []),
        *([case.layout.pp, case.layout.num_micro_batches] if case.workload.algorithm.stale_weights else []),
        *(["twin"] if case.precision.is_mixed and sample is None else []),
        *(["sampled"] if sample else []),
        *([str(case.tuning.arithmetic)] if case.tuning.arithmetic else []),
        *_code_of(case.workload.model),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _code_of(model: ModelConfig) -> list[object]:
    """Return what tells the code of a user's own model, wherever it lies. Its id tells that of its own folder alone."""
    return [code_digest_of(model.target), installed("transformers")] if isinstance(model, OwnModelConfig) else []


def _arithmetic(device: str) -> list[object]:
    """Return what determines the order and the formats in which `device` computes.

    This process must not touch CUDA.
    """
    return [
        device,
        machine(device),
        torch.__version__,
        torch.version.git_version,
        torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(),
        sorted((name, value) for name, value in os.environ.items() if name.startswith(ARITHMETIC)),
        sorted(VARIABLES.items()),
        [backend.name for backend in ATTENTION],
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    ]


def noise_folder(results: Path) -> Path:
    """Return the folder of noise floors.

    It is next to the records, or the folder named by `MESHMARK_NOISE`, which several runs of one Meshmark can share.
    """
    shared = os.environ.get("MESHMARK_NOISE", "")
    return Path(shared) if shared else results / "noise"


def read_noise(path: Path) -> NoiseFloor | None:
    """Return the noise floor that `write_noise` wrote, or None if the file is damaged, or is a pipe.

    Raises `FileNotFoundError` if there is no file.
    """
    if path.exists() and not path.is_file():
        return None
    try:
        digest, _, text = path.read_text().partition("\n")
        whole = hashlib.sha256(text.encode()).hexdigest() == digest
        floor: NoiseFloor | None = decode(NoiseFloor, json.loads(text)) if whole else None
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        return None
    return floor if floor and floor.runs else None


def write_noise(path: Path, floor: NoiseFloor) -> None:
    """Write a noise floor atomically, so that another process reads a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(encode(floor))
    partial = path.with_suffix(f".{os.getpid()}.{time.time_ns()}{_PARTIAL}")
    try:
        partial.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Delete what runs that were killed during `write_noise` left. Call it only with exclusive use of the results."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        partial.unlink(missing_ok=True)


def backward(engine: SingleEngine, part: Batch, num_ranks: int) -> tuple[float, int]:
    """Return the loss, and how often loss scaling skipped the step. Skipped steps are tried again, as in the run
    itself.
    """
    left_out = 0
    while True:
        loss = engine.backward(part) if num_ranks == 1 else reduced_backward(engine, part, num_ranks)
        finite = all(bool(gradient.isfinite().all()) for gradient in engine.gradients().values())
        if finite or not engine.scaler.is_enabled() or left_out == MOST_LEFT_OUT:
            return float(loss), left_out
        engine.update()
        left_out += 1


def train_alone(request: Request, adapter: Adapter, context: RankContext, run: int) -> Comparisons:
    """Train one noise run. `run` seeds its perturbations and selects its way of casting.

    If replicas may differ, each is trained by its own engine on its own rows. Here the engines take turns.
    """
    workload, replicas, num_ranks = request.case.workload, num_replicas(request.case), ranks_that_round(request.case)
    options = workload.algorithm
    layout = Layout(num_micro_batches=num_chunks(request.case))
    alone = dataclasses.replace(workload, optimizer=options.local_optimizer(workload.optimizer), algorithm=SYNCHRONOUS)
    case = dataclasses.replace(request.case, adapter="single", layout=layout, workload=alone)
    engines = [cast(SingleEngine, adapter.build(case, context)) for _ in range(replicas)]
    for engine in engines:
        engine.cast_weights = bool(run % num_ways(case))
        vary_strides(engine.module, run // num_ways(case))
        perturb(engine, case, run)
    rules = [EngineRule(engine) for engine in engines]
    algorithm = options.transition(workload, rules, exact=False)
    algorithm.randomize(run, workload.seed)
    gradient_rule = options.gradient_rule(workload, request.case.layout)
    twin = (
        _twin(dataclasses.replace(case, workload=workload), run, num_ranks, replicas, engines[0])
        if case.precision.is_mixed
        else None
    )
    traces = [Trace(parameters=[host_copies(e.parameters())], buffers=[[host_copies(e.buffers())]]) for e in engines]
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        batch = [begin_step(engine, workload, step) for engine in engines][0]
        if gradient_rule:
            note_pipelined_step(
                gradient_rule, traces[0], rules[0], batch, lambda part: permute(part, case, run, num_ranks)
            )
            rank_progress.advance()
            continue
        parts = [permute(algorithm.part(batch, replica), case, run, num_ranks) for replica in range(replicas)]
        for trace, engine, part in zip(traces, engines, parts, strict=True):
            trace.evaluations.append(float(engine.evaluate(part)))
        losses = [backward(engine, part, num_ranks) for engine, part in zip(engines, parts, strict=True)]
        for trace, (loss, left_out) in zip(traces, losses, strict=True):
            trace.losses.append(loss)
            trace.left_out.append(left_out)
        for trace, own in zip(traces, algorithm.reported([host_copies(e.gradients()) for e in engines]), strict=True):
            trace.gradients.append(own)
        for trace, engine in zip(traces, engines, strict=True):
            trace.loss_scales.append(engine.loss_scale())
        after = algorithm.transition([t.parameters[-1] for t in traces], [t.gradients[-1] for t in traces])
        for trace, versions in zip(traces, algorithm.server_versions(step), strict=False):
            trace.versions.append(versions)
        for trace, engine, rule, there in zip(traces, engines, rules, after, strict=True):
            trace.norms.append(rule.norm)
            put(engine.parameters(), there)
            trace.parameters.append(there)
            trace.buffers[0].append(host_copies(engine.buffers()))
        rank_progress.advance()
    divided = request.case.layout if gradient_rule else dataclasses.replace(layout, dp=num_ranks)
    deviations = assess_replicas(traces, workload, start=traces[0].parameters[0], layout=divided, twin=twin)
    return noise_run(deviations, case.precision)


def _twin(case: Case, run: int, num_ranks: int, replicas: int, engine: SingleEngine) -> Twin:
    """Return the twin of a noise run, which sums in another order what the run sums."""
    layout = dataclasses.replace(case.layout, dp=num_ranks * replicas)
    casting = Casting.WEIGHTS if engine.cast_weights else Casting.AUTOCAST
    twin = Twin(
        case=dataclasses.replace(case, layout=layout),
        arithmetic=Arithmetic(casting=casting, averages=False, reduces_each=engine.cast_weights),
        device=engine.context.device,
        arrange=lambda batch: permute(batch, case, run, num_ranks),
        order=random_bits(f"ranks/{run}", (num_ranks,), seed=case.workload.seed).argsort().tolist(),
    )
    return with_equivalents(twin, run // num_ways(case))


def num_ways(case: Case) -> int:
    """Return the number of ways of casting that the runs alternate between."""
    return 2 if case.precision.is_mixed else 1


def variance_ratio(case: Case) -> float:
    """Return how much more the noise of one framework may vary than the noise of all runs.

    In mixed precision a framework casts in only one of the two ways between which the runs alternate. In float64 the
    truth is rounded as much as the run.
    """
    return 2.0 if case.precision.is_mixed or case.precision.compute is Dtype.FP64 else 1.0


def ranks_that_round(case: Case) -> int:
    """Return the number of ranks whose rounding in reductions is imitated."""
    return case.layout.dp if case.precision.narrows_reduction else 1


def num_chunks(case: Case) -> int:
    """Return the number of micro-batches in which a noise run trains.

    It is that of all ranks together, divided by the number of replicas and of ranks whose reduction is rounded.
    """
    if case.workload.algorithm.updates_by_micro_batch:
        return 1
    together = case.layout.dp * case.layout.num_micro_batches
    return max(together // (num_replicas(case) * ranks_that_round(case)), 1)


def permute(batch: Batch, case: Case, run: int, num_ranks: int) -> Batch:
    """Reorder the rows within the parts that are normalised together."""
    parts = num_ranks * case.layout.num_micro_batches if case.workload.couples_rows else 1
    drawn = random_bits(f"order/{run}", (len(batch),), seed=case.workload.seed).view(parts, -1)
    first = torch.arange(parts)[:, None] * drawn.shape[1]
    return batch.take((drawn.argsort(1) + first).flatten())


@torch.no_grad()
def vary_strides(module: nn.Module, run: int) -> None:
    """Store parameters row by row in every other run, as frameworks do that keep them in flat shards.

    They may have other strides, as in `channels_last`, by which a convolution picks the memory format of its output.
    """
    for parameter in module.parameters() if run % 2 else ():
        plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if plain.stride() != parameter.stride():
            parameter.data = plain.copy_(parameter)


@torch.no_grad()
def perturb(engine: Engine, case: Case, run: int) -> None:
    """Change initial values by up to half a unit in the last place of the precision of matrix products."""
    ulp = 2.0 ** -(case.precision.compute.mantissa_bits + 1)
    seed = case.workload.seed
    for name, parameter in engine.parameters().items():
        key, shape = f"perturbation/{run}/{name}", parameter.shape

        def change(block: Block, parameter: Tensor = parameter, key: str = key) -> None:
            """Change a block by random bits. They are drawn on the parameter's device, and are the same on every
            device.
            """
            bits = random_bits(key, parameter.shape, seed=seed, block=block, device=parameter.device)
            rows = parameter[block.offset[0] : block.offset[0] + block.shape[0]] if parameter.shape else parameter
            with torch.no_grad():  # a thread has its own
                rows.mul_(1 + (bits & 0xFFFF).to(torch.float64).div(0xFFFF).mul(2).sub(1) * ulp)

        blocks = row_blocks(Block(shape=shape, offset=[0] * len(shape)), parameter.device)
        with ThreadPoolExecutor(_threads(parameter)) as threads:
            list(threads.map(change, blocks))


def _threads(parameter: Tensor) -> int:
    """Return this process's share of the CPU's cores, or 1 on a GPU, which works through one queue."""
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 1 if parameter.device.type != "cpu" else max(len(os.sched_getaffinity(0)) // shared, 1)


# --- The pass that measures a noise floor. Of a large model it keeps a sample, with its tensors on disk.


def measure_noise(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Measure the noise of `request.case`'s workload and precision in this rank's share of the runs. `adapter` is
    `single`.
    """
    alone, sample = dataclasses.replace(context, rank=0, world_size=1), request.sample
    runs = range(context.rank, sample.noise_runs if sample else NUM_RUNS, context.world_size)
    if sample:
        noise_runs = [_train_sampled(request, adapter, alone, run, context.world_size) for run in runs]
    else:
        noise_runs = [train_alone(request, adapter, alone, run) for run in runs]
    return RankReport(
        rank=context.rank,
        build_seconds=0.0,
        run_seconds=time.time() - started,
        noise_runs=noise_runs,
        truth_print=None if context.rank else fingerprint(request, context.device),
    )


def _train_sampled(
    request: Request, adapter: Adapter, context: RankContext, run: int, num_processes: int
) -> Comparisons:
    """Train one noise run of a large model, like `train_alone`, while other processes do the same."""
    folder = context.scratch / f"run-{run}"
    assert request.sample
    try:
        trace = _trace(request, adapter, context, run, request.sample.steps, folder)
        gc.collect()  # the engine's memory is the truth's from here on
        with all_cores(share=num_processes):
            deviations = assess_pieces(trace, request.case.workload, trace.parameters[0], context.device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return noise_run(deviations, request.case.precision)


def _trace(request: Request, adapter: Adapter, context: RankContext, run: int, num_steps: int, folder: Path) -> Trace:
    workload, num_ranks = request.case.workload, ranks_that_round(request.case)
    layout = Layout(num_micro_batches=num_chunks(request.case))
    case = dataclasses.replace(request.case, adapter="single", layout=layout)
    engine = cast(SingleEngine, adapter.build(case, context))
    engine.cast_weights = bool(run % num_ways(case))
    vary_strides(engine.module, run // num_ways(case))
    perturb(engine, case, run)
    trace = Trace(parameters=[stored_copies(engine.parameters(), folder / "parameters-0")])
    rank_progress.begin(rank_progress.Phase.TRAIN, num_steps)
    for step in range(num_steps):
        loss, _ = backward(engine, permute(begin_step(engine, workload, step), case, run, num_ranks), num_ranks)
        trace.losses.append(loss)
        trace.gradients.append(stored_copies(engine.gradients(), folder / f"gradients-{step}"))
        norm = engine.update()
        trace.norms.append(None if norm is None else float(norm))
        trace.parameters.append(stored_copies(engine.parameters(), folder / f"parameters-{step + 1}"))
        rank_progress.advance()
    return trace
