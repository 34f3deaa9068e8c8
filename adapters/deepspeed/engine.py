"""Trains through a `deepspeed.DeepSpeedEngine`, and finds what it holds at every stage."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.adapter.engine import DataParallelEngine, Gathered, Holdings, optimizer_state_tensors
from meshmark.errors import AdapterError
from meshmark.models.module import initial_value
from meshmark.reference.objective import Schedule

TAG, _UNIVERSAL = "meshmark", "universal"
"""Tags of checkpoints: as saved, and as converted for any world size."""


def is_deepspeed(module: object) -> bool:
    import deepspeed

    return isinstance(module, deepspeed.DeepSpeedEngine)


def initialize(model: nn.Module, optimizer: Any, schedule: Any, config: dict[str, Any]) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the result of `deepspeed.initialize` in an existing process group."""
    import deepspeed

    engine, prepared, _, prepared_schedule = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=config,
        dist_init_required=False,
    )
    return engine, prepared, prepared_schedule


def masters(zero: Any) -> list[Tensor]:  # noqa: ANN401
    """This rank's fp32 master weights inside a ZeRO optimizer of any stage; at stage 3 in fp32, the weights."""
    names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
    return [t for name in names for t in getattr(zero, name, [])]


def gradient_tensors(zero: Any, parameters: list[nn.Parameter]) -> list[Tensor]:  # noqa: ANN401
    """Every tensor that holds gradients between micro-batches or between backward and update, at any stage."""
    found = [p.grad for p in parameters] + [getattr(p, "grad_accum", None) for p in parameters]
    found += [p.grad for p in masters(zero)]
    for groups in (getattr(zero, "averaged_gradients", {}), getattr(zero, "all_grad_tensors", {})):
        found += [tensor for group in groups.values() for tensor in group or []]
    found += getattr(zero, "fp32_groups_gradients_flat", [])  # stage 1 in bf16: BF16_Optimizer's whole fp32 gradient
    found.append(getattr(zero, "grad_partitions_flat_buffer", None))  # stage 3
    found += getattr(zero, "accumulated_grads_in_cpu", {}).values()  # stages 1 and 2, offloaded
    return [t for t in found if isinstance(t, Tensor)]


