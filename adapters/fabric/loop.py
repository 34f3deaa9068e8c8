"""A training loop as Fabric's guide writes it, with Fabric's own loader, precision, accumulation and checkpoints."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from meshmark.adapter.contract import Capabilities, Feature, Requirement, Track
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, Dealing, Loop, LoopEngine, collate
from meshmark.adapters.ddp import DDPRecommended
from meshmark.adapters.fabric import FABRIC, ON_CPU, launched
from meshmark.errors import AdapterError
from meshmark.models.transformer import Family
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share
from meshmark.spec.case import Case
from meshmark.spec.workload import Loss
from meshmark.theory.traffic import Flow, Purpose, TrafficException


class FabricLoop(Loop):
    """`setup_dataloaders` deals rows by `DistributedSampler`. Targets are counted over all ranks, by `all_reduce`."""

    def __init__(self, case: Case, context: RankContext) -> None:
        super().__init__(case, context, Dealing.ROWS)
        self._folder: Path | None = None

    def loader(self, fabric: Any) -> DataLoader[Any]:  # noqa: ANN401
        """Return the loader that Fabric has set up. Raise `AdapterError` where it deals no rows."""
        plain = DataLoader(self.rows, batch_size=self.rows_per_micro_batch, collate_fn=collate)
        prepared: Any = fabric.setup_dataloaders(plain)
        replicas = getattr(prepared.sampler, "num_replicas", 1)
        if replicas != self.context.world_size:
            raise AdapterError(f"Fabric's loader deals rows over {replicas} ranks of {self.context.world_size}")
        return prepared  # type: ignore[no-any-return]

    def run(self, checkpoint: Path | None) -> None:
        from lightning_fabric.strategies import DDPStrategy

        spec, count = self.case.workload.optimizer, self.case.layout.num_micro_batches
        fabric = launched(self.context, DDPStrategy(), "32-true")
        fabric.seed_everything(self.case.workload.seed, verbose=False)
        plain = initial_model(self.case, self.context.device)
        model, optimizer = fabric.setup(plain, build_optimizer(spec, plain.named_parameters()))
        self.start(fabric, model)
        schedule = build_schedule(spec, optimizer.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        if checkpoint:
            fabric.load(checkpoint / "state.ckpt", state)
        batches = itertools.islice(self.loader(fabric), state["step"] * count, None)
        self.ready(model._forward_module, optimizer.optimizer)
        while True:
            samples = list(itertools.islice(batches, count))
            targets = self.total(fabric, sum(batch.weights.sum() for batch in samples))
            total = torch.zeros((), device=fabric.device)
            for index, batch in enumerate(samples):
                with fabric.no_backward_sync(model, enabled=index < count - 1):
                    share = self.loss_share(fabric, model(batch.inputs), batch)
                    loss = share * batch.total_weight / targets
                    fabric.backward(loss * fabric.world_size)
                    total += loss.detach()
            self.gradients_complete(total)
            clip = spec.clip_norm
            norm = None if clip is None else fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()
            state["step"] += 1
            self.step_done(norm)
            if self._folder:
                fabric.save(self._folder / "state.ckpt", state)
                fabric.barrier()
                self._folder = None
                self.saved()

    def start(self, fabric: Any, model: Any) -> None:  # noqa: ANN401
        """Give the model other weights before the first step, as a variant may."""

    def total(self, fabric: Any, own: Any) -> Any:  # noqa: ANN401
        """Return the sum over ranks of a number of each."""
        return fabric.all_reduce(own, reduce_op="sum")

    def loss_share(self, fabric: Any, outputs: Tensor, batch: Batch) -> Tensor:  # noqa: ANN401
        return loss_share(outputs, batch, self.case.workload.loss)

    def save_to(self, folder: Path) -> None:
        self._folder = folder


class RawLoop(FabricLoop):
    """Weights come from a raw file of the first rank's (`load_raw`), at a path that it tells (`broadcast`); targets are
    counted by `all_gather`, and the loss is computed under `autocast`."""

    def start(self, fabric: Any, model: Any) -> None:  # noqa: ANN401
        path = fabric.broadcast(str(self.context.scratch / "weights.pt") if fabric.global_rank == 0 else "")
        if fabric.global_rank == 0:
            torch.save(model.state_dict(), path)
        fabric.barrier()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        fabric.load_raw(path, model)

    def total(self, fabric: Any, own: Any) -> Any:  # noqa: ANN401
        return fabric.all_gather(own).sum()

    def loss_share(self, fabric: Any, outputs: Tensor, batch: Batch) -> Tensor:  # noqa: ANN401
        with fabric.autocast():
            return super().loss_share(fabric, outputs, batch)


class FabricScript(DDPRecommended):
    """DDP by `Fabric`, in a loop of its own."""

    track: ClassVar = Track.THEORY
    requires: ClassVar[tuple[Requirement, ...]] = (*FABRIC, GREENLET)
    loop: ClassVar[type[FabricLoop]] = FabricLoop
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        devices=ON_CPU,
        lacks={**LOOP_LACKS, Feature.UNUSED: "DDP is not told of parameters that a step does not use"},
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.loss is Loss.OWN:
            return f"{case.adapter} does not support a user's own loss, of which it knows no weights"
        return super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        found, ranks = super().traffic_exceptions(case, rank), tuple(range(case.layout.dp))
        count = cls.counting(ranks, case.precision.wide.itemsize)
        return (*found, TrafficException(sends=(count,), reason="targets are counted over all ranks, once a step"))

    @classmethod
    def counting(cls, ranks: tuple[int, ...], size: int) -> Flow:
        """Return what is sent to count targets."""
        return Flow(kind="all_reduce", axes="dp", ranks=ranks, purpose=Purpose.LOSS, num_bytes=size, fewest=1, most=1)

    def build(self, case: Case, context: RankContext) -> Engine:
        return LoopEngine(case, context, self.loop(case, context))


class FabricRawScript(FabricScript):
    """With Fabric's other collectives, and weights from a raw file."""

    loop: ClassVar[type[FabricLoop]] = RawLoop

    @classmethod
    def counting(cls, ranks: tuple[int, ...], size: int) -> Flow:
        return replace(super().counting(ranks, size), kind="all_gather", num_bytes=size * len(ranks))
