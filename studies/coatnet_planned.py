"""A CoAtNet over 64 GPUs, planned: states in closed form, and the time that products, messages and copies to the host
take at the rates of datasheets, one after the other. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshmark.measure.readings import wire_factor
from meshmark.models.coatnet import CoAtNetSpec
from meshmark.models.config import Dataset
from meshmark.spec.case import Case
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import Layout, Offload, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss, Workload
from meshmark.theory.memory import model_states
from meshmark.theory.model_theory import theory_of
from meshmark.theory.partition import held_layers
from meshmark.theory.traffic import step_traffic

GPU, NUM_GPUS = gpu("h100"), 64
STATES_SHARE = 0.5
"""Share of a GPU's memory for states: activations, which are not planned for images, need the rest."""
WIDTHS = (512, 1024, 2048, 4096)
ROWS = 4096
"""Images of a step."""
ALIKE = 1.1
"""Plans whose time is within this of the least are called as good: none of them knows a tenth of a step."""
LAYOUTS = {  # the simplest first
    "data parallel": Layout(dp=64),
    "ZeRO-1": Layout(dp=64, zero_stage=1),
    "ZeRO-2": Layout(dp=64, zero_stage=2),
    "ZeRO-3": Layout(dp=64, zero_stage=3),
    "ZeRO-3, offloaded": Layout(dp=64, zero_stage=3, offload=Offload.CPU),
    "pipeline of 2": Layout(pp=2, dp=32, schedule=Schedule.ONE_F_ONE_B, num_micro_batches=8),
    "pipeline of 4": Layout(pp=4, dp=16, schedule=Schedule.ONE_F_ONE_B, num_micro_batches=8),
    "pipeline of 8": Layout(pp=8, dp=8, schedule=Schedule.ONE_F_ONE_B, num_micro_batches=8),
    "pipeline of 4, ZeRO-1": Layout(pp=4, dp=16, zero_stage=1, schedule=Schedule.ONE_F_ONE_B, num_micro_batches=8),
}


def net(width: int, repeats: int, *, image_size: int, num_channels: int, num_classes: int) -> CoAtNetSpec:
    """Blocks of convolutions `width` and twice as wide, then of attention, twice and four times; `repeats` of each."""
    return CoAtNetSpec(
        name=f"coatnet-{width}",
        image_size=image_size,
        num_channels=num_channels,
        num_classes=num_classes,
        convolutions=(width,) * repeats + (2 * width,) * repeats,
        attentions=(2 * width,) * repeats + (4 * width,) * repeats,
    )


def one_a_stage(layout: Layout) -> list[int]:
    """Ranks of one pipeline: replicas are alike."""
    found = {layout.coordinates(rank).pp: rank for rank in range(layout.world_size)}
    return [found[stage] for stage in range(layout.pp)]


def stretch(case: Case) -> float:
    """How many times as long as an even share the products of a step take: by the stage that has most of them, and by
    the bubble (arXiv:2104.04473 sec. 2.2.1)."""
    layout, model = case.layout, case.workload.model
    assert isinstance(model, CoAtNetSpec)
    each = [sum(layer.products for layer in held_layers(model, layout, rank)) for rank in one_a_stage(layout)]
    bubble = 1 + (layout.pp - 1) / layout.num_micro_batches
    return max(each) * layout.pp / sum(each) * bubble


def last_quarter(model: CoAtNetSpec) -> float:
    """Share of the parameters of blocks that the last quarter of them holds."""
    blocks = [layer.num_parameters for layer in model.layers[1:-1]]
    return sum(blocks[-len(blocks) // 4 :]) / sum(blocks)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one layout: bytes of the fullest GPU, seconds of the slowest."""

    name: str
    case: Case

    @property
    def model(self) -> CoAtNetSpec:
        assert isinstance(self.case.workload.model, CoAtNetSpec)
        return self.case.workload.model

    @cached_property
    def state_bytes(self) -> float:
        """On the GPU: states, and at ZeRO's stage 3 a block's gathered weights and gradients, before these are
        reduced."""
        layout, precision = self.case.layout, self.case.precision
        plans = [model_states(self.case, rank) for rank in one_a_stage(self.case.layout)]
        held = max(p.parameters + p.gradients + p.optimizer_states + p.buffers for p in plans if p)
        whole = precision.weights.itemsize + precision.accumulation.itemsize if layout.zero_stage == 3 else 0
        return held + whole * self.case.workload.model.block_parameters

    @property
    def fits(self) -> bool:
        return self.state_bytes <= STATES_SHARE * GPU.memory_bytes

    @cached_property
    def compute_seconds(self) -> float:
        """At the peak."""
        work, peak = self.case.workload, GPU.peak(self.case.precision.compute.short)
        flops = theory_of(work.model).flops_per_unit()
        assert flops is not None
        return flops * work.global_batch / self.case.world_size / peak * stretch(self.case)

    @cached_property
    def wire_seconds(self) -> float:
        """At the bandwidth of the links that each group of ranks has."""
        flows = [step_traffic(self.case, rank) or () for rank in one_a_stage(self.case.layout)]
        return max(sum(_seconds(flow.ranks, flow.kind, flow.num_bytes) for flow in own) for own in flows)

    @property
    def host_seconds(self) -> float:
        """Return the seconds to copy a rank's share of gradients to the host and weights back, in fp32, without the
        host's update."""
        layout = self.case.layout
        if layout.offload is Offload.NONE:
            return 0.0
        assert GPU.host
        return 2 * 4 * self.case.workload.model.num_parameters / layout.dp / GPU.host.bandwidth

    @property
    def seconds(self) -> float:
        """With nothing hidden behind anything."""
        return self.compute_seconds + self.wire_seconds + self.host_seconds


def bandwidth(ranks: Sequence[int]) -> float:
    """Return the bandwidth of one rank's link in rings through a group. Between nodes there are as many rings as the
    group has GPUs in a node, each over another adapter, but no more than the links inside a node carry."""
    nodes = [range(first, first + GPU.gpus_per_node) for first in range(0, max(ranks) + 1, GPU.gpus_per_node)]
    in_node = [count for node in nodes if (count := sum(rank in node for rank in ranks))]
    if len(in_node) == 1:
        return GPU.link_bandwidth
    return min(GPU.link_bandwidth, min(in_node) * GPU.network_bandwidth)


def _seconds(ranks: Sequence[int], kind: str, num_bytes: int) -> float:
    return num_bytes * wire_factor(kind, len(ranks)) / bandwidth(ranks)


def plans(width: int) -> list[Plan]:
    model = net(width, 8, image_size=32, num_channels=3, num_classes=1000)
    work = Workload(
        name=model.name,
        model=model,
        dataset=Dataset.DIGITS,
        loss=Loss.WEIGHTED_CROSS_ENTROPY,
        global_batch=ROWS,
    )
    return [
        Plan(name=name, case=Case(adapter="ddp", workload=work, layout=layout, precision=Precision.BF16))
        for name, layout in LAYOUTS.items()
    ]


def best(found: Sequence[Plan]) -> list[Plan]:
    """The fastest of those that fit, and those that are as good; the simplest first, as `found` has them."""
    fitting = [plan for plan in found if plan.fits]
    least = min((plan.seconds for plan in fitting), default=0.0)
    return [plan for plan in fitting if plan.seconds <= ALIKE * least]
