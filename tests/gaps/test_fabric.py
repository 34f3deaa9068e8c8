"""Lightning Fabric 2.6.6: what its `ModelParallelStrategy` does not do. The adapter clips by itself."""

from __future__ import annotations

import pytest
from torch import nn

from tests.gaps.ranks import on_two_ranks


def clipped(rank: int) -> float:
    """The norm of two weights' gradients, of which tensor parallelism splits one: each element is 1."""
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def parallelized(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(model, mesh["tensor_parallel"], {"1": ColwiseParallel()})

    strategy = ModelParallelStrategy(parallelized, data_parallel_size=1, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return float(fabric.clip_gradients(model, optimizer, max_norm=1.0))


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="PyTorch's norm of DTensors and others, or of two meshes")
def test_gradients_of_split_and_whole_weights_are_clipped_together() -> None:
    assert on_two_ranks(clipped) == pytest.approx(32**0.5)
