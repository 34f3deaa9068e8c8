"""DeepSpeed 0.19.8: parameters that a step does not use, the norm of a pipeline's gradients, and what becomes of
gradients over the ranks that share a sequence."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gaps.ranks import on_two_ranks


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.always(x)
        return (self.sometimes(y) if both else y).sum()


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CONFIGURATIONS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "stage 3": (3, 0.0, {}),
    "stage 2": (2, 0.0, {}),
    "stage 2 with momentum": (2, 0.9, {}),
    "stage 1 offloaded": (1, 0.0, OFFLOAD),
    "stage 2 offloaded": (2, 0.0, OFFLOAD),
    "stage 0 with momentum": (0, 0.9, {}),
}
"""ZeRO stage, SGD's momentum, and what else stands in `zero_optimization`."""


def weight(model: TwoLayers) -> Tensor:
    """Of stage 0, which keeps no masters, the parameter itself."""
    from deepspeed.utils import safe_get_full_fp32_param

    found: Tensor | None = safe_get_full_fp32_param(model.sometimes.weight)
    return (model.sometimes.weight if found is None else found).detach().clone()


def moves(rank: int) -> dict[str, list[float]]:
    """By configuration: how far `sometimes` moves in a step that uses it, and in the next, which does not."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile an operator
    found = {}
    for name, (stage, momentum, options) in CONFIGURATIONS.items():
        torch.manual_seed(0)
        model = TwoLayers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        config = {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, **options},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        weights = [weight(model)]
        for both in (True, False):
            engine.backward(engine(torch.ones(1, 4), both))
            engine.step()
            weights.append(weight(model))
        found[name] = [float((b - a).abs().max()) for a, b in pairwise(weights)]
    return found


def norm_of_two_stages(rank: int) -> float:
    """What DeepSpeed's engine clips by without ZeRO: of a pipeline whose first stage has a gradient of 3, and whose
    second has one of 4."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.utils import clip_grad_norm_

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    (own,) = model.parameters()
    own.grad = torch.full((1, 1), 3.0 + rank)
    return float(clip_grad_norm_(model.parameters(), max_norm=100.0, mpu=model._grid))


def sequence_parallel(rank: int) -> dict[str, float]:
    """By ZeRO stage, what a step of plain SGD takes off a weight whose gradient is 1 on one of the two ranks that share
    a sequence, and 2 on the other; and at stage 2 when the configuration asks for these ranks."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    asked = {"sequence_parallel_size": 2, "data_parallel_size": 1}
    found = {"configured": taken_off(rank, 2, asked, None)}
    groups.mesh_device = None
    parallel_state_sp.initialize_sequence_parallel(2)
    return {**found, **{f"stage {stage}": taken_off(rank, stage, {}, parallel_state_sp) for stage in (1, 2, 3)}}


def taken_off(rank: int, stage: int, options: dict[str, int], mpu: ModuleType | None) -> float:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **options,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    engine.backward(engine(torch.full((1, 1), 1.0 + rank)).sum())
    engine.step()
    return -float(safe_get_full_fp32_param(model.weight))


Found = tuple[dict[str, list[float]], float, dict[str, float]]


def both(rank: int) -> Found:
    return moves(rank), norm_of_two_stages(rank), sequence_parallel(rank)


def test_gradients_are_summed_over_the_ranks_of_a_sequence(found: Found) -> None:
    """Each has other tokens of it, whose losses add up."""
    assert (found[2]["stage 1"], found[2]["stage 2"]) == (3.0, 3.0)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="stage 3 averages where stages 1 and 2 sum")
def test_stage_3_sums_them_too(found: Found) -> None:
    """`reduce_scatter_coalesced` divides by all ranks, where the other stages divide by those without a sequence's."""
    assert found[2]["stage 3"] == 3.0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="no gradient is reduced over a sequence's ranks at all")
def test_the_configuration_may_ask_for_ranks_of_a_sequence(found: Found) -> None:
    """`_get_sequence_data_parallel_group` of utils/groups.py gives the mesh's data-parallel group alone."""
    assert found[2]["configured"] == 3.0


@pytest.fixture(scope="module")
def found() -> Found:
    found: Found = on_two_ranks(both)
    return found


@pytest.fixture(scope="module")
def moved(found: Found) -> dict[str, list[float]]:
    assert all(used > 0.01 for used, _ in found[0].values())
    return found[0]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the first stage's gradients alone are counted")
def test_the_norm_of_a_pipeline_s_gradients_is_that_of_all_stages(found: Found) -> None:
    """`clip_grad_norm_` leaves out what is replicated over ranks that split a tensor; it takes the pipeline's grid,
    whose ranks of model parallelism are stages, for such ranks. With ZeRO's stage 1 the norm is right."""
    assert found[1] == pytest.approx(5.0)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="stage 3 uses the gradient of the step before again")
def test_stage_3_leaves_an_unused_parameter_alone(moved: dict[str, list[float]]) -> None:
    """Plain SGD: without a gradient, nothing can move."""
    assert moved["stage 3"][1] == 0


def test_stage_2_does_not_use_the_old_gradient(moved: dict[str, list[float]]) -> None:
    """So that what stage 3 does is stage 3's."""
    assert moved["stage 2"][1] == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="stages 1 and 2 take no gradient for one of zero")
def test_stage_2_leaves_an_unused_parameter_s_momentum_alone(moved: dict[str, list[float]]) -> None:
    """PyTorch's optimizers skip a parameter without a gradient, and so its momentum."""
    assert moved["stage 2 with momentum"][1] == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the host's flat gradient is never cleared")
@pytest.mark.parametrize("stage", [1, 2])
def test_an_offloaded_stage_leaves_an_unused_parameter_alone(moved: dict[str, list[float]], stage: int) -> None:
    """The same stages without offload do: the test of stage 2 above."""
    assert moved[f"stage {stage} offloaded"][1] == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="stage 0 takes no gradient for one of zero")
def test_stage_0_leaves_an_unused_parameter_s_momentum_alone(moved: dict[str, list[float]]) -> None:
    assert moved["stage 0 with momentum"][1] == 0
