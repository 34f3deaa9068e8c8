"""DeepSpeed's experts, `deepspeed.moe.layer.MoE` (arXiv:2201.05596): groups of data-parallel ranks share the experts of
every layer, and tokens travel to their experts and back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Gathered, RankContext, initial_model
from meshmark.adapters.deepspeed import EARLIER_GAPS, DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine, whole, whole_gradient
from meshmark.adapters.deepspeed.traffic_exceptions import state_shards
from meshmark.adapters.expert_ranks import (
    EXPERT_RANKS,
    elements_elsewhere,
    expert_numbers,
    mixture_of,
    refusal_of_ranks,
)
from meshmark.errors import AdapterError
from meshmark.models.mixture import MixtureSpec
from meshmark.models.mixture.module import Mixture
from meshmark.models.module import Model, parameter_shapes
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.partition import reaching_elements
from meshmark.theory.traffic import METERED_STEP, OneTimeTraffic

Whole = Callable[[nn.Parameter], list[Tensor]]
"""Brings together a parameter, or its gradient, from the ranks that share its states."""
_MOST_STEPS = 64
"""Steps whose traffic may differ, more than are ever judged."""
_LOCAL = "moe.deepspeed_moe.experts.deepspeed_experts."
_GATE = "moe.deepspeed_moe.gate.wg."


class DeepSpeedMixture(nn.Module):
    """A mixture of experts in DeepSpeed's module. It drops no token and draws no second expert."""

    def __init__(self, mixture: Mixture, spec: MixtureSpec, rank: int) -> None:
        """`rank`: which of the ranks that share the experts this is."""
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            spec.hidden,
            mixture.experts[0],
            num_experts=spec.num_experts,
            ep_size=EXPERT_RANKS,
            k=spec.experts_per_token,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        count = self.moe.num_local_experts
        self.moe.deepspeed_moe.gate.wg.load_state_dict(mixture.gate.state_dict())
        for own, expert in zip(
            self.moe.deepspeed_moe.experts.deepspeed_experts, mixture.experts[rank * count :], strict=False
        ):
            own.load_state_dict(expert.state_dict())

    def forward(self, x_BTC: Tensor) -> Tensor:
        out_BTC: Tensor = self.moe(x_BTC)[0]
        return out_BTC


class ExpertsEngine(DeepSpeedEngine):
    """A rank has some experts of every layer, and the other parameters as all ranks have them."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank. An expert has the name that it has on the first rank of those that share experts."""
        for name, parameter in self.inner().named_parameters():
            yield name.replace(_LOCAL, "experts.").replace(_GATE, "gate."), parameter

    def parameters(self) -> Mapping[str, Tensor]:
        return self._of_all_experts(self.named_parameters(), whole)

    def gradients(self) -> Mapping[str, Tensor]:
        trained = ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)
        return self._of_all_experts(trained, functools.partial(whole_gradient, scale=self.loss_scale()))

    def _of_all_experts(self, of: Iterable[tuple[str, nn.Parameter]], whole: Whole) -> Gathered:
        spec = mixture_of(self.case)
        return Gathered((names_of(spec, name), functools.partial(_gathered, whole, name, p)) for name, p in of)


def names_of(spec: MixtureSpec, name: str) -> list[str]:
    """Return the model's names of the tensors that the ranks sharing experts call `name`, in the order of ranks."""
    before, is_expert, behind = name.partition("experts.")
    if not is_expert:
        return [name]
    index, _, kind = behind.partition(".")
    return [f"{before}experts.{number}.{kind}" for number in expert_numbers(spec, int(index))]


def _gathered(whole: Whole, name: str, parameter: nn.Parameter) -> list[Tensor]:
    from deepspeed.utils import groups

    [own] = whole(parameter)
    if "experts." not in name:
        return [own]
    parts = [torch.empty_like(own) for _ in range(EXPERT_RANKS)]
    dist.all_gather(parts, own.contiguous(), group=groups._get_expert_parallel_group(f"ep_size_{EXPERT_RANKS}"))
    return parts


