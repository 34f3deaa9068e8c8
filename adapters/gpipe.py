"""Pipeline parallelism with PyTorch's torch.distributed.pipelining under the GPipe schedule (arXiv:1811.06965)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from meshmark.adapter.capabilities import Capabilities
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import AUTOCAST, configure, optimizer_state_tensors, skip_block
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.holdings import Holdings
from meshmark.adapters.checkpoint import load_sharded, save_sharded
from meshmark.reference.data import Batch
from meshmark.reference.model import drawn_name
from meshmark.reference.objective import build_optimizer, build_schedule, cross_entropy
from meshmark.reference.transformer import Transformer, stage_layers
from meshmark.spec.case import Case
from meshmark.spec.model_spec import TEXT_FAMILIES, Family
from meshmark.spec.precision import Precision
from meshmark.theory.states import Remainder, micro_batch_tokens


class Part(nn.Module):
    """One stage's layers under the case's precision; between stages the residual stream stays in the wide one."""

    def __init__(self, layers: Transformer, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.layers, self.dtype, self.device_type = layers, AUTOCAST.get(precision), device.type

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None):
            out: Tensor = self.layers(x)
        return out


class GPipeEngine(Engine):
    def __init__(self, case: Case, context: RankContext) -> None:
        self.case, self.context = case, context
        self.first, self.last = context.rank == 0, context.rank == case.layout.pp - 1
        with context.device:
            self.model = Transformer(
                case.workload.transformer, stage_layers(case.workload.transformer, case.layout.pp, context.rank)
            )
        self.model.initialize(case.workload.seed)
        if case.precision is Precision.FP64:
            self.model.double()
        configure(self.model, case)
        self.optimizer = build_optimizer(case.workload.optimizer, self.model.named_parameters())
        self.learning_rates = build_schedule(case.workload.optimizer, self.optimizer)
        part = Part(self.model, case.precision, context.device)
        stage = PipelineStage(part, context.rank, case.layout.pp, context.device)
        # scale_grads divides by the number of micro-batches, which is wrong for a loss that is a share already.
        self.schedule = ScheduleGPipe(stage, case.layout.num_micro_batches, loss_fn=self._loss, scale_grads=False)
        self.tied_group = self._tied_group()
        self.total_weight = 0.0

    def _tied_group(self) -> dist.ProcessGroup | None:
        """First and last stage, when both hold the tied weight. Every rank must call this."""
        if not self.case.workload.model.tied_embeddings:
            return None
        group: dist.ProcessGroup = dist.new_group([0, self.case.layout.pp - 1])
        return group if self.first or self.last else None

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return cross_entropy(logits_BTV, targets_BT) / self.total_weight

    def backward(self, batch: Batch) -> Tensor:
        total = self._run(self.schedule.step, batch)
        if self.tied_group is not None:
            dist.all_reduce(self._tied_weight().grad, group=self.tied_group)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        self.model.eval()
        total = self._run(self.schedule.eval, batch)
        self.model.train()
        return total

    def _run(self, pipeline: Callable[..., object], batch: Batch) -> Tensor:
        """`batch` through one of the schedule's ways to run; this rank's share of the loss."""
        whole = batch.to(self.context.device)
        self.total_weight = whole.total_weight
        skip_block(self.model, batch)
        losses: list[Tensor] = []
        inputs = (whole.inputs,) if self.first else ()
        pipeline(*inputs, target=whole.targets if self.last else None, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else torch.zeros(())

    def _tied_weight(self) -> nn.Parameter:
        if self.model.embedding is not None:
            return cast(nn.Parameter, self.model.embedding.tokens.weight)
        assert self.model.head is not None
        return cast(nn.Parameter, self.model.head.output.weight)

    def update(self) -> Tensor | None:
        max_norm = self.case.workload.optimizer.clip_norm
        norm = None if max_norm is None else self._clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.learning_rates:
            self.learning_rates.step()
        return norm

    def _clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages, a tied weight counted once; PyTorch leaves this sum to its user."""
        counted = [
            p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None and drawn_name(self.model.spec, name) == name
        ]
        square = nn.utils.get_total_norm(counted).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    def parameters(self) -> Mapping[str, Tensor]:
        return {drawn_name(self.model.spec, name): p.detach() for name, p in self.model.named_parameters()}

    def gradients(self) -> Mapping[str, Tensor]:
        return {
            drawn_name(self.model.spec, name): p.grad for name, p in self.model.named_parameters() if p.grad is not None
        }

    def save(self, folder: Path) -> None:
        save_sharded(folder, self.model, self.optimizer, self.learning_rates)

    def load(self, folder: Path) -> None:
        load_sharded(folder, self.model, self.optimizer, self.learning_rates)

    def holdings(self) -> Holdings:
        parameters = list(self.model.parameters())
        return Holdings(
            parameters=[p.detach() for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer_states=optimizer_state_tensors(self.optimizer),
            communication=_receive_buffers(self.schedule),
        )


def _receive_buffers(schedule: Any) -> list[Tensor]:  # noqa: ANN401
    """What a stage receives activations and their gradients into; allocated once, one a micro-batch."""
    found: list[Tensor] = []
    stage = schedule._stage
    for buffers in (stage.args_recv_info, getattr(stage, "grad_recv_info", {})):
        for infos in buffers.values():
            found += [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor)]
    return found


class GPipe(Adapter):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"pp"}),
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        lacks={
            Family.VIT: "its stages pass targets to the loss, and no weights",
            Precision.FP16: "torch.distributed.pipelining scales no loss, and PyTorch's GradScaler tells no other "
            "stage of an overflow",
        },
    )

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        """PyTorch's last stage keeps its outputs, the logits, as the others keep theirs (which are on the wire)."""
        if rank < case.layout.pp - 1 or case.layout.pp == 1:
            return ()
        width = {Precision.FP64: 8, Precision.FP32: 4}.get(case.precision, 2)
        logits = micro_batch_tokens(case) * case.workload.transformer.vocab_size * width
        reason = "the last stage keeps the logits of every micro-batch until its backward pass"
        return (Remainder(category="activations", num_bytes=case.layout.num_micro_batches * logits, reason=reason),)

    def build(self, case: Case, context: RankContext) -> Engine:
        return GPipeEngine(case, context)