def bucket_buffers(zero: Any) -> list[Tensor]:  # noqa: ANN401
    """Return the buckets that gradients are copied into before they are reduced.

    Stage 3 keeps one bucket permanently; stages 1 and 2 keep none between steps. Under offload, the buffers that pass
    between host and device are included.
    """
    buffers = [bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()]
    buffers.append(getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", None))
    buffers += [getattr(zero, f"temp_grad_buffer_for_{device}_offload", None) for device in ("cpu", "gpu")]
    return [t for b in buffers for t in (b if isinstance(b, list) else [b]) if isinstance(t, Tensor)]


def whole(parameter: nn.Parameter) -> list[Tensor]:
    """Return the whole parameter, gathered from the ranks that share its states."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return [safe_get_full_fp32_param(parameter)]
    with deepspeed.zero.GatheredParameters(parameter, enabled=hasattr(parameter, "ds_tensor")):
        return [parameter.detach().clone()]


def whole_gradient(parameter: nn.Parameter, scale: float) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_grad

    scaled = safe_get_full_grad(parameter)
    return [scaled if scale == 1 else scaled / scale]


def weight_tensors(parameters: list[nn.Parameter]) -> list[Tensor]:
    """This rank's weights as the model computes with them: whole at stages 1 and 2, shards at stage 3."""
    return [getattr(p, "ds_tensor", p).detach() for p in parameters]


class DeepSpeedEngine(DataParallelEngine):
    """`module` is a `deepspeed.DeepSpeedEngine`, which owns clipping, loss scaling and accumulation."""

    module: Any

    @property
    def zero(self) -> Any:  # noqa: ANN401
        """DeepSpeed's optimizer around the optimizer."""
        return self.module.optimizer

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.module.step()  # counts a micro-batch; updates nothing before the last

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)
        return logits

    def differentiate(self, loss: Tensor) -> None:
        self.module.backward(loss, scale_wrt_gas=False)  # shares add up to the mean: no division by their number

    def finish_gradients(self) -> None:
        """Do nothing: `backward` has reduced the gradients. Under fp16 they stay scaled until the update."""

    def update(self) -> Tensor | None:
        self.module.step()
        norm = self.module.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm)

    def make_schedule(self) -> Schedule | None:
        """None: DeepSpeed steps the one that it was given."""
        return None

    def save(self, folder: Path) -> None:
        self.module.save_checkpoint(str(folder), tag=TAG)

    def load(self, folder: Path) -> None:
        """Load a checkpoint.

        A checkpoint of another world size is loaded as DeepSpeed's universal checkpoint, to which the first rank
        converts it.
        """
        if len(list((folder / TAG).glob("*optim_states.pt"))) != self.context.world_size:
            self.load_universal(folder)
        else:
            self.read(folder, TAG)

    def load_universal(self, folder: Path) -> None:
        """Convert the checkpoint in `folder`, on the first rank, and load what comes of it."""
        self.module._config.load_universal_checkpoint = True
        if self.context.rank == 0:
            _make_universal(folder)
        torch.distributed.barrier()
        self.read(folder, _UNIVERSAL)

    def read(self, folder: Path, tag: str) -> None:
        path, _ = self.module.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise AdapterError(f"rank {self.context.rank}: DeepSpeed found no checkpoint in {folder}")

    def inner(self) -> nn.Module:
        inner: nn.Module = self.module.module
        return inner

    def parameters(self) -> Mapping[str, Tensor]:
        """Masters; of frozen parameters, which have none, the weights."""
        return Gathered(([name], functools.partial(whole, parameter)) for name, parameter in self.named_parameters())

    def loss_scale(self) -> float:
        return float(getattr(self.zero, "loss_scale", 1.0))

    def gradients(self) -> Mapping[str, Tensor]:
        scale = self.loss_scale()
        trained = ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)
        return Gathered(([name], functools.partial(whole_gradient, parameter, scale)) for name, parameter in trained)

    def holdings(self) -> Holdings:
        """Return the holdings in the memory of this rank's device, without states that are offloaded from a GPU."""
        parameters = [parameter for _, parameter in self.named_parameters()]

        def here(tensors: list[Tensor]) -> list[Tensor]:
            return [t for t in tensors if t.device.type == self.context.device.type]

        return Holdings(
            parameters=here(weight_tensors(parameters) + [m.detach() for m in masters(self.zero)]),
            gradients=here(gradient_tensors(self.zero, parameters)),
            optimizer_states=here(optimizer_state_tensors(self.zero.optimizer)),
            communication=here(bucket_buffers(self.zero)),
        )

    def restore_masters(self) -> None:
        """Give the fp32 masters the workload's initial values: DeepSpeed makes them from weights that it has already
        rounded to bf16 or fp16. A collective call.

        At stage 3 each rank sets its own part, padded as DeepSpeed pads it. DeepSpeed's function for whole tensors
        fails if their size is not divisible by the ranks (adapters/gaps/deepspeed_zero3_set_uneven_parameter.py).
        """
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if not self.case.precision.is_mixed:
            return
        workload = self.case.workload
        for name, parameter in self.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            value = initial_value(workload.model, name, shape, seed=workload.seed, device=self.context.device)
            if (part := getattr(parameter, "ds_tensor", None)) is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                index, size = self.zero._get_param_partition_rank(parameter), part.numel()
                own = value.flatten()[index * size : (index + 1) * size]
                safe_set_local_fp32_param(parameter, F.pad(own, (0, size - own.numel())))


def _make_universal(folder: Path) -> None:
    """DeepSpeed's own offline conversion of the checkpoint in `folder`, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / TAG),
            output_folder=str(folder / _UNIVERSAL),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
