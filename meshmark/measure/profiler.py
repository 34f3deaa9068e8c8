"""Run steps under PyTorch's profiler, with its Chrome trace."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from meshmark.measure.allocations import count_all_threads
from meshmark.measure.flight_recorder import IssuedOperation, dump, issued_operations
from meshmark.measure.laps import SteadyClock
from meshmark.measure.profile import Activity, ActivityKind, Profile, Span, read_profile

_OPERATORS = ("aten::", "Torch-Compiled Region", "CompiledFunction")
"""Prefixes of the names of computations on a CPU."""
_COLLECTIVES = "gloo:"


def profile_steps(
    step: Callable[[int], object], numbers: Sequence[int], device: torch.device, trace: Path | None
) -> Profile:
    """Call `step` with every number, and return the profile. `trace` is where to write the Chrome trace.

    Raises `ClockError` if the machine's clock was set meanwhile.
    """
    on_gpu, steps = device.type == "cuda", list[Span]()
    count_all_threads()
    clock = SteadyClock()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiled:
        for number in numbers:
            start = time.time_ns()
            step(number)
            if on_gpu:
                torch.cuda.synchronize(device)
            steps.append((start, time.time_ns()))
            clock.check()
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    results: Any = profiled.profiler.kineto_results
    events = list(_walk(results.experimental_event_tree()))
    found = list(_on_gpu(results.events()) if on_gpu else _on_cpu(events))
    return read_profile(
        found,
        steps,
        issued=_issued(found, steps),
        memory=sorted(
            (event.start_time_ns, event.extra_fields.total_allocated)
            for event in events
            if event.name == "[memory]" and event.extra_fields.device.type == device.type
        ),
        trace=f"{trace.parent.name}/{trace.name}" if trace else "",
    )


def _walk(roots: Sequence[Any]) -> Iterator[Any]:
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        yield event


def _on_cpu(events: Sequence[Any]) -> Iterator[Activity]:
    """Yield operators and collectives."""
    kinds = {_COLLECTIVES: ActivityKind.COMMUNICATION, **dict.fromkeys(_OPERATORS, ActivityKind.COMPUTE)}
    for event in events:
        kind = next((kind for start, kind in kinds.items() if event.name.startswith(start)), None)
        if kind:
            yield Activity(
                name=event.name,
                kind=kind,
                start_ns=event.start_time_ns,
                stop_ns=event.end_time_ns,
                called=tuple((c.start_time_ns, c.end_time_ns) for c in _called(event)),
            )


def _called(event: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield the nearest operators below an event."""
    for child in event.children:
        if child.name.startswith(_OPERATORS):
            yield child
        else:
            yield from _called(child)


def _on_gpu(events: Sequence[Any]) -> Iterator[Activity]:
    """Yield the activities of the GPU's streams.

    NCCL's kernels have "nccl" in their names in every version. Ranges named by `record_function` are excluded, because
    they span kernels and the gaps between them.
    """
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            name = event.name()
            kind = ActivityKind.COMMUNICATION if "nccl" in name.lower() else ActivityKind.COMPUTE
            yield Activity(name=name, kind=kind, start_ns=event.start_ns(), stop_ns=event.end_ns())


def _issued(found: Sequence[Activity], steps: Sequence[Span]) -> list[IssuedOperation]:
    """Return the collectives of the profiled steps with their durations.

    NCCL's recorder provides them (TORCH_NCCL_ENABLE_TIMING). For gloo the profiler does, with one event per
    collective, in order. Empty if the two do not match.
    """
    if not torch.distributed.is_initialized():
        return []
    groups = torch.distributed.distributed_c10d._world.pg_names
    ranks = {str(name): tuple(sorted(torch.distributed.get_process_group_ranks(g))) for g, name in groups.items()}
    issued = [
        one
        for one in issued_operations(dump().get("entries", []), ranks)
        if any(start <= one.time_ns < stop for start, stop in steps)
    ]
    if torch.distributed.get_backend() == "nccl":
        return issued
    told = sorted(a.span for a in found if a.kind is ActivityKind.COMMUNICATION)
    if len(told) != len(issued):
        return []
    return [
        dataclasses.replace(one, seconds=(stop - start) / 1e9) for one, (start, stop) in zip(issued, told, strict=True)
    ]
