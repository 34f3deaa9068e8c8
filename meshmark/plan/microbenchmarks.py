"""Microbenchmarks of `calibrate`: the few operations of a training step, on one device and between ranks.

All ranks measure at the same time, as in training, and the slowest rank counts. Of the repetitions the fastest counts,
because other load on a shared machine only adds time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

_MOST_SAMPLES, _FEWEST_SAMPLES = 200, 3
_SAMPLE_SECONDS = 1e-3
"""Shortest duration of a sample in seconds.

Shorter operations are repeated, so that clock and launch do not dominate.
"""


_MOST_QUEUED = 50
"""Most runs of a sample on a GPU, each of up to about twenty kernels."""
_QUEUE_CYCLES = 2_000_000
"""GPU cycles, about a millisecond: an upper bound for the host's time to launch one run, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One operation at one size."""

    kind: str
    """product, attention, elementwise, copy, or a collective: all_gather, reduce_scatter, all_reduce."""
    dtype: str
    size: int
    """Width of a product, tokens of an attention, or bytes."""
    seconds: float
    """Fastest of the repetitions, on the slowest rank."""
    work: float
    """FLOPs of products and attention; bytes of everything else."""

    @property
    def rate(self) -> float:
        """FLOP/s, or bytes per second."""
        return self.work / self.seconds


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Times operations on one device, simultaneously on every rank."""

    device: torch.device
    world: int = 1
    collectives: int = 40
    """How often each collective is timed, equal on every rank."""

    def seconds(self, run: Callable[[], object], budget: float) -> float:
        """Return the time of the fastest run, within a budget of about `budget` seconds."""
        run()
        self._together()
        first = max(self._sample(run, 1, alone=True), 1e-7)
        inner = self._repeats(first)
        count = int(max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, budget / (inner * first))))
        return self.slowest(min(self._sample(run, inner, alone=True) / inner for _ in range(count)))

    def collective_seconds(self, run: Callable[[], object]) -> float:
        """Return the time of the fastest run of an operation that all ranks take part in, equally often."""
        run()
        self._together()
        inner = self._repeats(self.slowest(max(self._sample(run, 1), 1e-7)))
        return self.slowest(min(self._sample(run, inner) / inner for _ in range(self.collectives)))

    def _repeats(self, seconds: float) -> int:
        """Return how often to repeat an operation of this duration within a sample.

        A GPU's queue holds about a thousand launches. With more, the host would wait, and then the GPU for the host.
        """
        wanted = max(1, math.ceil(_SAMPLE_SECONDS / seconds))
        return min(wanted, _MOST_QUEUED) if self.device.type == "cuda" else wanted

    def slowest(self, seconds: float) -> float:
        """Return the maximum over all ranks."""
        if self.world == 1:
            return seconds
        value = torch.tensor(seconds, device=self.device, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    def _together(self) -> None:
        if self.world > 1:
            dist.barrier()

    def _sample(self, run: Callable[[], object], inner: int, *, alone: bool = False) -> float:
        """Return the seconds of `inner` runs.

        A computation `alone` on one core is timed by processor time, so that other users of the core do not count.
        Communication with other ranks cannot be timed this way.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # Keep the GPU busy until all runs are queued. Otherwise the launches, and so the host, would determine the
            # time of a run that is shorter than its launches.
            torch.cuda._sleep(_QUEUE_CYCLES * inner)  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(inner):
                run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        clock = time.process_time if alone and torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        for _ in range(inner):
            run()
        return clock() - begin


