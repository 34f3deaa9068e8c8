"""Lightning Fabric's `ModelParallelStrategy`: its mesh of two axes, over which a function of the user's parallelizes a
model, here by PyTorch's tensor-parallel styles and FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapters.fabric import FABRIC, ON_CPU, ThroughFabric, launched, set_up
from meshmark.adapters.tensor_parallel import TensorParallelEngine, split
from meshmark.adapters.tensor_parallel_fsdp2 import TensorParallelFSDP2
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FabricTensorParallelEngine(ThroughFabric, TensorParallelEngine):
    """Reduces after every micro-batch: `no_backward_sync` would keep whole gradients. Fabric's own `clip_gradients`
    takes no tensors of several meshes, such as a norm's weight beside a split one
    (adapters/gaps/fabric_clip_tensor_parallel.py)."""

    def clip(self, max_norm: float) -> Tensor:
        return TensorParallelEngine.clip(self, max_norm)

    def differentiate(self, loss: Tensor) -> None:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            super().differentiate(loss)


class FabricTensorParallelFSDP2(TensorParallelFSDP2):
    """Module first, then the optimizer over what `setup_module` returns: the one way that Fabric has here."""

    requires: ClassVar = FABRIC
    capabilities: ClassVar = replace(
        TensorParallelFSDP2.capabilities,
        devices=ON_CPU,
        precisions=frozenset({Precision.FP32}),
        lacks={**TensorParallelFSDP2.capabilities.lacks, Precision.BF16: "Fabric's own precision is 32-true here"},
    )
    saves_shards: ClassVar = True
    """Whether every rank writes its part of a checkpoint, otherwise the first rank all of it."""

    def build(self, case: Case, context: RankContext) -> Engine:
        from lightning_fabric.strategies import ModelParallelStrategy

        def parallelized(model: Any, mesh: DeviceMesh) -> nn.Module:  # noqa: ANN401
            split(model, mesh["tensor_parallel"], case)
            self.shard(model, mesh["data_parallel"], case)
            module: nn.Module = model
            return module

        strategy = ModelParallelStrategy(
            parallelized,
            data_parallel_size=case.layout.dp,
            tensor_parallel_size=case.layout.tp,
            save_distributed_checkpoint=self.saves_shards,
        )
        fabric = launched(context, strategy, "32-true")
        wrapped, prepared = set_up(fabric, case, initial_model(case, context.device), together=False)
        return FabricTensorParallelEngine(case, context, fabric, wrapped, prepared)


class FabricTensorParallelWholeCheckpoint(FabricTensorParallelFSDP2):
    """`save_distributed_checkpoint=False`."""

    saves_shards: ClassVar = False
