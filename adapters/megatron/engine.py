"""Trains a model of megatron-core's layers.

Shape suffixes: B sequences, T tokens, V vocabulary, of which this rank has a part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.engine import AUTOCAST, DataParallelEngine, Gathered, RankContext
from meshmark.adapters.megatron.layers import split_dim
from meshmark.adapters.megatron.on_cpu import CudaNamesOnCPU, checkpointing_on
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import Batch
from meshmark.spec.case import Case

_STATES = ("exp_avg", "exp_avg_sq")
"""States that AdamW keeps for a parameter, besides its count of steps."""


class MegatronEngine(DataParallelEngine):
    """Every tensor-parallel rank computes the same loss of its replica's rows; the first one returns it."""

    def __init__(
        self, case: Case, context: RankContext, model: Transformer, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """`module` is `model`, or `model` inside DistributedDataParallel."""
        from megatron.core import parallel_state

        super().__init__(case, context, module, optimizer)
        self.model = model
        self.tp_group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self.tp_rank = case.layout.coordinates(context.rank).tp

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        put_off = not last and isinstance(self.module, DistributedDataParallel)
        with self.module.no_sync() if put_off else contextlib.nullcontext():  # type: ignore[operator]
            yield

    def backward(self, batch: Batch) -> Tensor:
        return self._once_per_group(super().backward(batch))

    def evaluate(self, batch: Batch) -> Tensor:
        return self._once_per_group(super().evaluate(batch))

    def _once_per_group(self, share: Tensor) -> Tensor:
        return share if self.tp_rank == 0 else torch.zeros_like(share)

    def loss_share(self, logits_BTV: Tensor, batch: Batch) -> Tensor:
        """Return `meshmark.reference.objective.loss_share` of logits that are split over the vocabulary. Scalar,
        float32.
        """
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        loss_BT: Tensor = vocab_parallel_cross_entropy(logits_BTV, batch.targets)
        return (loss_BT * batch.weights).sum() / batch.total_weight

    def differentiate(self, loss: Tensor) -> None:
        # megatron-core's linear layers bring autocast back in their backward on CUDA alone
        # (custom_bwd(device_type="cuda")); on a CPU the backward has to run under it for the same arithmetic.
        dtype = AUTOCAST.get(self.case.precision.compute)
        on_cpu = self.context.device.type == "cpu"
        with torch.autocast("cpu", dtype=dtype, enabled=True) if on_cpu and dtype else contextlib.nullcontext():
            super().differentiate(loss)

    def clip(self, max_norm: float) -> Tensor:
        """megatron-core's global norm: shards' squares summed over tensor-parallel ranks, replicas counted once."""
        from megatron.core import parallel_state
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        parameters = [p for p in self.model.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if param_is_not_tensor_parallel_duplicate(p, self.tp_group)]
        with CudaNamesOnCPU() if self.context.device.type == "cpu" else contextlib.nullcontext():
            norm = get_grad_norm_fp32(counted, grad_stats_parallel_group=parallel_state.get_model_parallel_group())
            clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
        return torch.tensor(norm)

    def inner(self) -> nn.Module:
        return self.model

    def parameters(self) -> Mapping[str, Tensor]:
        return Gathered(([name], partial(self._full, p, p.detach())) for name, p in self.named_parameters())

    def gradients(self) -> Mapping[str, Tensor]:
        trained = ((name, p, p.grad) for name, p in self.named_parameters())
        return Gathered(([name], partial(self._full, p, grad)) for name, p, grad in trained if grad is not None)

    def save(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        with checkpointing_on(self.context.device):
            dist_checkpointing.save(self._sharded_state(), str(folder))

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        with checkpointing_on(self.context.device):
            loaded = dist_checkpointing.load(self._sharded_state(), str(folder))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(loaded[f"model.{name}"])
                if f"{_STATES[0]}.{name}" in loaded:
                    self.optimizer.state[parameter] = {key: loaded[f"{key}.{name}"].clone() for key in _STATES} | {
                        "step": torch.tensor(float(loaded["step"]))
                    }
        self.load_schedule(loaded["schedule"])

    def _sharded_state(self) -> dict[str, Any]:
        """megatron-core's description of everything that this rank holds, for its distributed checkpoint."""
        state: dict[str, Any] = {"schedule": self.schedule_state(), "step": 0.0}
        for name, parameter in self.named_parameters():
            state[f"model.{name}"] = self._sharded(f"model.{name}", parameter, parameter.detach())
            moments = self.optimizer.state.get(parameter, {})
            for key in _STATES if parameter.requires_grad else ():
                value = moments.get(key, torch.zeros_like(parameter))
                state[f"{key}.{name}"] = self._sharded(f"{key}.{name}", parameter, value)
            state["step"] = max(state["step"], float(moments.get("step", 0.0)))
        return state

    def _sharded(self, key: str, parameter: nn.Parameter, value: Tensor) -> Any:  # noqa: ANN401
        from megatron.core.dist_checkpointing import ShardedTensor

        if (dim := split_dim(parameter)) is None:
            return ShardedTensor.from_rank_offsets(key, value, replica_id=self.context.rank)
        place = (dim, self.tp_rank, self.tp_group.size())
        return ShardedTensor.from_rank_offsets(key, value, place, replica_id=self.dp_rank)

    def _full(self, parameter: nn.Parameter, shard: Tensor) -> list[Tensor]:
        """`shard`, of `parameter` or its gradient, joined with those of the other tensor-parallel ranks."""
        dim = split_dim(parameter)
        if dim is None:
            return [shard]
        parts = [torch.empty_like(shard) for _ in range(self.tp_group.size())]
        torch.distributed.all_gather(parts, shard.contiguous(), group=self.tp_group)
        return [torch.cat(parts, dim)]
