"""DeepSpeed's ZeRO stages 1, 2 and 3 over data-parallel ranks (arXiv:1910.02054).

DeepSpeed casts the whole model to bf16 or fp16 and keeps fp32 masters, fp32 moments and, as asked for here, fp32
gradients, accumulated and reduced in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adapters.data_parallel import DataParallelEngine, initial_model, optimizer_state_tensors
from meshmark.adapter import Adapter, Capabilities, Engine, Feature, Holdings, KnownGap, RankContext, Requirement
from meshmark.case import Case
from meshmark.errors import AdapterError
from meshmark.initial import initial_value
from meshmark.layout import Precision
from meshmark.model import parameter_shapes
from meshmark.objective import build_optimizer, build_schedule
from meshmark.plan.states import Recipe, Remainder
from meshmark.plan.traffic import Reduction, Traffic, fully_sharded, step_traffic

_TAG, _UNIVERSAL = "meshmark", "universal"
"""Of checkpoints as they are saved, and as converted for any world size."""
DEFAULT_BUCKET = 500_000_000
"""Elements of DeepSpeed's default reduce bucket."""


def reduce_bucket(case: Case) -> int:
    """Elements of the bucket that gradients are reduced in: DeepSpeed's default, but at most the largest of a block and
    the token embedding. Stage 3 allocates the bucket whole, 2 GB by default, and a small model would never fill one."""
    model = case.workload.model
    return min(DEFAULT_BUCKET, max(model.block_parameters, model.vocab_size * model.hidden))


