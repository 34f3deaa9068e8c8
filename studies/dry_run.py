"""One rank of a world of thousands, alone on this machine: its adapter's real engine over PyTorch's fake process group,
which answers every collective without a peer. What it holds and asks for is read by the meters of the suites and judged
as they judge it. What it computes means nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from meshmark import rank_progress
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.adapter.traffic_source import Transfer
from meshmark.environment import describe
from meshmark.measure.memory import read_memory
from meshmark.measure.readings import TrafficReading
from meshmark.measure.traffic import sum_transfers, transfer_of
from meshmark.measure.watch import POINT_TO_POINT, AskedOperation, Operand, Watch
from meshmark.passes.observer import Observer
from meshmark.records.record import MemoryEvidence, Outcome, Record, Status, TrafficEvidence
from meshmark.records.request import Request, Task
from meshmark.reference.data import make_batch
from meshmark.run.assemble import declare
from meshmark.run.memory_verdict import STATE_TOLERANCE, Held, memory_categories, memory_totals
from meshmark.run.traffic_verdict import judge_communication
from meshmark.spec.case import Case
from meshmark.theory.traffic import METERED_STEP

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

_FUNCTIONAL = {
    "all_reduce": ("allreduce_", 0),
    "all_reduce_": ("allreduce_", 0),
    "all_gather_into_tensor": ("_allgather_base_", 0),
    "reduce_scatter_tensor": ("_reduce_scatter_base_", 1),
    "broadcast": ("broadcast_", 0),
}
"""What DTensor calls, and the call of c10d that it is: by that one's name, and which of its arguments counts."""
_NO_CALLS = ("wait_tensor", "_wrap_tensor_autograd")
_ENDS = {"send": 2, "recv_": 2}
"""Which argument of a message tells the peer's place in the group."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What came of one rank, in words."""

    case: Case
    rank: int
    traffic: str
    memory: str
    seconds: float
    failures: list[str]
    """Why theory and this run do not agree."""


def dry_run(case: Case, adapter: str, rank: int) -> DryRun:
    """Memory of `rank`'s third step and traffic of its fourth against theory, by the rules of the suites. Must run in a
    process without a process group."""
    started = time.monotonic()
    request = Request(
        case=case,
        adapter=adapter,
        task=Task.OBSERVE,
        device="cpu",
        backend="fake",
        steps=METERED_STEP + 2,
        assess=False,
        time_limit_seconds=600,
    )
    torch.manual_seed(case.workload.seed + rank)
    with _alone_in(case.world_size, rank), tempfile.TemporaryDirectory() as folder:
        context = RankContext(
            rank=rank,
            world_size=case.world_size,
            device=torch.device("cpu"),
            backend="gloo",
            scratch=Path(folder),
        )
        record, counters = _watched(request, context)
    sent, held = judge_communication(record), _held(record, counters)
    assert sent, f"theory plans no traffic of {case.id}"
    judged = [one for one in held if one.category != "peak"]
    wrong = [one for one in judged if one.error > STATE_TOLERANCE]
    failures = [f"{one.category}: {one.measured:,.0f} bytes, planned {one.planned:,.0f}" for one in wrong]
    return DryRun(
        case=case,
        rank=rank,
        traffic="to the byte" if sent.passed else f"{sent.evidence['differences']} flows differ",
        memory=f"{max(one.error for one in judged):.2%}",
        seconds=time.monotonic() - started,
        failures=failures if sent.passed else [sent.summary, *failures],
    )


def _held(record: Record, counters: int) -> list[Held]:
    """What the memory suite compares, of the one rank that there is. `counters`: bytes of the optimizer's count of
    steps, a tensor each, which beside one of a thousand shards are no longer little, and which nobody plans."""
    reading, plan, declared = record.memory.readings[0], record.memory.planned[0], record.memory.extra_memory[0]
    assert plan, f"theory plans no memory of {record.case.id}"
    states = memory_categories(reading, plan, declared, with_activations=True)
    found = [
        Held(
            category=name,
            rank=0,
            measured=measured - (counters if name == "optimizer_states" else 0),
            planned=planned,
        )
        for name, measured, planned in states
    ]
    return [*found, *memory_totals(0, reading, plan, declared, on_cpu=True)]


