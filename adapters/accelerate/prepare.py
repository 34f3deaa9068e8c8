"""How Accelerate is made to run what was asked for, on a CPU too, and how that is proved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext, initial_model
from meshmark.errors import AdapterError
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype


def prove(accelerator: Any, expected: str, active: bool, module: nn.Module) -> None:  # noqa: ANN401
    """Raise `AdapterError` unless Accelerate is in the mode that was asked for and `active` is true of the module."""
    mode = str(accelerator.distributed_type.value)
    if mode != expected or not active:
        raise AdapterError(
            f"Accelerate runs {mode} with a {type(module).__name__} where {expected} was requested; it must not be "
            f"measured under that name"
        )


def prove_ddp(accelerator: Any, context: RankContext, module: nn.Module) -> None:  # noqa: ANN401
    """Raise `AdapterError` unless Accelerate trains by DDP, or a process that is alone by the model itself."""
    several = context.world_size > 1
    is_wrapped = isinstance(uncompiled(module), DistributedDataParallel)
    prove(accelerator, "MULTI_CPU" if runs_on_cpus(context) else "MULTI_GPU", is_wrapped == several, module)


def runs_on_cpus(context: RankContext) -> bool:
    """Return whether Accelerate is to be in its mode for several CPUs (`cpu=True`).

    A process that is alone is not, because in that mode it would wrap its model in DDP, as it does in no other:
    `name_as_on_gpu` has it train on a CPU as on a GPU.
    """
    return context.device.type == "cpu" and context.world_size > 1


class TakesSeveral(Adapter):
    """Mixin of adapters for options of DDP, which Accelerate does not wrap around the model of a lone process."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.world_size == 1:
            return f"{case.adapter} takes several processes: Accelerate wraps the model of one that is alone in no DDP"
        return super().supports(case, device, backend)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return what `torch.compile` was given, or the module itself where it was not compiled."""
    given: nn.Module = getattr(module, "_orig_mod", module)
    return given


def inner_of(module: nn.Module) -> nn.Module:
    """Return the model inside DDP, or the model itself where Accelerate left it alone."""
    module = uncompiled(module)
    if not isinstance(module, DistributedDataParallel):
        return module
    inner: nn.Module = module.module
    return inner


def choose_device(context: RankContext) -> None:
    """Make Accelerate use the context's device. By default it picks a GPU by local rank if there is one."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(context.device)


def mixed_precision(case: Case) -> str:
    return {Dtype.BF16: "bf16", Dtype.FP16: "fp16"}.get(case.precision.compute, "no")


def whole_batches() -> Any:  # noqa: ANN401
    """Return a data loader configuration which says that batches are global ones.

    Otherwise Accelerate steps a schedule once for every rank, because it assumes that each rank has a separate batch. A
    warm-up over 100 optimizer steps would end after 100 / ranks.
    """
    from accelerate import DataLoaderConfiguration

    return DataLoaderConfiguration(split_batches=True)


def sharding_accelerator(
    case: Case,
    context: RankContext,
    plugin: Any,  # noqa: ANN401
    *,
    sync_each_batch: bool = True,
    **arguments: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return an `Accelerator` of an FSDP plugin of either version. Without `sync_each_batch`, as by default, whole
    gradients are accumulated and reduced once: no longer sharded."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    return Accelerator(
        mixed_precision=mixed_precision(case),
        fsdp_plugin=plugin,
        kwargs_handlers=[backend_arguments(context)],
        dataloader_config=whole_batches(),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.layout.num_micro_batches, sync_each_batch=sync_each_batch
        ),
        **arguments,
    )


def backend_arguments(context: RankContext) -> Any:  # noqa: ANN401
    """Return the arguments that name the process group's backend to Accelerate."""
    from accelerate import InitProcessGroupKwargs

    return InitProcessGroupKwargs(backend=context.backend)


def name_as_on_gpu(context: RankContext) -> None:
    """Give Accelerate's shared state on a CPU the name that it has on a GPU; on a GPU do nothing.

    Accelerate heeds the FSDP plugin only in a mode with several accelerators, and its one mode for several CPUs
    (`cpu=True`) ignores plugins.
    """
    if context.device.type != "cpu":
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(backend=context.backend).distributed_type = DistributedType.MULTI_GPU


def deepspeed_plugin(config: dict[str, Any] | str, **arguments: Any) -> Any:  # noqa: ANN401
    """Return Accelerate's plugin for a DeepSpeed configuration, given as a dict or as a file.

    The plugin does not register the configuration with `transformers`. That is needed for `from_pretrained` only, which
    is not used here, and fails if the package is not installed.
    """
    from accelerate import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):  # type: ignore[misc]
        def set_deepspeed_weakref(self) -> None:
            pass

    return Plugin(hf_ds_config=config, zero3_init_flag=False, **arguments)


def prepare_parts(
    accelerator: Any,  # noqa: ANN401
    case: Case,
    context: RankContext,
    loaders: Sequence[DataLoader[Any]] = (),
) -> tuple[Any, ...]:
    """Return the model with its initial values, the optimizer and the schedule (or None), as Accelerate wraps them.

    `loaders` are prepared together with them, so that Accelerate can read batch sizes from them.
    """
    model, spec = initial_model(case, context.device), case.workload.optimizer
    optimizer = build_optimizer(spec, model.named_parameters())
    schedule = build_schedule(spec, optimizer)
    prepared = accelerator.prepare(model, optimizer, *([schedule] if schedule else []), *loaders)
    return (*prepared[:2], None) if schedule is None else tuple(prepared[:3])
