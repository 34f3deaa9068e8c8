"""States offloaded to the host or its drives: where they go, whether they fit, and how long they take."""

from __future__ import annotations

import dataclasses

import pytest

from meshmark.errors import InputError
from meshmark.plan.model_names import plan_model
from meshmark.plan.rates import rates
from meshmark.plan.search import NothingFitsError, search
from meshmark.plan.step_time import step_time
from meshmark.spec.hardware import GIB, GPUS, Gpu, gpu
from meshmark.spec.layout import Offload
from meshmark.theory.grid import SearchSpace, make_grid
from meshmark.theory.recipe import recipe

H100, NANOTRON = gpu("h100"), recipe("nanotron")
SWEPT = rates("h100-nanotron")


def test_offloaded_states_leave_the_gpu_and_are_counted_on_the_host() -> None:
    with pytest.raises(NothingFitsError):
        search(plan_model("gpt-175b"), SearchSpace(num_gpus=32, global_batch=256), H100, NANOTRON, SWEPT)
    found = search(
        plan_model("gpt-175b"),
        SearchSpace(num_gpus=32, global_batch=256, offload=Offload.CPU),
        H100,
        NANOTRON,
        SWEPT,
    )
    best = int(found.ranked[0])
    assert found.prediction.grid.layout(best).offload is Offload.CPU
    assert found.prediction.memory.host_bytes[best] == pytest.approx(12 * 175e9 / 32, rel=0.15)


def small_host(memory_bytes: float, nvme_bytes: float = 3e13) -> Gpu:
    assert H100.host
    host = dataclasses.replace(H100.host, memory_bytes=memory_bytes, nvme_bytes=nvme_bytes)
    return dataclasses.replace(H100, host=host)


def test_offloading_more_than_a_node_has_does_not_fit_and_says_by_how_much() -> None:
    model, given = plan_model("gpt-175b"), SWEPT
    # Twelve bytes a parameter over four nodes are 487.9 GiB a node; norms are whole on tensor-parallel ranks.
    with pytest.raises(NothingFitsError, match=r"489\.2 GiB a node in host memory, 189\.2 GiB more than there is"):
        search(
            model,
            SearchSpace(num_gpus=32, global_batch=256, offload=Offload.CPU),
            small_host(300 * GIB),
            NANOTRON,
            given,
        )
    with pytest.raises(NothingFitsError, match=r"489\.2 GiB a node on NVMe, 189\.2 GiB more than there is"):
        search(
            model,
            SearchSpace(num_gpus=32, global_batch=256, offload=Offload.NVME),
            small_host(1e15, 300 * GIB),
            NANOTRON,
            given,
        )
    with pytest.raises(InputError, match="nothing can be offloaded: the host of a node of p100 is not known"):
        search(
            plan_model("gpt3-1.3b"),
            SearchSpace(num_gpus=8, global_batch=256, offload=Offload.CPU),
            gpu("p100"),
            NANOTRON,
            rates("a100"),
        )
    # Replicas hold their states twice; what a smaller host turns away is what does not fit there, and nothing else.
    all_of, some = (
        search(
            plan_model("megatron-22b"),
            SearchSpace(num_gpus=8, global_batch=256, offload=Offload.CPU),
            small_host(b * GIB),
            NANOTRON,
            given,
        ).prediction
        for b in (2048, 400)
    )
    lost = all_of.fits & ~some.fits
    assert lost.any() and (8 * some.memory.host_bytes[lost] > 400 * GIB).all() and some.fits.any()


def test_states_on_drives_come_and_go_at_the_drives_speed() -> None:
    """arXiv:2104.07857 fig. 2b: on a DGX-2 whose GPUs all read, 3.0 GB/s each from the host, 1.6 from its drives."""
    model, using = plan_model("megatron-1.2b"), recipe("zero")
    seconds = [
        step_time(
            model, make_grid(dp=[16], zero_stage=[1], offload=[i]), gpu("v100-32"), using, rates("a100")
        ).optimizer[0]
        for i in range(3)
    ]
    moved = 2 * 12 * model.num_parameters / 16
    assert seconds[1] - seconds[0] == pytest.approx(moved / 3.0e9, rel=1e-6)
    assert seconds[2] - seconds[0] == pytest.approx(moved / 1.6e9, rel=1e-6)
    assert all(found.host is None or found.host.source for found in GPUS.values())