def name_of(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def measure_product(bench: Bench, dtype: torch.dtype, width: int, tokens: int, budget: float) -> Measurement:
    """Measure a feed-forward matrix product of a model of this width, forward and backward."""
    x, w, g = (
        torch.randn(*shape, device=bench.device, dtype=dtype)
        for shape in ((tokens, width), (4 * width, width), (tokens, 4 * width))
    )
    x.requires_grad_()
    w.requires_grad_()
    seconds = bench.seconds(lambda: torch.autograd.grad(F.linear(x, w), (x, w), g), budget)
    work = 6.0 * tokens * 4 * width * width
    return Measurement(kind="product", dtype=name_of(dtype), size=width, seconds=seconds, work=work)


def measure_attention(bench: Bench, dtype: torch.dtype, length: int, budget: float) -> Measurement:
    """Measure PyTorch's causal attention, forward and backward.

    FLOPs are those of a flash kernel, which recomputes the scores, over the causal half (arXiv:2307.08691 sec. 3): 7
    s^2 h.
    """
    heads, width = 8, 64
    q, k, v, g = (torch.randn(2, heads, length, width, device=bench.device, dtype=dtype) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def run() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, g)

    seconds = bench.seconds(run, budget)
    work = 2.0 * 7.0 * length * length * heads * width
    return Measurement(kind="attention", dtype=name_of(dtype), size=length, seconds=seconds, work=work)


def measure_elementwise(bench: Bench, dtype: torch.dtype, width: int, tokens: int, budget: float) -> Measurement:
    """Measure a GPT layer's norms, residual additions and GELU, forward and backward.

    `work` is the bytes that the planner counts for them: 44 h + 10 f per token, for 16-bit elements (`step_time`).
    """
    x = torch.randn(tokens, width, device=bench.device, dtype=dtype, requires_grad=True)
    f = torch.randn(tokens, 4 * width, device=bench.device, dtype=dtype, requires_grad=True)
    scale = torch.ones(width, device=bench.device, dtype=dtype, requires_grad=True)
    gx, gf = torch.ones_like(x), torch.ones_like(f)

    def run() -> None:
        one = x + F.layer_norm(x, (width,), scale, scale)
        two = one + F.layer_norm(one, (width,), scale, scale)
        torch.autograd.grad((two, F.gelu(f)), (x, f, scale), (gx, gf))

    work = tokens * (44.0 + 40.0) * width * x.element_size() / 2.0
    seconds = bench.seconds(run, budget)
    return Measurement(kind="elementwise", dtype=name_of(dtype), size=x.nbytes, seconds=seconds, work=work)


def measure_copy(bench: Bench, num_bytes: int, budget: float) -> Measurement:
    """Measure a copy within device memory. Bytes read and written both count."""
    source = torch.zeros(num_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source), budget)
    return Measurement(kind="copy", dtype="fp32", size=num_bytes, seconds=seconds, work=2.0 * num_bytes)


def measure_collectives(bench: Bench, sizes: list[int], group: dist.ProcessGroup | None = None) -> list[Measurement]:
    """Measure collectives of tensors of `sizes` bytes, each into or out of one tensor, as sharding uses them.

    Collectives on lists of parts would copy these together first. `work` is what a rank sends in a ring.
    """
    world, out = dist.get_world_size(group), []
    for size in sizes:
        whole = torch.zeros(size // 4 // world * world, device=bench.device)
        part = torch.zeros(whole.numel() // world, device=bench.device)
        for kind, run, times in (
            ("all_gather", lambda w=whole, p=part: dist.all_gather_into_tensor(w, p, group=group), 1.0),
            ("reduce_scatter", lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w, group=group), 1.0),
            ("all_reduce", lambda w=whole: dist.all_reduce(w, group=group), 2.0),
        ):
            seconds = bench.collective_seconds(run)
            sent = times * whole.nbytes * (world - 1) / world
            out.append(Measurement(kind=kind, dtype="fp32", size=whole.nbytes, seconds=seconds, work=sent))
    return out


def measure_overlap(bench: Bench, dtype: torch.dtype, width: int, tokens: int, num_bytes: int) -> float:
    """Return the share of an all-reduce's time, 0 to 1, that is hidden behind simultaneous products."""
    x, w = torch.randn(tokens, width, device=bench.device, dtype=dtype), torch.randn(width, width, dtype=dtype)
    w, buffer = w.to(bench.device), torch.zeros(num_bytes // 4, device=bench.device)
    alone = bench.collective_seconds(lambda: dist.all_reduce(buffer))
    one = bench.collective_seconds(lambda: x @ w)
    count = max(1, int(1.5 * alone / one))

    def compute() -> None:
        for _ in range(count):
            x @ w

    def both() -> None:
        pending = dist.all_reduce(buffer, async_op=True)
        compute()
        assert pending is not None
        pending.wait()

    computing, together = bench.collective_seconds(compute), bench.collective_seconds(both)
    return min(1.0, max(0.0, (alone + computing - together) / min(alone, computing)))
