"""megatron-core's own GPTModel (local spec): tensor and sequence parallelism, 1F1B and interleaved pipelines, its
DistributedDataParallel and its distributed optimizer (arXiv:1909.08053, 2104.04473, 2205.05198)."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Requirement
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.expert_ranks import EXPERT_RANKS
from meshmark.adapters.megatron.buckets import bucket_sizes, local_sizes, stage_blocks
from meshmark.adapters.megatron.connections import one_connection
from meshmark.adapters.megatron.gpt_bf16 import narrow_activations, restore_masters, untried_in_bf16
from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_weights import dense, fused_of, initial_values, partly_frozen, shard
from meshmark.adapters.megatron.on_cpu import MarkedNorm, cuda_is, norms_marked, seed
from meshmark.adapters.megatron.random_states import random_states
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Recompute, Schedule
from meshmark.spec.optimizer import OptimizerKind
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Purpose, TrafficException, besides, step_traffic

ELEMENT_WISE_MASTERS = (
    "the distributed optimizer cuts float32 masters by elements of a buffer, across the ends of tensors, and Meshmark "
    "reads whole masters back alone"
)
"""Why its precision bf16 is refused: equivalence judges masters."""
_RECOMPUTED: dict[Recompute, dict[str, Any]] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_FRESH = (
    "without Apex or Transformer Engine a distributed optimizer that has not stepped loads no checkpoint: `state_dict` "
    "asserts that there is one count of steps"
)


class MegatronGPT(Adapter):
    """Trains the same model as all others, in megatron-core's own modules: its weights are mapped by canonical name."""

    overlaps_reduction: ClassVar = False
    """Whether gradients are reduced during the backward pass, rather than all together after it."""
    overlaps_gather: ClassVar = False
    """Whether weights sharded by a distributed optimizer are gathered during the next forward pass."""
    averages_in_collective: ClassVar[bool] = False
    """Whether the reduction averages over replicas; otherwise gradients are scaled before."""
    instances: ClassVar[int] = 1
    """Groups of replicas that each share out all states of a distributed optimizer."""
    makes_gloo_groups: ClassVar = False
    """Whether Megatron makes a second group of replicas, on Gloo, through which it gathers states of an optimizer."""
    fuses: ClassVar = False
    """Whether megatron-core's fused kernels that need no other package run on CUDA; on a CPU none do."""
    engine: ClassVar[type[GPTModelEngine]] = GPTModelEngine
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, divides=True, splits_products=True, gpt_model_order=True)
    requires: ClassVar = (Requirement(module="megatron.core", distribution="megatron-core"),)
    preload: ClassVar[tuple[str, ...]] = ("megatron.core.models.gpt", "megatron.core.optimizer")
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"tp", "pp", "dp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}),
        virtual_stages=frozenset({1, 2}),
        sequence_parallel=True,
        recomputes=frozenset(Recompute),
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            Precision.FP16: "its loss scaling was not tried",
            Precision.BF16_REDUCE_BF16: "not tried",
            Family.OWN: "it builds a GPTModel of its own",
            Family.IMAGES: "GPTModel is a transformer with an embedding and a loss over a vocabulary",
            Family.MIXTURE: "megatron-core's experts are not mapped",
            Precision.FP64: "the vocabulary-parallel loss and the gradient norm are float32 whatever they are given",
            Feature.MATRIX_WISE: "its optimizer is given tensor-parallel parts of the parameters",
            Feature.UNUSED: "GPTModel runs all of its layers in every step",
            Feature.TIED_EMBEDDINGS: "not mapped",
            Feature.DROPOUT: "its random states are those of `megatron`, which shows them",
            Feature.DECAY_GROUPS: "weight decay by group is left to its own scheduler of rates",
        },
    )

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        return one_connection(device)

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """Megatron cuts a pipeline into equal stages, and interleaves multiples of its ranks of micro-batches."""
        layout = case.layout
        if reason := cls.refusal_of_stages(case):
            return reason
        if layout.virtual_stages > 1 and (layout.pp == 1 or layout.num_micro_batches % layout.pp):
            return f"interleaving takes a multiple of pp micro-batches, got {layout.num_micro_batches} on {layout.pp}"
        if case.precision.is_mixed and (untried := ", ".join(untried_in_bf16(case))):
            return f"in {case.precision} GPTModel was not tried with {untried}"
        if parts := partly_frozen(case.workload):
            return f"GPTModel cannot freeze {' and '.join(parts)} without what is in one tensor with them"
        return super().supports(case, device, backend)

    @classmethod
    def refusal_of_stages(cls, case: Case) -> str | None:
        """Return why the layers of a case cannot be cut into stages, or None."""
        layers, stages = case.workload.model.num_layers, case.layout.pp * case.layout.virtual_stages
        return f"GPTModel takes as many layers on every stage, got {layers} on {stages}" if layers % stages else None

    @classmethod
    def refusal(cls, case: Case, device: str, backend: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Loading begins by making up states, which megatron-core does of Adam alone (`init_state_fn`)."""
        if Feature.SAVE in needs and case.workload.optimizer.kind is OptimizerKind.SGD:
            return f"{case.adapter} does not support checkpoints of SGD (megatron-core makes no states to load into)"
        return super().refusal(case, device, backend, needs)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Gradients are in a float32 buffer for life; of weights in bf16 there are float32 masters. GPTModel's
        activations are its own: unfused attention keeps scores."""
        mixed, width = case.precision.is_mixed, case.precision.weights.itemsize
        using = eager_recipe(case, "eager-ddp", casts_weights=mixed)
        masters = case.precision.master.itemsize if mixed else 0
        states = dataclasses.replace(using.states, weight_bytes=width, master_bytes=masters)
        return dataclasses.replace(using, states=states, activations_known=False, receive_buffers=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return what megatron-core keeps permanently besides the states: random states, its buffer for scores, an
        input.
        """
        layout, model = case.layout, dense(case.workload)
        rows = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
        width = case.precision.weights.itemsize
        shared = width * rows * model.num_heads // layout.tp * model.seq_len**2
        if layout.sequence_parallel:  # one buffer is both: that of scores, and of what is gathered for a product
            shared = max(shared, width * rows * model.seq_len * model.hidden)
        declared = [
            (shared, "a buffer for the scores of attention, or for gathers (`get_global_memory_buffer`)"),
            (8 * model.seq_len, "positions, which this adapter hands to every micro-batch"),
        ]
        if receiving := sum(stage > 0 for stage in layout.stages_of(layout.coordinates(rank).pp)):
            received = rows * model.seq_len * model.hidden * width // (layout.tp if layout.sequence_parallel else 1)
            reason = "of every stage of the pipeline, the last input that it has received, and its gradient"
            declared.append((receiving * 2 * received, reason))
        padding = cls.padding(case, rank)
        steady = (
            random_states(),
            *(ExtraMemory(category="steady", num_bytes=n, reason=reason) for n, reason in declared),
        )
        padded = (4 * padding, "the distributed optimizer pads tensors to 64 elements, and buckets to 128")
        both = ("gradients", "parameters", "steady") if padding else ()
        return (*steady, *(ExtraMemory(category=c, num_bytes=padded[0], reason=padded[1]) for c in both))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flows, count = step_traffic(case, rank), sum(local_sizes(case, rank, range(case.layout.virtual_stages)))
        share, reason = Fraction(cls.padding(case, rank), count), "tensors are padded to 64 elements, buckets to 128"
        padded = (*besides(flows, Purpose.GRADIENTS, share, reason), *besides(flows, Purpose.WEIGHTS, share, reason))
        return (*padded, *narrow_activations(case, flows))

    @classmethod
    def bucket_elements(cls, case: Case) -> int | None:
        """Asked for of a bucket; None: all of a chunk's gradients are one."""
        return None

    @classmethod
    def padding(cls, case: Case, rank: int) -> int:
        """Elements that the distributed optimizer adds to a rank's buffers."""
        chunks, elements = range(case.layout.virtual_stages), cls.bucket_elements(case)
        padded = sum(sum(bucket_sizes(case, rank, chunk, elements)) for chunk in chunks)
        return padded - sum(local_sizes(case, rank, chunks))

    def build(self, case: Case, context: RankContext) -> Engine:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        layout, stands = case.layout, case.layout.coordinates(context.rank)
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.virtual_stages if layout.virtual_stages > 1 else None,
            expert_model_parallel_size=EXPERT_RANKS if case.workload.routes else 1,
            num_distributed_optimizer_instances=self.instances,
            create_gloo_process_groups=self.makes_gloo_groups,
        )
        seed(context.device, case.workload.seed + 10 * stands.dp)
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=layout.zero_stage > 0,
            overlap_grad_reduce=self.overlaps_reduction,
            overlap_param_gather=self.overlaps_gather,
            bucket_size=self.bucket_elements(case),
            average_in_collective=self.averages_in_collective,
            num_distributed_optimizer_instances=self.instances,
            **self.reduction_options(case),
        )
        with cuda_is(context.device), norms_marked():
            fuses = self.fuses and context.device.type == "cuda"
            config = _config(case, context, fuses=fuses, options=self.model_options(case))
            models = [_chunk(case, context, config, chunk) for chunk in range(layout.virtual_stages)]
            if case.precision.is_mixed:
                models = [Float16Module(config, model) for model in models]
            chunks = [DistributedDataParallel(config, how, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
            if how.overlap_grad_reduce:  # as Megatron-LM's own training does
                config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
            config = _optimizer_config(case, overlaps_gather=self.overlaps_gather, options=self.optimizer_options(case))
            optimizer = _optimizer(config, chunks, on_gloo=self.makes_gloo_groups)
        engine = self.engine(case, context, chunks, optimizer)
        if case.precision.is_mixed:
            restore_masters(case, engine)
        return engine

    def reduction_options(self, case: Case) -> dict[str, Any]:
        """Return a variant's further choices of `DistributedDataParallelConfig`."""
        return {}

    def model_options(self, case: Case) -> dict[str, Any]:
        """Return a variant's further choices of `TransformerConfig`."""
        return {}

    def optimizer_options(self, case: Case) -> dict[str, Any]:
        """Return a variant's further choices of `OptimizerConfig`."""
        return {}


class MegatronGPTAverages(MegatronGPT):
    """`average_in_collective`: gradients are averaged by the reduction itself, not scaled before it."""

    averages_in_collective: ClassVar = True

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.dp == 1:
            return f"{case.adapter} does not support a single replica, which has nothing to average"
        return super().supports(case, device, backend)


class MegatronGPTDistributedOptimizer(MegatronGPT):
    """Optimizer states, and the reduction of gradients, shared out over replicas: ZeRO's stage 1 in Megatron's way."""

    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        zero_stages=frozenset({1}),
        precisions=frozenset({Precision.FP32}),
        lacks={**MegatronGPT.capabilities.lacks, Precision.BF16: ELEMENT_WISE_MASTERS},
    )
    known_gaps: ClassVar = tuple(
        KnownGap(
            clause=clause,
            symptom="AssertionError",
            reason=_FRESH,
            reproducer="megatron_distributed_optimizer_load",
        )
        for clause in ("resume", "reshard", "recovery")
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.dp == 1:
            return f"a distributed optimizer takes several replicas, got {case.layout.id}"
        return super().supports(case, device, backend)


def _config(case: Case, context: RankContext, *, fuses: bool, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Megatron's, of the model and of how it is laid over ranks. Its fused GELU is the approximation by tanh."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    layout, model = case.layout, dense(case.workload)
    is_gpt = model.family is Family.GPT
    gelu = F.gelu if fuses else functools.partial(F.gelu, approximate="tanh")
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_hidden,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        add_bias_linear=is_gpt,
        normalization="LayerNorm" if is_gpt else "RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=gelu if is_gpt else F.silu,
        gated_linear_unit=not is_gpt,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        **_RECOMPUTED[layout.recompute],
        bf16=case.precision.compute is Dtype.BF16,
        fp16=case.precision.compute is Dtype.FP16,
        params_dtype=getattr(torch, case.precision.weights),
        pipeline_dtype=getattr(torch, case.precision.weights),
        use_cpu_initialization=context.device.type == "cpu",
        bias_activation_fusion=fuses,
        bias_dropout_fusion=fuses,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=False,
        # Batched, messages forward and back between two ranks are taken for one another
        # (adapters/gaps/megatron_interleaved_two_ranks.py).
        overlap_p2p_comm=layout.virtual_stages > 1,
        batch_p2p_comm=layout.virtual_stages == 1,
        finalize_model_grads_func=finalize_model_grads,
        **options,
    )


def _chunk(case: Case, context: RankContext, config: Any, chunk: int) -> Any:  # noqa: ANN401
    """Return one virtual stage with its initial values."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    layout, spec, stands = case.layout, dense(case.workload), case.layout.coordinates(context.rank)
    place = chunk * layout.pp + stands.pp
    layers = get_gpt_layer_local_spec(normalization=config.normalization, num_experts=config.num_moe_experts)
    if not spec.causal:
        layers.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    layers.submodules.input_layernorm = layers.submodules.pre_mlp_layernorm = MarkedNorm
    model = GPTModel(
        config,
        layers,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.seq_len,
        pre_process=place == 0,
        post_process=place == layout.pp * layout.virtual_stages - 1,
        position_embedding_type="learned_absolute" if spec.family is Family.GPT else "rope",
        rotary_base=spec.rope_theta,
        vp_stage=chunk if layout.virtual_stages > 1 else None,
    ).to(context.device)
    if config.num_moe_experts:  # a gate has a bias where other layers have; the model's has none
        for layer in model.decoder.layers:
            layer.mlp.router.bias = None
    values = initial_values(case.workload.text_model, case.workload.seed)
    first, expert_rank = _first_layer(case, place), parallel_state.get_expert_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fused = fused_of(case.workload, name, first, parameter)
            if fused.of_experts:
                parameter.copy_(values(fused.names[expert_rank]))
            else:
                parameter.copy_(shard(spec, fused, values, stands.tp, layout.tp))
            parameter.requires_grad_(all(map(case.workload.trains, fused.names)))
    return model


def _first_layer(case: Case, place: int) -> int:
    return stage_blocks(case, place)[0]


def _optimizer_config(case: Case, *, overlaps_gather: bool, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Megatron's, of PyTorch's AdamW or SGD."""
    from megatron.core.optimizer import OptimizerConfig

    spec = case.workload.optimizer
    return OptimizerConfig(
        optimizer="adam" if spec.kind is OptimizerKind.ADAMW else "sgd",
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        sgd_momentum=spec.momentum,
        clip_grad=spec.clip_norm or 0.0,
        use_distributed_optimizer=case.layout.zero_stage > 0,
        overlap_param_gather=overlaps_gather,
        bf16=case.precision.compute is Dtype.BF16,
        fp16=case.precision.compute is Dtype.FP16,
        params_dtype=getattr(torch, case.precision.weights),
        **options,
    )


def _optimizer(config: Any, chunks: list[Any], *, on_gloo: bool) -> Any:  # noqa: ANN401
    """Return Megatron's optimizer. Nothing is exempt from weight decay."""
    from megatron.core.optimizer import get_megatron_optimizer

    made = get_megatron_optimizer(config, chunks, config_overrides={}, use_gloo_process_groups=on_gloo)
    chained = getattr(made, "chained_optimizers", [made])
    return chained[0] if len(chained) == 1 else made  # several: one of them is of experts
