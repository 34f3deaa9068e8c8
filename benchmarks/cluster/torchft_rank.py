"""One replica under torchft: `torchrun ... -m benchmarks.cluster.torchft_rank REQUEST.json NOTES REDUCER`. It writes a
line of every step that it commits; killed once, where the request is to lose a rank, and started again by its agent, it
takes all that it needs from a replica that lives."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from benchmarks.cluster.fault_tolerance import BACKWARD, DEATHS, UPDATE, Reducer
from meshmark.adapter.engine import DataParallelEngine, RankContext, initial_model
from meshmark.judge.trace import Trace, host_parameters
from meshmark.passes.observe import digests
from meshmark.records.request import Request, Task
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import build_optimizer
from meshmark.serial import decode


class ManagedEngine(DataParallelEngine):
    """`ddp` as torchft does it: gradients are reduced by its wrapper of the module, or by its manager itself."""

    def __init__(self, request: Request, context: RankContext, limit: datetime.timedelta, reducer: Reducer) -> None:
        """`limit`: for a replica that was killed to be back."""
        model = initial_model(request.case, context.device)
        own = build_optimizer(request.case.workload.optimizer, model.named_parameters(), request.case.tuning)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=self.load_state,
            state_dict=self.state,
            min_replica_size=context.world_size,
            init_sync=False,  # all start alike; else 0.2.0 commits a first step of which one replica's rows are missing
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            replica_id=f"replica{context.rank}",
        )
        self._wraps = reducer is Reducer.MODULE
        module = DistributedDataParallel(self.manager, model) if self._wraps else model
        super().__init__(request.case, context, module, OptimizerWrapper(self.manager, own))
        self.before: Callable[[str], None] = lambda what: None
        """Told what comes next."""
        self.committed = False
        """Whether the optimizer took the last step."""
        own.register_step_post_hook(lambda *_: setattr(self, "committed", True))

    def inner(self) -> nn.Module:
        inner: nn.Module = self.module.module if self._wraps else self.module  # type: ignore[assignment]
        return inner

    def backward(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()  # where torchft asks who is there
        return super().backward(batch)

    def differentiate(self, loss: Tensor) -> None:
        self.before(BACKWARD)
        super().differentiate(loss)

    def finish_gradients(self) -> None:
        if not self._wraps:
            for gradient in self.gradients().values():
                self.manager.allreduce(gradient).wait()

    def update(self) -> None:
        """If torchft commits it."""
        self.before(UPDATE)
        self.committed = False
        if (clip := self.case.workload.optimizer.clip_norm) is not None:
            self.clip(clip)
        self.optimizer.step()


def main(request: Request, notes: Path, reducer: Reducer, environ: Mapping[str, str]) -> None:
    """Train until all steps are committed."""
    replica, life = int(environ["REPLICA_GROUP_ID"]), int(environ["TORCHELASTIC_RESTART_COUNT"])
    context = RankContext(
        rank=replica, world_size=request.case.world_size, device=torch.device("cpu"), backend="gloo", scratch=notes
    )
    engine = ManagedEngine(request, context, datetime.timedelta(seconds=request.time_limit_seconds), reducer)
    manager = engine.manager

    def before(what: str) -> None:
        if request.task is Task.LOSE and not life and DEATHS[reducer].get(replica) == (manager.current_step(), what):
            os.kill(os.getpid(), signal.SIGKILL)

    engine.before = before
    with (notes / f"replica{replica}").open("a") as file:
        while (step := manager.current_step()) < request.steps:
            loss = float(engine.backward(make_batch(request.case.workload, step)))
            engine.update()
            if engine.committed:
                state = Trace(parameters=[host_parameters(engine, request.case.workload)])
                file.write(json.dumps({"step": step, "life": life, "loss": loss, "digest": digests([state])[0]}) + "\n")
                file.flush()


if __name__ == "__main__":
    main(
        decode(Request, json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]), Reducer(sys.argv[3]), os.environ
    )
    sys.stdout.flush()
    os._exit(0)  # its threads wait for peers that are gone