class DeepSpeedExperts(DeepSpeed):
    """Every two ranks share the experts of each layer."""

    engine: ClassVar = ExpertsEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        families=frozenset({Family.MIXTURE}),
        zero_stages=frozenset({1, 2}),
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Feature.RESHARD: "the conversion to a universal checkpoint (ds_to_universal.py) fails on a rank's experts",
        },
    )
    known_gaps: ClassVar = (
        *EARLIER_GAPS,
        KnownGap(
            clause="recomputation",
            symptom="steady on rank",
            reason="a layer of experts keeps `l_aux` with its graph: all that a block has recomputed before the gate",
            reproducer="deepspeed_experts_keep_recomputed",
        ),
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return refusal_of_ranks(case) or super().supports(case, device, backend)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Masters and moments are ZeRO's share of all parameters: there are fewer of an expert, over fewer ranks."""
        num_bytes = -case.precision.weights.itemsize * elements_elsewhere(case)
        others = ExtraMemory(category="parameters", num_bytes=num_bytes, reason="experts of other ranks")
        return (*super().extra_memory(case, rank), others)

    @classmethod
    def kept_gradients(cls, case: Case, rank: int) -> float:
        shards, own = state_shards(case.layout, rank)
        place, part = cls.stands(case, own)
        shared, experts = _sizes_by_group(case, place)
        return float(
            sum(reaching_elements(sizes, shards, own) for sizes in shared)
            + sum(reaching_elements(sizes, shards // EXPERT_RANKS, part) for sizes in experts)
        )

    @classmethod
    def stands(cls, case: Case, replica: int) -> tuple[int, int]:
        """Return which of the ranks that share experts a replica is, and which of those that have the same ones."""
        return replica % EXPERT_RANKS, replica // EXPERT_RANKS

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """A message has room for as many tokens as the fullest expert gets, which other steps fill otherwise."""
        spec, rounds = mixture_of(case), case.layout.num_micro_batches
        tokens = case.workload.global_batch // (case.layout.dp * rounds) * spec.seq_len
        fewest = math.ceil(spec.experts_per_token * tokens / spec.num_experts)
        messages = 4 * spec.num_layers * rounds  # to the experts and back, forward and backward
        more = 4 * messages * spec.num_experts * spec.hidden * (tokens - fewest)
        steps = tuple(step for step in range(_MOST_STEPS) if step != METERED_STEP)
        return (
            *super().one_time_traffic(case, rank),
            OneTimeTraffic(
                kind="all_to_all",
                steps=steps,
                most_bytes=more,
                most_calls=0,
                least_bytes=-more,
                reason="a message has room for as many tokens as the fullest expert gets",
            ),
        )

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """How many tokens travel depends on which experts they choose."""
        return False

    def model(self, case: Case, context: RankContext) -> Model:
        model, spec = initial_model(case, context.device), mixture_of(case)
        _, replica = state_shards(case.layout, context.rank)
        for block in model.blocks.values():
            mixture = block.feed_forward
            assert isinstance(mixture, Mixture)
            block.feed_forward = DeepSpeedMixture(mixture, spec, self.stands(case, replica)[0])
        return model

    def optimizer(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        """Experts are groups of their own, as DeepSpeed's optimizers must know them."""
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters())
        for index, group in enumerate(optimizer.param_groups):
            group["name"] = f"group {index}"
        optimizer.param_groups = split_params_into_different_moe_groups_for_optimizer(optimizer.param_groups)
        return optimizer


class DeepSpeedExpertsDataFirst(DeepSpeedExperts):
    """`use_data_before_expert_parallelism`: neighbours have the same experts, and share the others with ranks that are
    further away."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.dp <= EXPERT_RANKS:
            return f"{case.adapter} takes several ranks with the same experts, got {case.layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def stands(cls, case: Case, replica: int) -> tuple[int, int]:
        same = case.layout.dp // EXPERT_RANKS
        return replica // same, replica % same

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().config(case, context), "use_data_before_expert_parallelism": True}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where DeepSpeed shares experts over other ranks than it was asked to."""
        from deepspeed.utils import groups

        engine = super().build(case, context)
        found = [*dist.get_process_group_ranks(groups._get_expert_parallel_group(f"ep_size_{EXPERT_RANKS}"))]
        same = case.layout.dp // EXPERT_RANKS
        first = self.stands(case, context.rank)[1]
        expected = [first + same * place for place in range(EXPERT_RANKS)]
        if found != expected:
            raise AdapterError(f"rank {context.rank}: DeepSpeed shares experts over {found}, expected {expected}")
        return engine


def _sizes_by_group(case: Case, place: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes of a rank's tensors by the optimizer's groups: of shared ones, and of its own experts'.

    `place`: which of the ranks that share experts it is.
    """
    spec = mixture_of(case)
    count = spec.num_experts // EXPERT_RANKS
    shared, experts = dict[bool, list[int]](), dict[bool, list[int]]()
    for name, shape in parameter_shapes(spec).items():
        _, is_expert, behind = name.partition("experts.")
        if is_expert and int(behind.partition(".")[0]) // count != place:
            continue
        groups = experts if is_expert else shared
        groups.setdefault(case.workload.optimizer.decays(name), []).append(math.prod(shape))
    return [*shared.values()], [*experts.values()]
