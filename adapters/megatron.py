"""Megatron-LM tensor parallelism (arXiv:1909.08053): megatron-core's own layers and vocabulary-parallel loss in the
place of the model's linear layers, embedding and cross-entropy; replicas by PyTorch's DistributedDataParallel.

Shape suffixes: B sequences, T tokens, C hidden, V vocabulary; a V or F that is split over ranks is this rank's part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from adapters.data_parallel import AUTOCAST, DataParallelEngine, configure
from meshmark.adapter import Adapter, Capabilities, Engine, Feature, RankContext, Requirement
from meshmark.case import Case
from meshmark.data import IGNORED, Batch
from meshmark.initial import initial_value
from meshmark.layout import Precision
from meshmark.model import Attention, FeedForward, Transformer, drawn_name
from meshmark.objective import build_optimizer
from meshmark.plan.traffic import Traffic, add_traffic, data_parallel_traffic, tensor_parallel_traffic


class _CudaNamesOnCPU(TorchFunctionMode):
    """megatron-core's clipping works on any device but writes "cuda" into it: scratch tensors are made on "cuda", and
    gradients must be `torch.cuda.FloatTensor`. Within this mode, "cuda" means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(result, str) else result


_STATES = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter beside its count of steps."""


def _checkpointing_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """megatron-core's checkpoints wait for CUDA and put a flag on its current device; without CUDA, neither."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    return mock.patch.multiple(torch.cuda, synchronize=lambda *_: None, current_device=lambda: "cpu")


