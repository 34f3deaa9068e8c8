"""Accelerate's FSDP plugin in its first version, PyTorch's `FullyShardedDataParallel`."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Arithmetic, Casting, Feature
from meshmark.adapter.engine import AUTOCAST, Engine, RankContext, configure, initial_model
from meshmark.adapters.accelerate import FP16_IS_FP32, REQUIREMENT, AccelerateEngine
from meshmark.adapters.accelerate.prepare import (
    choose_device,
    name_as_on_gpu,
    prove,
    sharding_accelerator,
)
from meshmark.adapters.fsdp1 import FSDP1, FSDP1Engine, canonical
from meshmark.adapters.fsdp1_options import IGNORED, IgnoresLastNorm, IgnoringFSDP1Engine
from meshmark.models.module import Model, block_classes, build_model, drawn_name, initial_value, skeleton
from meshmark.models.transformer import TEXT_FAMILIES
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload


class AccelerateFSDP1Engine(FSDP1Engine, AccelerateEngine):
    micro_batch = AccelerateEngine.micro_batch  # FSDP1Engine switches the reduction itself, which is Accelerate's here

    def clip(self, max_norm: float) -> Tensor:
        return AccelerateEngine.clip(self, max_norm)


class AccelerateFSDP1(FSDP1):
    """Every block and the rest, as `fsdp1` wraps them. Accelerate wants the model prepared before there is an
    optimizer."""

    through: ClassVar[type[AccelerateFSDP1Engine]] = AccelerateFSDP1Engine
    requires: ClassVar = (REQUIREMENT,)
    preload: ClassVar = ("deepspeed",)
    """Accelerate imports it, where it is installed, to see whether a model is DeepSpeed's."""
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, reduces_each=True, divides=True)
    capabilities: ClassVar = dataclasses.replace(
        FSDP1.capabilities,
        precisions=FSDP1.capabilities.precisions - {Precision.FP16},
        lacks={**FSDP1.capabilities.lacks, Precision.FP16: FP16_IS_FP32},
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.precision.is_mixed and case.workload.couples_rows:
            return "by a policy of what to wrap, FSDP1 keeps batch norms in float32 where bf16 is asked for"
        return super().supports(case, device, backend)

    def build(self, case: Case, context: RankContext) -> Engine:
        choose_device(context)
        from torch.distributed.fsdp import FullyShardedDataParallel

        name_as_on_gpu(context)
        accelerator, spec = self._accelerator(case, context), case.workload.optimizer
        module = accelerator.prepare(self.model(case, context))
        prove(accelerator, "FSDP", isinstance(module, FullyShardedDataParallel), module)
        named = [(canonical(name), parameter) for name, parameter in module.named_parameters()]
        optimizer = build_optimizer(spec, named)
        schedule = build_schedule(spec, optimizer)
        prepared = accelerator.prepare(optimizer, schedule) if schedule else (accelerator.prepare(optimizer), None)
        return self.through(case, context, accelerator, (module, *prepared))

    def model(self, case: Case, context: RankContext) -> Model:
        """Return the model that Accelerate prepares."""
        return initial_model(case, context.device)

    def wrapping(self, case: Case, context: RankContext) -> dict[str, Any]:
        """Return the plugin's arguments that say which modules are wrapped."""
        names = sorted(kind.__name__ for kind in block_classes(case.workload.model))
        return {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": names}

    def _accelerator(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecision

        low, reduced = AUTOCAST.get(case.precision.compute), getattr(torch, case.precision.reduction)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=self.strategy,
            backward_prefetch="BACKWARD_PRE",
            use_orig_params=True,
            **self.wrapping(case, context),
            mixed_precision_policy=MixedPrecision(param_dtype=low, reduce_dtype=reduced) if low else None,
        )
        return sharding_accelerator(case, context, plugin)


class AccelerateFSDP1BySize(AccelerateFSDP1):
    """Modules of a block's size are wrapped (`min_num_params`), of a model without values, which `param_init_fn` fills
    in shard by shard."""

    capabilities: ClassVar = dataclasses.replace(
        AccelerateFSDP1.capabilities,
        lacks={
            **AccelerateFSDP1.capabilities.lacks,
            Feature.TIED_EMBEDDINGS: "a shared weight would be drawn for each module that has it",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        sizes = {sum(p.numel() for p in block.parameters()) for block in skeleton(case.workload.model).blocks.values()}
        if len(sizes) > 1 or case.workload.model.family not in TEXT_FAMILIES:
            return f"{case.adapter} does not support blocks of different sizes (it would wrap parts of the larger ones)"
        return super().supports(case, device, backend)

    def model(self, case: Case, context: RankContext) -> Model:
        with torch.device("meta"):
            model = configure(build_model(case.workload.model), case)
        self.names = {part: name for name, part in model.named_modules()}
        return model

    def wrapping(self, case: Case, context: RankContext) -> dict[str, Any]:
        block = next(iter(skeleton(case.workload.model).blocks.values()))
        return {
            "auto_wrap_policy": "size_based_wrap",
            "min_num_params": sum(parameter.numel() for parameter in block.parameters()),
            "param_init_fn": functools.partial(self.fill, case.workload, context.device),
        }

    @torch.no_grad()
    def fill(self, workload: Workload, device: torch.device, module: nn.Module) -> None:
        """Give a module's own parameters memory, and their initial values."""
        prefix, model = self.names[module], workload.model
        module.to_empty(device=device, recurse=False)
        for own, parameter in module.named_parameters(recurse=False):
            name = drawn_name(model, f"{prefix}.{own}")
            parameter.copy_(initial_value(model, name, parameter.shape, seed=workload.seed, device=device))


class AccelerateIgnoringEngine(IgnoringFSDP1Engine, AccelerateFSDP1Engine):
    micro_batch = AccelerateEngine.micro_batch  # FSDP1Engine switches the reduction itself, which is Accelerate's here
    clip = AccelerateFSDP1Engine.clip


class AccelerateFSDP1Ignores(IgnoresLastNorm, AccelerateFSDP1):
    """`ignored_modules` by the name of a module: the last norm is not sharded, and its gradients are the user's to
    reduce."""

    through: ClassVar = AccelerateIgnoringEngine

    def wrapping(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().wrapping(case, context), "ignored_modules": re.escape(IGNORED)}
