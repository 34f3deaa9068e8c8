"""The formats in which megatron-core's distributed optimizer saves its states.

Without Apex or Transformer Engine none of them can be loaded as it is: AdamW of PyTorch counts steps for every tensor,
which the optimizer does not expect. Adapters whose name has `mended` load the count as Apex's and Transformer Engine's
optimizers do, which keep one for each group, so that all else of the format is judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_model import MegatronGPTDistributedOptimizer
from meshmark.adapters.megatron.on_cpu import cuda_is
from meshmark.spec.known_gap import KnownGap


class SteppedFirst(GPTModelEngine):
    """Steps once on gradients of zero before it loads: a distributed optimizer that has not stepped cannot
    (`adapters/gaps/megatron_distributed_optimizer_load.py`)."""

    @torch.no_grad()  # `dp_reshardable` copies into weights in float32 where they are
    def load(self, folder: Path) -> None:
        with cuda_is(self.context.device):
            for optimizer in self.pytorchs_optimizers():
                _step_in_place(optimizer)
        super().load(folder)


def _step_in_place(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's states without a change of weights."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class Mended(SteppedFirst):
    """Takes the count of steps from a checkpoint's groups, and gives every tensor one of its own."""

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        with _leaving_counts(self.optimizer):
            super().load(folder)
        for optimizer in self.pytorchs_optimizers():
            for state in optimizer.state.values():
                state["step"] = state["step"].clone()


@contextlib.contextmanager
def _leaving_counts(optimizer: Any) -> Iterator[None]:  # noqa: ANN401
    """Let what loads the states of a tensor leave its count of steps as it is, within the context."""
    load = optimizer._set_main_param_and_optimizer_states

    def load_but_count(parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        group, index = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][index]
        load(parameter, {**tensors, "step": optimizer.optimizer.state[main]["step"]})

    optimizer._set_main_param_and_optimizer_states = load_but_count
    try:
        yield
    finally:
        del optimizer._set_main_param_and_optimizer_states


class DefaultFormat(SteppedFirst):
    checkpoint_metadata: ClassVar = {}


class DPReshardable(SteppedFirst):
    checkpoint_metadata: ClassVar = {"distrib_optim_sharding_type": "dp_reshardable"}


class MendedDPReshardable(Mended):
    checkpoint_metadata: ClassVar = DPReshardable.checkpoint_metadata


class MendedParallel(MendedDPReshardable):
    """Replicas share out what they all have: each saves a part, and loads a part that it sends to the others."""

    def save_strategy(self) -> Any:  # noqa: ANN401
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.parallel_state import get_data_parallel_group

        return FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), get_data_parallel_group())

    def load_strategy(self, folder: Path) -> Any:  # noqa: ANN401
        from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
        from megatron.core.parallel_state import get_data_parallel_group

        return FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(folder)), get_data_parallel_group()
        )


class MendedMemoryEfficient(Mended):
    checkpoint_metadata: ClassVar = {
        **GPTModelEngine.checkpoint_metadata,
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }


class MendedGathered(Mended):
    checkpoint_metadata: ClassVar = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}


def _gaps(symptom: str, reason: str, reproducer: str) -> tuple[KnownGap, ...]:
    clauses = ("resume", "reshard", "recovery")
    return tuple(KnownGap(clause=clause, symptom=symptom, reason=reason, reproducer=reproducer) for clause in clauses)


class MegatronGPTDefaultFormat(MegatronGPTDistributedOptimizer):
    """Checkpoints of the distributed optimizer in the format that Megatron takes where none is named."""

    engine: ClassVar = DefaultFormat
    known_gaps: ClassVar = _gaps(
        "raised",
        "the default format has flattened ranges of tensors, which `ShardedTensor` takes no more",
        "megatron_default_format_not_saved",
    )


class MegatronGPTFullyReshardable(MegatronGPTDistributedOptimizer):
    """Checkpoints in the format `fully_reshardable`, loaded after a first step."""

    engine: ClassVar = SteppedFirst
    known_gaps: ClassVar = _gaps(
        "KeyError: 'step'",
        "without Apex or Transformer Engine a distributed optimizer that has stepped expects a count of steps for each "
        "tensor, which the format does not have",
        "megatron_count_of_steps_not_in_format",
    )


class MegatronGPTDPReshardable(MegatronGPTDistributedOptimizer):
    """Checkpoints in the format `dp_reshardable`, loaded after a first step."""

    engine: ClassVar = DPReshardable
    known_gaps: ClassVar = _gaps(
        "another update rule",
        "without Apex or Transformer Engine the count of steps is that of before the load, and all tensors share it",
        "megatron_reshardable_count_of_steps",
    )


class MegatronGPTMendedFullyReshardable(MegatronGPTDistributedOptimizer):
    """The format `fully_reshardable`: the first replica gathers states in the shapes of the weights. The adapter loads
    the count of steps."""

    engine: ClassVar = Mended
    known_gaps: ClassVar = ()


class MegatronGPTMendedMemoryEfficient(MegatronGPTDistributedOptimizer):
    """`distrib_optim_fully_reshardable_mem_efficient`: that format, whose states are gathered on the CPU. The adapter
    loads the count of steps."""

    engine: ClassVar = MendedMemoryEfficient
    makes_gloo_groups: ClassVar = True
    known_gaps: ClassVar = ()


class MegatronGPTMendedDPReshardable(MegatronGPTDistributedOptimizer):
    """The format `dp_reshardable`: every rank saves its part of the buffers, for other numbers of replicas. The adapter
    loads the count of steps."""

    engine: ClassVar = MendedDPReshardable
    known_gaps: ClassVar = ()


class MegatronGPTMendedParallel(MegatronGPTDistributedOptimizer):
    """`FullyParallelSaveStrategyWrapper`, as Megatron-LM saves by default: replicas share out what they all have. The
    adapter loads the count of steps."""

    engine: ClassVar = MendedParallel
    known_gaps: ClassVar = ()


class MegatronGPTMendedGathered(MegatronGPTDistributedOptimizer):
    """The format `dp_zero_gather_scatter`: the first replica gathers flat states, and scatters them. The adapter loads
    the count of steps."""

    engine: ClassVar = MendedGathered
    makes_gloo_groups: ClassVar = True
    known_gaps: ClassVar = ()