def _watched(request: Request, context: RankContext) -> tuple[Record, int]:
    """The record of this one rank, and the bytes of its optimizer's scalars."""
    case, adapter = request.case, load_adapter(request.adapter)
    make_batch(case.workload, 0)  # as in the instrumented pass: the data set is ours
    with Watch(context.device) as watch:
        engine = adapter().build(case, context)
        _tell_stages(engine, case)
        _answer_reducer(engine)
        rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
        observer = Observer(engine, request)
        for step in range(METERED_STEP):
            observer.train(step, watch)
        watch.focus()
        before, after = observer.train(METERED_STEP, watch)
    if observer.unheld:
        raise AssertionError(observer.unheld)
    with _Asked() as asked:  # a step of its own: no meter sees what another one makes
        observer.train(METERED_STEP + 1)
    counters = sum(t.nbytes for t in observer.holdings().optimizer_states if t.dim() == 0)
    declared = declare(adapter, case, [context.rank])
    record = Record(
        case=case,
        adapter=request.adapter,
        task=request.task,
        steps=request.steps,
        environment=describe(request.device, request.backend, 1),
        outcome=Outcome(status=Status.OK),
        memory=MemoryEvidence(
            readings=[read_memory(watch, METERED_STEP, before, after)],
            planned=declared.states,
            extra_memory=declared.extra_memory,
        ),
        traffic=TrafficEvidence(
            readings=[TrafficReading(asked=sum_transfers(asked.transfers), issued=[])],
            planned=declared.traffic,
            traffic_exceptions=declared.traffic_exceptions,
        ),
        unmeasured=declared.failed,
    )
    return record, counters


@contextlib.contextmanager
def _alone_in(world_size: int, rank: int) -> Iterator[None]:
    """A process group in which nobody else exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Asked(TorchDispatchMode):
    """Notes every collective and message that is asked for, with its group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.transfers: list[Transfer] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):  # it makes collectives of its operators itself
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self._note(f"c10d::{name}", args)
        elif namespace == "_c10d_functional" and name not in _NO_CALLS:
            called, argument = _FUNCTIONAL[name]
            operands = [(), ()]
            operands[argument] = [result if argument == 0 else args[0]]
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self._note(f"c10d::{called}", operands, group)
        return result

    def _note(self, name: str, arguments: Sequence[Any], group: dist.ProcessGroup | None = None) -> None:
        group = group or next(found for found in map(_group, arguments) if found)
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in POINT_TO_POINT:
            ends = {dist.get_rank(), ranks[arguments[_ENDS[name.removeprefix("c10d::")]]]}
            ranks = tuple(sorted(ends))
        operands = tuple(tuple(_operands(argument)) for argument in arguments)
        operation = AskedOperation(name=name, time_ns=0, operands=operands)
        self.transfers.append(transfer_of(operation, tuple(sorted(ranks))))


def _group(argument: object) -> dist.ProcessGroup | None:
    """The process group that an operator's argument is."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):  # type: ignore[attr-defined]
        return dist.ProcessGroup.unbox(argument)
    return None


def _operands(argument: object) -> Iterator[Operand]:
    if isinstance(argument, list | tuple):
        for part in argument:
            yield from _operands(part)
    elif isinstance(argument, Tensor):
        yield Operand(num_bytes=argument.numel() * argument.element_size(), address=argument.data_ptr())


def _tell_stages(engine: Engine, case: Case) -> None:
    """Stages of PyTorch's pipelines ask their neighbours before the first step for the shapes that they will be sent;
    nobody would answer."""
    from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas

    layout, model = case.layout, case.workload.model
    rows = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
    stages: Sequence[PipelineStage] = getattr(engine, "stages", ())
    for stage in stages:
        stream = torch.empty(rows, model.seq_len, model.hidden, requires_grad=True)
        tokens = torch.empty(rows, model.seq_len, dtype=torch.int64)
        stage._user_meta = _StageMeta(
            inputs=extract_tensor_metas((tokens if stage.is_first else stream,)),
            outputs=extract_tensor_metas((stream,)),
        )
        stage._warmup_forward_vote = stage._warmup_backward_result = _all_know  # type: ignore[method-assign]


def _answer_reducer(engine: Engine) -> None:
    """DDP's reducer takes its buckets from what its all-reduce promises, and a fake one promises nothing: this asks for
    the same all-reduce of the same bucket, and hands it back."""
    module = getattr(engine, "module", None)
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, lambda state, bucket: _all_reduce(bucket))


def _all_reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _all_know(*_: object, **__: object) -> Tensor:
    """The vote of all stages that shapes are known."""
    return torch.ones(1, dtype=torch.int32)