class MegatronEngine(DataParallelEngine):
    """Every tensor-parallel rank computes the same loss of its replica's rows; the first one returns it."""

    def __init__(
        self, case: Case, context: RankContext, model: Transformer, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """`module` is `model`, or `model` inside DistributedDataParallel."""
        from megatron.core import parallel_state

        super().__init__(case, context, module, optimizer)
        self.model = model
        self.tp_group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self.tp_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self._dp_rank: int = parallel_state.get_data_parallel_rank()

    @property
    def dp_rank(self) -> int:
        return self._dp_rank

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        put_off = not last and isinstance(self.module, DistributedDataParallel)
        with self.module.no_sync() if put_off else contextlib.nullcontext():  # type: ignore[operator]
            yield

    def backward(self, batch: Batch) -> Tensor:
        return self._own(super().backward(batch))

    def evaluate(self, batch: Batch) -> Tensor:
        return self._own(super().evaluate(batch))

    def _own(self, share: Tensor) -> Tensor:
        return share if self.tp_rank == 0 else torch.zeros_like(share)

    def loss_share(self, logits_BTV: Tensor, batch: Batch) -> Tensor:
        """What `meshmark.objective.loss_share` is, of logits split over the vocabulary. Scalar, float32."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        loss_BT: Tensor = vocab_parallel_cross_entropy(logits_BTV, batch.targets_BT)
        return (loss_BT * (batch.targets_BT != IGNORED)).sum() / batch.num_tokens

    def differentiate(self, loss: Tensor) -> None:
        # megatron-core's linear layers bring autocast back in their backward on CUDA alone
        # (custom_bwd(device_type="cuda")); on a CPU the backward has to run under it for the same arithmetic.
        dtype = AUTOCAST.get(self.case.precision)
        on_cpu = self.context.device.type == "cpu"
        with torch.autocast("cpu", dtype=dtype, enabled=True) if on_cpu and dtype else contextlib.nullcontext():
            super().differentiate(loss)

    def clip(self, max_norm: float) -> Tensor:
        """megatron-core's global norm: shards' squares summed over tensor-parallel ranks, replicas counted once."""
        from megatron.core import parallel_state
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        parameters = [p for p in self.model.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if param_is_not_tensor_parallel_duplicate(p, self.tp_group)]
        with _CudaNamesOnCPU() if self.context.device.type == "cpu" else contextlib.nullcontext():
            norm = get_grad_norm_fp32(counted, grad_stats_parallel_group=parallel_state.get_model_parallel_group())
            clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
        return torch.tensor(norm)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: self._full(p, p.detach()) for name, p in self.named_parameters()}

    def gradients(self) -> Mapping[str, Tensor]:
        return {name: self._full(p, p.grad) for name, p in self.named_parameters() if p.grad is not None}

    def save(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        with _checkpointing_on(self.context.device):
            dist_checkpointing.save(self._sharded_state(), str(folder))

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        with _checkpointing_on(self.context.device):
            loaded = dist_checkpointing.load(self._sharded_state(), str(folder))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(loaded[f"model.{name}"])
                if f"{_STATES[0]}.{name}" in loaded:
                    self.optimizer.state[parameter] = {key: loaded[f"{key}.{name}"].clone() for key in _STATES} | {
                        "step": torch.tensor(float(loaded["step"]))
                    }
        self.load_schedule(loaded["schedule"])

    def _sharded_state(self) -> dict[str, Any]:
        """megatron-core's description of everything that this rank holds, for its distributed checkpoint."""
        state: dict[str, Any] = {"schedule": self.schedule.state_dict() if self.schedule else None, "step": 0.0}
        for name, parameter in self.named_parameters():
            state[f"model.{name}"] = self._sharded(f"model.{name}", parameter, parameter.detach())
            moments = self.optimizer.state.get(parameter, {})
            for key in _STATES if parameter.requires_grad else ():
                value = moments.get(key, torch.zeros_like(parameter))
                state[f"{key}.{name}"] = self._sharded(f"{key}.{name}", parameter, value)
            state["step"] = max(state["step"], float(moments.get("step", 0.0)))
        return state

    def _sharded(self, key: str, parameter: nn.Parameter, value: Tensor) -> Any:  # noqa: ANN401
        from megatron.core.dist_checkpointing import ShardedTensor

        if (dim := _split_dim(parameter)) is None:
            return ShardedTensor.from_rank_offsets(key, value, replica_id=self.context.rank)
        place = (dim, self.tp_rank, self.tp_group.size())
        return ShardedTensor.from_rank_offsets(key, value, place, replica_id=self.dp_rank)

    def _full(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """`shard`, of `parameter` or its gradient, joined with those of the other tensor-parallel ranks."""
        dim = _split_dim(parameter)
        if dim is None:
            return shard
        parts = [torch.empty_like(shard) for _ in range(self.tp_group.size())]
        torch.distributed.all_gather(parts, shard.contiguous(), group=self.tp_group)
        return torch.cat(parts, dim)


def _split_dim(parameter: nn.Parameter) -> int | None:
    """The dim along which tensor-parallel ranks split a parameter; None for a replica."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def _parallelize(model: Transformer, config: Any, group: ProcessGroup) -> None:  # noqa: ANN401
    """Put megatron-core's layers, uninitialised, in the place of the (meta) layers that it has a parallel form of."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding, copy_to_tensor_model_parallel_region

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (copy_to_tensor_model_parallel_region(args[0], group=group),)

    for module in list(model.modules()):
        if isinstance(module, Attention):
            columns, row = ["q", "k", "v"], "out"
        elif isinstance(module, FeedForward):
            columns, row = ["up"] if module.gate is None else ["up", "gate"], "down"
        else:
            continue
        # Several column-parallel layers read one input: its gradient is reduced once for all of them, as it is for
        # Megatron's fused ones, by entering the parallel region before them and by `disable_grad_reduce` inside.
        module.register_forward_pre_hook(enter)
        for name in columns:
            setattr(module, name, _column(getattr(module, name), config, group, disable_grad_reduce=True))
        setattr(module, row, _row(getattr(module, row), config, group))
    assert model.embedding is not None and model.head is not None
    tokens = VocabParallelEmbedding(
        model.spec.vocab_size, model.spec.hidden, init_method=_untouched, config=config, tp_group=group
    )
    _mark_split(tokens.weight, 0)
    model.embedding.tokens = tokens
    model.head.output = _column(model.head.output, config, group)
    if model.spec.tied_embeddings:
        model.head.output.weight = tokens.weight


def _column(layer: nn.Linear, config: Any, group: ProcessGroup, disable_grad_reduce: bool = False) -> Any:  # noqa: ANN401
    """`layer` split along its outputs, which stay split."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    split = ColumnParallelLinear(
        layer.in_features, layer.out_features, config=config, init_method=_untouched, bias=layer.bias is not None,
        gather_output=False, disable_grad_reduce=disable_grad_reduce, tp_group=group,
    )  # fmt: skip
    _mark_split(split.weight, 0)
    split.register_forward_hook(_first)
    return split


def _row(layer: nn.Linear, config: Any, group: ProcessGroup) -> Any:  # noqa: ANN401
    """`layer` split along its inputs, which come split; its outputs are summed over ranks."""
    from megatron.core.tensor_parallel import RowParallelLinear

    split = RowParallelLinear(
        layer.in_features, layer.out_features, config=config, init_method=_untouched, bias=layer.bias is not None,
        input_is_parallel=True, skip_bias_add=False, tp_group=group,
    )  # fmt: skip
    _mark_split(split.weight, 1)
    split.register_forward_hook(_first)
    return split


def _mark_split(weight: nn.Parameter, dim: int) -> None:
    """Say that `weight` is a shard. megatron-core does so only where it initialises a weight itself; an unmarked one
    passes for a replica, and the global norm then counts the first rank's shard alone."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _untouched(weight: Tensor) -> None:
    """Initialisation is ours: `perform_initialization` is off, and this is never called."""


def _first(module: nn.Module, args: Any, output: tuple[Tensor, Tensor | None]) -> Tensor:  # noqa: ANN401
    """The output of a megatron-core layer without the bias that it may leave to its caller."""
    return output[0]


@torch.no_grad()
def _initialize(model: Transformer, seed: int, tp: int, tp_rank: int, device: torch.device) -> None:
    """Allocate what is still on the meta device, and fill every replica and shard with its initial values."""
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
    for name, parameter in model.named_parameters():
        full, offset = list(parameter.shape), [0] * parameter.dim()
        if (dim := _split_dim(parameter)) is not None:
            offset[dim] = tp_rank * full[dim]
            full[dim] *= tp
        parameter.copy_(
            initial_value(
                model.spec, drawn_name(model.spec, name), full,
                seed=seed, shape=parameter.shape, offset=offset, device=device,
            )
        )  # fmt: skip


class Megatron(Adapter):
    """No fp64: the vocabulary-parallel loss and the gradient norm are computed in float32 whatever they are given.
    No fp16: nothing shares an overflow between tensor-parallel ranks. No dropout: it would need Megatron's random
    states, one shared by all tensor-parallel ranks and one of each rank's own."""

    requires: ClassVar = (Requirement(module="megatron.core", distribution="megatron-core"),)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"tp", "dp"}),
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            Feature.DROPOUT: "its random states, one shared by all tensor-parallel ranks and one of each rank's own, "
            "live on CUDA alone"
        },
    )

    @classmethod
    def traffic(cls, case: Case, rank: int) -> Traffic:
        """Under autocast half of the residual streams travel in bf16 (what row-parallel layers put out, the gradient of
        the head's input), half in fp32 (the embedding, gradients of the blocks' inputs)."""
        stream_bytes = 3 if case.precision is Precision.BF16 else 4
        return add_traffic(data_parallel_traffic(case, rank), tensor_parallel_traffic(case, stream_bytes))

    def build(self, case: Case, context: RankContext) -> Engine:
        from megatron.core import ModelParallelConfig, parallel_state

        layout, workload = case.layout, case.workload
        parallel_state.initialize_model_parallel(layout.tp, create_gloo_process_groups=False)
        config = ModelParallelConfig(
            tensor_model_parallel_size=layout.tp, perform_initialization=False,
            use_cpu_initialization=context.device.type == "cpu",  # elsewhere, shards are made on the current GPU
        )  # fmt: skip
        with torch.device("meta"):
            model = Transformer(workload.model)
        _parallelize(model, config, parallel_state.get_tensor_model_parallel_group())
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        _initialize(model, workload.seed, layout.tp, tp_rank, context.device)
        configure(model, case)
        module: nn.Module = model
        if layout.dp > 1:
            module = DistributedDataParallel(
                model, process_group=parallel_state.get_data_parallel_group(), gradient_as_bucket_view=True,
                device_ids=[context.device] if context.device.type == "cuda" else None,
            )  # fmt: skip
        return MegatronEngine(
            case, context, model, module, build_optimizer(workload.optimizer, model.named_parameters())
        )