def ds_config(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration for `case`, every choice that changes memory, traffic or arithmetic made explicit."""
    layout, clip_norm = case.layout, case.workload.optimizer.clip_norm
    micro_batch = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
    return {
        "train_batch_size": case.workload.global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "gradient_clipping": 0.0 if clip_norm is None else clip_norm,  # left out, it would be 1.0
        "zero_optimization": {
            "stage": layout.zero_stage,
            "reduce_bucket_size": reduce_bucket(case),
            "stage3_param_persistence_threshold": 0,  # 1e5 by default: smaller parameters are not sharded
            # The defaults keep gathered what is used again within 1e9 elements, or comes up in a look-ahead of 5e7 that
            # skips what is there already: all of a small model, from forward to backward. Off, stage 3 is ZeRO's: every
            # layer is gathered when it is used. (Without look-ahead gathers do not overlap with computation.)
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
        "zero_allow_untested_optimizer": True,  # SGD is none of the "tested"
        "bf16": {"enabled": case.precision is Precision.BF16},
        "fp16": {"enabled": case.precision is Precision.FP16},
        "communication_data_type": "fp32",  # otherwise gradients are reduced in bf16 or fp16
        "data_types": {"grad_accum_dtype": "fp32"},  # otherwise they are accumulated in bf16 or fp16
    }


def settle(context: RankContext) -> None:
    """Hold DeepSpeed to the context's device, and keep it from compiling. Raises `AdapterError` on another device."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name().partition(":")[0]
    if name != context.device.type:
        raise AdapterError(
            f"rank {context.rank}: DeepSpeed chose the accelerator {name!r}, the case runs on {context.device.type!r}; "
            f"set DS_ACCELERATOR={context.device.type} before deepspeed is imported"
        )
    if name == "cpu":
        # On a CPU init_distributed compiles a shared-memory operator for a minute (gloo is used all the same). It asks
        # this table whether it may, and looking in fills the table first, by running compilers.
        deepspeed.ops.__compatible_ops__ = {}


def is_deepspeed(module: object) -> bool:
    import deepspeed

    return isinstance(module, deepspeed.DeepSpeedEngine)


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
    return [t for t in found if isinstance(t, Tensor)]


def bucket_buffers(zero: Any) -> list[Tensor]:  # noqa: ANN401
    """The buckets that gradients are copied into to be reduced: one of stage 3's for life, of stages 1 and 2 none
    between steps."""
    buffers = [bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()]
    return [t for b in buffers for t in (b if isinstance(b, list) else [b]) if isinstance(t, Tensor)]


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

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits: Tensor = self.module(tokens_BT)
        return logits

    def differentiate(self, loss: Tensor) -> None:
        self.module.backward(loss, scale_wrt_gas=False)  # shares add up to the mean: no division by their number

    def finish_gradients(self) -> None:
        """Reduced inside `backward`; kept scaled by fp16's loss scale until the update."""

    def update(self) -> Tensor | None:
        self.module.step()
        norm = self.module.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm)

    def make_schedule(self) -> None:
        """DeepSpeed steps the one that it was given."""

    def save(self, folder: Path) -> None:
        self.module.save_checkpoint(str(folder), tag=_TAG)

    def load(self, folder: Path) -> None:
        """Of another world size through DeepSpeed's universal checkpoint, which the first rank converts to."""
        tag = _TAG
        if len(list((folder / _TAG).glob("*optim_states.pt"))) != self.context.world_size:
            tag, self.module._config.load_universal_checkpoint = _UNIVERSAL, True
            if self.context.rank == 0:
                _make_universal(folder)
            torch.distributed.barrier()
        path, _ = self.module.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise AdapterError(f"rank {self.context.rank}: DeepSpeed found no checkpoint in {folder}")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.module.named_parameters()

    def parameters(self) -> Mapping[str, Tensor]:
        """Masters; of frozen parameters, which have none, the weights."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        full = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                full[name] = safe_get_full_fp32_param(parameter)
            else:
                with deepspeed.zero.GatheredParameters(parameter, enabled=hasattr(parameter, "ds_tensor")):
                    full[name] = parameter.detach().clone()
        return full

    def gradients(self) -> Mapping[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        scale = getattr(self.zero, "loss_scale", 1.0)
        trained = ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)
        return {name: safe_get_full_grad(parameter) / scale for name, parameter in trained}

    def holdings(self) -> Holdings:
        parameters = [parameter for _, parameter in self.named_parameters()]
        return Holdings(
            parameters=weight_tensors(parameters) + [m.detach() for m in masters(self.zero)],
            gradients=gradient_tensors(self.zero, parameters),
            optimizer_states=optimizer_state_tensors(self.zero.optimizer),
            communication=bucket_buffers(self.zero),
        )

    def restore_masters(self) -> None:
        """Give the fp32 masters the workload's initial values: DeepSpeed makes them from weights that it has already
        rounded to bf16 or fp16. A collective call."""
        from deepspeed.utils import safe_set_full_fp32_param

        if self.case.precision not in (Precision.BF16, Precision.FP16):
            return
        workload = self.case.workload
        for name, parameter in self.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            value = initial_value(workload.model, name, shape, seed=workload.seed, device=self.context.device)
            safe_set_full_fp32_param(parameter, value)


class DeepSpeed(Adapter):
    """No fp64: ZeRO's masters are float32."""

    requires: ClassVar[tuple[Requirement, ...]] = (Requirement(module="deepspeed", distribution="deepspeed"),)
    preload: ClassVar = ("deepspeed.runtime.zero.muon.muon_optimizer",)
    """What DeepSpeed imports while it builds: it decorates functions with `torch.compile`, which takes seconds."""
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({1, 2, 3}),
        precisions=frozenset({Precision.FP32, Precision.BF16, Precision.FP16}),
    )
    known_gaps: ClassVar = (
        KnownGap(
            clause="unused", zero_stages=(1, 2), symptom="as if unused parameters had a gradient of zero",
            reason="a parameter without a gradient counts as one with a gradient of zero: its moments decay, and "
            "momentum and weight decay move it",
        ),
        KnownGap(
            clause="unused", zero_stages=(3,), symptom="stale gradient",
            reason="a parameter that a step does not use is updated again with the gradient of the last step that did: "
            "stage3.py never clears grad_partitions_flat_buffer, whose parts the first micro-batch overwrites only "
            "where it brings a gradient",
        ),
    )  # fmt: skip

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """Otherwise DeepSpeed looks for accelerators, and says so."""
        return {"DS_ACCELERATOR": device}

    @classmethod
    def refusal(cls, case: Case, device: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """DeepSpeed runs fp16 on no CPU without AVX512-FP16."""
        if case.precision is Precision.FP16 and device == "cpu":
            return f"{case.adapter} runs precision fp16 on CUDA alone"
        return super().refusal(case, device, needs)

    @classmethod
    def recipe(cls, case: Case) -> Recipe:
        """In float32 too, weights and masters are two copies (at stage 3 two shards: DeepSpeed means to share them, but
        compares a `torch.device` with a string). In bf16, stage 1 is another optimizer, `BF16_Optimizer`, which keeps
        the whole float32 gradient for life and the bf16 one besides."""
        if case.precision is Precision.FP32:
            return Recipe(masters=4)
        return Recipe(weights=2, masters=4, gradients=6 if _keeps_whole_gradients(case) else 4, casts_weights=True)

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        """Beyond ZeRO's closed form, or short of it: stage 1 does not keep reduced gradients of other ranks either."""
        layout, count = case.layout, case.workload.model.num_parameters
        planned = count / (layout.dp if layout.zero_stage == 2 else 1)
        if layout.zero_stage < 3 and case.precision is Precision.FP32:
            kept = float(_partition(case, rank))
            reason = "a rank keeps its partition's gradients alone, and tensors that reach over its ends whole"
        elif layout.zero_stage == 1 and case.precision is Precision.FP16:
            kept = count / layout.dp + reduce_bucket(case)
            reason = "a rank keeps its partition's gradients alone, and the bucket that was reduced last"
        else:
            return ()
        return (Remainder(category="gradients", num_bytes=4 * (kept - planned), reason=reason),)

    @classmethod
    def traffic(cls, case: Case, rank: int) -> Traffic:
        """Stages 1 and 2 all-reduce gradients (`use_multi_rank_bucket_allreduce`, the default, in place of a reduce to
        each owner), at stage 2 after every micro-batch, and all-gather the updated weights. Stage 3 gathers a tied
        weight for the embedding and again for the head."""
        model = case.workload.model
        if case.layout.zero_stage == 3:
            traffic = step_traffic(case, rank, fully_sharded(case))
            if model.tied_embeddings and traffic:
                traffic["all_gather"] *= 1 + model.vocab_size * model.hidden / model.num_parameters
            return traffic
        low = case.precision is not Precision.FP32
        return step_traffic(case, rank, Reduction(
            every_micro_batch=case.layout.zero_stage == 2, gathers_per_step=1, weight_bytes=2 if low else None
        ))  # fmt: skip

    def build(self, case: Case, context: RankContext) -> Engine:
        settle(context)
        import deepspeed

        model = initial_model(case, context.device)
        spec = case.workload.optimizer
        optimizer = build_optimizer(spec, model.named_parameters())
        module, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=build_schedule(spec, optimizer), config=ds_config(case)
        )
        engine = DeepSpeedEngine(case, context, module, optimizer)
        engine.restore_masters()
        return engine


def _make_universal(folder: Path) -> None:
    """DeepSpeed's own offline conversion of the checkpoint in `folder`, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / _TAG), output_folder=str(folder / _UNIVERSAL), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def _keeps_whole_gradients(case: Case) -> bool:
    return case.precision is Precision.BF16 and case.layout.zero_stage == 1


def _partition(case: Case, rank: int) -> int:
    """Elements of all tensors that reach into `rank`'s share of the flat parameters, an even number of elements."""
    num_ranks = case.layout.dp
    size = math.ceil(case.workload.model.num_parameters / (2 * num_ranks)) * 2
    start, total = 0, 0
    for shape in parameter_shapes(case.workload.model).values():
        stop = start + math.prod(shape)
        if start < (rank + 1) * size and stop > rank * size:
            total += stop - start
        start = stop
    return total
