"""Training recipes: how a framework stores a model in training, which copies it makes, and how it cuts a pipeline.

A recipe also says how gradients travel within a step, how an eager backward pass handles gradients and gathered
weights, and how an optimizer step visits a rank's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from meshmark.errors import InputError, UnknownNameError
from meshmark.models.transformer import ModelSpec
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.backward_pass import Widths
from meshmark.theory.partition import Stage, eased_stages, stages

# --- How an optimizer step visits a rank's parameters, and which temporaries it makes.


class UpdateForm(StrEnum):
    """Form of a step of PyTorch's AdamW (torch/optim/adam.py)."""

    LOOP = "loop"
    """One parameter after another, with two temporaries of its size. PyTorch's default on a CPU."""
    FOREACH = "foreach"
    """All parameters of a group at once, with the roots of all its second moments. PyTorch's default on a GPU."""
    FUSED = "fused"
    """One kernel in place, as Apex's and DeepSpeed's do."""


# --- How gradients travel within a step.


class GradientPath(StrEnum):
    """How an eager framework's gradients get from the backward pass to the update, which decides what is alive
    meanwhile.
    """

    WHOLE = "whole"
    """Each gradient is a separate tensor until the update."""
    BUCKETS = "buckets"
    """Gradients are views of DDP's buckets, which exist from the start of the step.

    Those of all micro-batches but the last accumulate in separate tensors (`gradient_as_bucket_view`, `no_sync`).
    """
    STAGED = "staged"
    """DeepSpeed's stage 1: whole until the last micro-batch is over, then through a bucket into the rank's part.

    See `reduce_ipg_grads` and `copy_grads_in_partition` of its runtime/zero/stage_1_and_2.py.
    """
    FLATTENED = "flattened"
    """DeepSpeed without ZeRO: whole until the last micro-batch is over, then through one flat copy of all of them.

    See `buffered_allreduce_fallback` of its runtime/engine.py.
    """
    STREAMED = "streamed"
    """DeepSpeed's stage 2: through a bucket into the rank's part during every micro-batch's backward pass
    (`streamed.py`).
    """
    MODULES = "modules"
    """DeepSpeed's stage 3: as stage 2, into a permanent flat tensor, with each module's weights gathered
    separately.
    """
    UNITS = "units"
    """FSDP: block by block whole, then reduce-scattered.

    Gradients outside all blocks are reduced together at the end.
    """
    FLAT_UNITS = "flat units"
    """FSDP1: as `UNITS`, with each unit's gradients combined in one flat tensor.

    It is widened if the reduction is wide, and stays until the reduction is done. Shards stay until the next forward
    pass (`_post_backward_hook` of PyTorch's distributed/fsdp/_runtime_utils.py).
    """


DEEPSPEED_PATHS = (GradientPath.STAGED, GradientPath.STREAMED, GradientPath.MODULES)


# --- How an eager framework's backward pass handles gradients and gathered weights.


@dataclass(frozen=True, kw_only=True)
class EagerBackward:
    """How an eager framework's backward pass handles gradients and gathered weights."""

    gradient_path: GradientPath = GradientPath.WHOLE
    loss_tensors: float = 2.0
    """Number of tensors of the logits' size that the loss's backward makes beyond its input.

    These are the gradients of the log-softmax and of the logits; zero if it works in place.
    """
    prefetches: bool = True
    """True if FSDP gathers one block ahead in the backward pass, and keeps gradients being reduced until the next
    block's.
    """
    keeps_root: bool = False
    """True if FSDP keeps parameters outside all blocks gathered from the forward to the backward pass."""
    kept_share: float = 0.0
    """Share of a block's gathered weights that stays until its backward. With 1, they are not gathered again."""
    num_reductions: int = 1
    """Number of blocks whose gradients FSDP2 keeps in reduction at a time (`set_reduce_scatter_max_input_buffers`)."""
    accumulates_outside_buckets: bool = True
    """True if gradients that DDP has not reduced yet lie next to its buckets.

    False if it reduces every micro-batch.
    """
    interleaves: bool = False
    """True if several chunks of a pipeline rank run as in interleaved 1F1B.

    The peak of other orders is not planned.
    """
    bucket_elements: int | None = None
    """Elements of each of DeepSpeed's `num_buckets` buckets at stage 2.

    None means the size that the suites configure.
    """
    num_buckets: int = 1


# --- Training recipes: how a framework stores a model in training, which copies it makes, and how it cuts a pipeline.


@dataclass(frozen=True, kw_only=True)
class MatrixWise:
    """An optimizer whose states per element differ between parameters."""

    optimizer: OptimizerSpec
    dtype: Dtype
    """Dtype of its moments."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter, by state."""

    weight_bytes: float
    """Weights that the forward pass reads."""
    gradient_bytes: float
    """Gradients held from one micro-batch to the next."""
    master_bytes: float
    """Weights that the optimizer updates, if they are a second copy."""
    moment_bytes: float = 8.0
    """Optimizer moments: two in fp32 for Adam."""
    matrix_wise: MatrixWise | None = None
    """Optimizer whose states are planned tensor by tensor, instead of by `moment_bytes`."""
    shard_gradient_bytes: float = 0.0
    """The optimizer's own copy of the gradients of its shard, which it makes and frees in the update.

    Megatron-Core's `DistributedOptimizer._copy_model_grads_to_main_grads` makes it, and `zero_grad` sets it to None;
    DeepSpeed's `single_grad_partition` (stage_1_and_2.py) lives as long.
    """
    gradient_stage: int = 2
    """ZeRO stage from which a rank holds only its own part of the gradients for the update."""

    @property
    def total(self) -> float:
        """Sum without sharding and buckets: the 16, 18 or 20 that the literature quotes."""
        return (
            self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes + self.shard_gradient_bytes
        )


@dataclass(frozen=True, kw_only=True)
class BufferBytes:
    """Memory besides the states. Buckets and fresh gradients are in bytes per parameter, the others in total bytes."""

    bucket_bytes: float = 0.0
    """Persistent flat copies of gradients that data parallelism reduces (DDP's buckets)."""
    flat_buffer_bytes: float = 0.0
    """Communication buffers of a fixed size, in total bytes."""
    outside_bytes: float = 0.0
    """CUDA's context and NCCL's buffers, which the framework's allocator does not count."""
    expands_segments: bool = False
    """True if its launcher has the allocator expand segments (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`).

    What is reserved and unused can then be given back, so that a layout which fits without it runs.
    """
    fresh_gradient_bytes: float = 0.0
    """Gradients as the backward pass emits them, all alive at its end, before they are added to the held ones."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Traffic between ranks, and its timing."""

    reduce_bytes: float = 2.0
    """Bytes per gradient on the wire."""
    gather_bytes: float = 2.0
    """Bytes per weight on the wire when ZeRO gathers it."""
    hides_backward_gathers: bool = False
    """True if inputs gathered again in the backward pass travel behind products of the gradients before them.

    These are the two inputs of a layer under sequence parallelism (arXiv:2205.05198 sec. 4.2.2).
    """
    gathers_narrow: bool = False
    """True if tensor-parallel ranks gather the inputs of narrower products as these read them, not in 16 bits.

    Transformer Engine quantizes a sequence's part before it is gathered, forward and backward; what products give is
    reduced in 16 bits (`gather_along_first_dim(..., quantizer)` in its layernorm_linear.py and, for gradients of
    outputs, base.py; github:NVIDIA/TransformerEngine d0067d0).
    """
    hides_sends: bool = False
    """True if interleaved stages send and receive while they compute (Megatron's `overlap_p2p_comm`)."""
    sends_whole: bool = False
    """True if every tensor-parallel rank sends the whole output of a stage, not its share (arXiv:2104.04473 sec.
    4.1).
    """
    reduces_by_tensor: bool = False
    """True if data-parallel ranks reduce one weight matrix after another instead of buckets."""
    reduces_under_zero1: bool = False
    """True if ZeRO-1 waits for the backward pass, then all-reduces whole gradients and gathers weights without
    overlap.
    """
    shows_gathers: bool = False
    """True if ZeRO-1 gathers weights after the update and before the next step, behind no computation.

    Each tensor's owner then broadcasts it through all nodes.
    """


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Memory that forward passes keep."""

    element_bytes: float = 2.0
    """Bytes per activation."""
    logit_bytes: float = 8.0
    """Bytes per logit at the loss: its fp32 copy and the shifted one that becomes the softmax."""
    moved_logit_bytes: float = 52.0
    """Bytes per logit that the loss reads and writes, forward and backward.

    Unfused: cast, max, shift, exp, sum and divide forward; scale and cast backward.
    """
    kept_logit_bytes: float = 0.0
    """Bytes per logit of the previous micro-batch, if it is freed late."""
    flash_attention: bool = True
    """True if the attention core keeps one fp32 statistic per query instead of the scores."""
    dropout_masks: bool = False
    """True if one-byte dropout masks are kept, as arXiv:2205.05198 counts them."""
    keeps_products: bool = False
    """True if selective recomputation keeps what products with weights give, and repeats all else: attention's core
    and element-wise work (JAX's `checkpoint_dots_with_no_batch_dims`, MaxText's policy `minimal`).
    """
    skips_last_product: bool = False
    """True if recomputation of a layer, or of its feed-forward network, leaves out its last product, whose output no
    backward pass reads.

    XLA removes what nothing reads. PyTorch's non-reentrant `checkpoint` stops once it has all tensors that were saved
    (`set_checkpoint_early_stop`, on unless it is turned off, as torchtitan does).
    """
    selective_core: bool = False
    """True if selective recomputation without named modules repeats the attention core also where no scores are kept.

    Megatron-Core's `recompute_modules` is `["core_attn"]` if none are named.
    """
    fused_elementwise: bool = False
    """True if norms, rotation, gate and residual sums are a kernel each, as in Transformer Engine.

    The product that makes a weight's gradient then also accumulates it.
    """


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """Where a pipeline is cut."""

    balanced_stages: bool = False
    """True if the pipeline is cut by compute, including the head; otherwise by number of layers."""
    head_share: float = 1.0
    """Share of the head's weights that counts in that cut."""
    ends_count: bool = False
    """True if embedding and head count as a layer each where layers do not divide evenly.

    See Megatron's `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`.
    """

    def stages(self, model: ModelSpec, num_stages: int) -> tuple[Stage, ...]:
        """Return the stages."""
        uneven = self.ends_count and model.num_layers % num_stages
        if not self.balanced_stages and (uneven or num_stages > model.num_layers):
            return eased_stages(model, num_stages)
        return stages(model, num_stages, balanced=self.balanced_stages, head_share=self.head_share)

    def most_stages(self, model: ModelSpec) -> int:
        """Return the most virtual stages of a model. The first may hold only the embedding, the last only the head."""
        return model.num_layers + 2 * (not self.balanced_stages)


@dataclass(frozen=True, kw_only=True)
class NarrowProducts:
    """Matrix products of the blocks' linear layers in 8 bits or fewer. Attention and the head stay as they are."""

    name: str
    arithmetic: str
    """The dtype whose peak these products are compared with."""
    num_bytes: float
    """Bytes of a value, including its share of a block's scale."""

    @property
    def cast_bytes(self) -> float:
        """Bytes to cast one value: it is read in 16 bits and written along its rows and along its columns.

        The product that makes a weight's gradient contracts over tokens, and tensor cores read both operands along the
        contracted dimension.
        """
        return 2.0 + 2.0 * self.num_bytes


NARROW: dict[str, NarrowProducts] = {
    narrow.name: narrow
    for narrow in (
        NarrowProducts(name="fp8", arithmetic="fp8", num_bytes=1.0),
        NarrowProducts(name="mxfp8", arithmetic="fp8", num_bytes=1.0 + 1.0 / 32.0),
        NarrowProducts(name="nvfp4", arithmetic="fp4", num_bytes=0.5 + 1.0 / 16.0),
    )
}
"""Precisions of products narrower than 16 bits: a scale per tensor, per 32 values, and per 16 values."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Bytes by category, and other choices of a framework that decide memory and traffic. Contains no measured
    numbers.
    """

    name: str
    states: StateBytes
    buffers: BufferBytes = BufferBytes()
    wire: Wire = Wire()
    activations: ActivationBytes = ActivationBytes()
    eager: Widths | None = None
    """Dtype widths if PyTorch's eager kernels run this project's own model.

    Activations are then what they save, operation by operation (`backward_pass.py`). None means the fused kernels
    of the papers and their formulas.
    """
    backward: EagerBackward = EagerBackward()
    """The backward pass. Only for eager kernels."""
    update: UpdateForm = UpdateForm.FUSED
    """How AdamW visits a rank's parameters."""
    peak_known: bool = True
    """False if the framework holds something in backward passes whose size at the peak is not planned."""
    activations_known: bool = True
    """False for a framework that trains its own model with other operations, or runs passes in its own order."""
    whole_logits: bool = False
    """True if every tensor-parallel rank has the logits of the whole vocabulary, and computes the loss over them."""
    receive_buffers: bool = True
    """True if pipeline stages receive into buffers allocated once, as PyTorch's do, not into new tensors."""
    cut: PipelineCut = PipelineCut()
    replicas: int = 1
    """Groups of data-parallel ranks that each hold all shards (HSDP)."""
    deals_rows: bool = False
    """True if ZeRO-3's shards are whole rows of tensors, not equal parts. For eager recipes, adapters declare it by
    rank.
    """
    arithmetic: str = "bf16"
    """The dtype whose peak the matrix products are compared with."""
    products: NarrowProducts | None = None
    """Narrower products in the blocks' linear layers, or None."""
    adapter_rank: int = 0
    """Rank of LoRA's adapters beside every linear layer of the blocks, which alone are trained. 0 trains everything."""

    frozen_bytes: float | None = None
    """Bytes of a frozen weight of the blocks' linear layers, if they are quantized."""

    def frozen(self, *, quantized: bool) -> TrainingRecipe:
        """Return the recipe of weights that are not trained: no gradients, no masters and no moments.

        They are kept in 16 bits, or, if they are those that are `quantized`, in fewer.
        """
        width = min(self.states.weight_bytes, self.activations.element_bytes)
        if quantized and self.frozen_bytes is not None:
            width = self.frozen_bytes
        alone = replace(
            self.states, weight_bytes=width, gradient_bytes=0, master_bytes=0, moment_bytes=0, shard_gradient_bytes=0
        )
        return replace(self, states=alone, buffers=replace(self.buffers, bucket_bytes=0))


# As the suites run: fp32 in PyTorch's eager kernels, whose attention keeps no scores on a CPU either.
_EAGER = TrainingRecipe(
    name="eager",
    states=StateBytes(weight_bytes=4, gradient_bytes=4, master_bytes=0),
    wire=Wire(reduce_bytes=4, gather_bytes=4),
    activations=ActivationBytes(element_bytes=4),
    arithmetic="fp32",
    eager=Widths.of(Precision.FP32, casts_weights=False),
    update=UpdateForm.LOOP,
)

# 4 + 4 + 8 = 16, all sharded: FSDP2 keeps fp32 weights and gathers bf16 (arXiv:2410.06511). A logit: in bf16 while a
# variable holds it, and in fp32 as log-softmax, as that one's gradient and as its own. tests/test_logit_bytes.py has
# 14 so, and 12 of a trainer that frees its logits first, as torchtitan's does, whose published peaks (of what its
# allocator reserved) are 0 to 9 % above the plan with 14. Outside: context and one communicator, as nanotron's below.
_FSDP2 = TrainingRecipe(
    name="fsdp2",
    states=StateBytes(weight_bytes=4, gradient_bytes=4, master_bytes=0),
    buffers=BufferBytes(outside_bytes=0.9e9),
    wire=Wire(reduce_bytes=4, gather_bytes=2),
    activations=ActivationBytes(logit_bytes=14),
    deals_rows=True,
)

RECIPES: dict[str, TrainingRecipe] = {
    recipe.name: recipe
    for recipe in (
        # 2 + 2 + 12 = 16 (arXiv:1910.02054 sec. 3.1, K = 12).
        TrainingRecipe(
            name="zero",
            states=StateBytes(weight_bytes=2, gradient_bytes=2, master_bytes=4),
            activations=ActivationBytes(logit_bytes=8, flash_attention=False, dropout_masks=True),
            arithmetic="fp16",
        ),
        # 2 + 4 + 12 = 18: gradients are held in fp32 (arXiv:2205.05198 fig. 1; DeepSpeed's estimator).
        TrainingRecipe(
            name="megatron",
            states=StateBytes(weight_bytes=2, gradient_bytes=4, master_bytes=4),
            buffers=BufferBytes(fresh_gradient_bytes=0),
            wire=Wire(hides_backward_gathers=True),
            activations=ActivationBytes(flash_attention=False, dropout_masks=True),
            arithmetic="fp16",
        ),
        # megatron-core as NeMo runs it: flash attention, bf16, distributed optimizer, no dropout; gradients are held
        # and reduced in bf16 (`grad_reduce_in_fp32=False` of NeMo's recipes), and the optimizer has an fp32 copy of
        # its shard's. Performance recipes of NeMo and Megatron-Bridge say `cross_entropy_fusion_impl="te"`, whose
        # kernels read bf16 logits twice, write their gradient, and scale it (Transformer Engine's
        # triton/cross_entropy.py): in their place up to 2.14, and in 32 bits beside them since (01bbe3e), which
        # memory is planned with. Outside as FSDP2's. Segments are expanded where a layout needs it ("OOM if not set",
        # Megatron-Bridge v0.1.0rc4 scripts/performance/setup_experiment.py), and in every recipe since (its
        # recipes/utils/environment_utils.py).
        TrainingRecipe(
            name="megatron-core",
            states=StateBytes(weight_bytes=2, gradient_bytes=2, master_bytes=4, shard_gradient_bytes=4),
            buffers=BufferBytes(outside_bytes=0.9e9, expands_segments=True),
            wire=Wire(hides_backward_gathers=True, gathers_narrow=True, hides_sends=True),
            activations=ActivationBytes(
                logit_bytes=6, moved_logit_bytes=10, fused_elementwise=True, selective_core=True
            ),
            cut=PipelineCut(ends_count=True),
        ),
        # Megatron-DeepSpeed of 2022, ZeRO-1: an fp32 copy of a rank's share of the gradients (its stage_1_and_2.py), a
        # reduce and an all-gather bucket of 5e8 16-bit elements (its defaults); its pipeline sends whole tensors.
        TrainingRecipe(
            name="megatron-deepspeed",
            states=StateBytes(weight_bytes=2, gradient_bytes=2, master_bytes=4, shard_gradient_bytes=4),
            buffers=BufferBytes(flat_buffer_bytes=2e9),
            wire=Wire(sends_whole=True),
            activations=ActivationBytes(flash_attention=False, dropout_masks=True),
            arithmetic="fp16",
        ),
        # The same with its BF16_Optimizer: 16-bit gradients, and an fp32 accumulator of all of them.
        TrainingRecipe(
            name="megatron-deepspeed-bf16",
            states=StateBytes(weight_bytes=2, gradient_bytes=6, master_bytes=4),
            buffers=BufferBytes(flat_buffer_bytes=2e9),
            wire=Wire(sends_whole=True),
            activations=ActivationBytes(flash_attention=False, dropout_masks=True),
            arithmetic="fp16",
        ),
        # 2 + 2 + 4 + 12 = 20: an fp32 copy of the gradients beside the 16-bit ones (Krishnamurthy's deck).
        TrainingRecipe(
            name="mixed20",
            states=StateBytes(weight_bytes=2, gradient_bytes=6, master_bytes=4),
            activations=ActivationBytes(flash_attention=False, dropout_masks=True),
        ),
        # 2 + 4 + 12 = 18, and DDP's buckets of 2, or the flat buffer that ZeRO-1 gathers weights into. Gradients are
        # all-reduced in fp32; stages are cut by compute. Beside the fresh gradients of 2 lie DDP's first buckets, which
        # it rebuilds after a step and the allocator keeps, or what ZeRO-1 gathers out of and into besides.
        # Logits: bf16 and their fp32 copy; the softmax of the micro-batch before is freed after the next forward pass.
        # Its source counts the head whole, and so cut the branch that polls. The step times of other pipelines in the
        # sweep do not: two stages take half of one's time with 10 of 16 layers on the first, where the source's count
        # gives 11, and on 16 stages the head is not with two layers. Any share between 0.91 and 0.966 gives their cuts.
        # Outside: half a GB of context, and 0.4 for each of the six communicators that it uses.
        TrainingRecipe(
            name="nanotron",
            states=StateBytes(weight_bytes=2, gradient_bytes=4, master_bytes=4),
            buffers=BufferBytes(bucket_bytes=2, fresh_gradient_bytes=4, outside_bytes=2.8e9),
            wire=Wire(reduce_bytes=4, reduces_by_tensor=True, reduces_under_zero1=True),
            activations=ActivationBytes(logit_bytes=6, kept_logit_bytes=4),
            cut=PipelineCut(balanced_stages=True, head_share=0.95),
        ),
        _FSDP2,
        # FSDP1 with everything in bf16 on the wire, as github:foundation-model-stack/fms-fsdp has it (its
        # policies/mixed_precision.py): gradients too are reduced in 16 bits.
        replace(
            _FSDP2,
            name="fsdp1-bf16",
            wire=Wire(reduce_bytes=2, gather_bytes=2),
            activations=replace(_FSDP2.activations, skips_last_product=True),
            deals_rows=False,
        ),
        # With plain `torch.optim.AdamW`, not torchtitan's fused one: the update holds the roots of all second moments.
        # FSDP that keeps gathered weights from forward to backward passes, in interleaved pipelines. Gradients are
        # accumulated and reduced in fp32, and sharded as the states are (arXiv:2407.21783 sec. 3.3.2).
        replace(
            _FSDP2,
            name="llama3",
            states=StateBytes(weight_bytes=2, gradient_bytes=4, master_bytes=4),
            wire=Wire(reduce_bytes=4, gather_bytes=2, hides_sends=True),
            cut=PipelineCut(ends_count=True),
            deals_rows=False,
        ),
        replace(
            _FSDP2,
            name="fsdp2-foreach",
            activations=replace(_FSDP2.activations, skips_last_product=True),
            update=UpdateForm.FOREACH,
        ),
        # DDP keeps what FSDP2 does, whole: fp32 weights, gradients (in its buckets) and moments.
        replace(_FSDP2, name="ddp", update=UpdateForm.FOREACH, deals_rows=False),
        # A fused loss (llm-foundry's, Liger's): a logit in bf16 and its gradient. llm-foundry's FSDP1 shards evenly.
        replace(_FSDP2, name="fsdp-fused-loss", activations=ActivationBytes(logit_bytes=4), deals_rows=False),
        # DeepSpeed since 2023, and Gemini: bf16 and flash attention, and a trainer's own loss, as FSDP2's above.
        TrainingRecipe(
            name="deepspeed-bf16",
            states=StateBytes(weight_bytes=2, gradient_bytes=2, master_bytes=4),
            buffers=BufferBytes(flat_buffer_bytes=2e9, outside_bytes=0.9e9),
            activations=ActivationBytes(logit_bytes=14),
        ),
        # InternEvo's HybridZeroOptimizer (github:InternLM/InternEvo 00a2a34): bf16 gradients in buckets, reduced behind
        # the last backward pass, and weights that their owners send after the update (configs/7B_sft.py:
        # overlap_sync_grad True, overlap_sync_param False). FlashAttention; norms, rotation and gate are PyTorch's.
        TrainingRecipe(
            name="internevo",
            states=StateBytes(weight_bytes=2, gradient_bytes=2, master_bytes=4, shard_gradient_bytes=4),
            buffers=BufferBytes(flat_buffer_bytes=1e9, outside_bytes=0.9e9),
            wire=Wire(shows_gathers=True),
            activations=ActivationBytes(logit_bytes=14),
            cut=PipelineCut(ends_count=True),
        ),
        # MaxText and Pax on JAX: fp32 weights sharded, bf16 products, element-wise work fused by XLA, attention of
        # cuDNN (`attention=cudnn_flash_te` in github:NVIDIA/dgxc-benchmarking maxtext/configure.sh).
        TrainingRecipe(
            name="xla",
            states=StateBytes(weight_bytes=4, gradient_bytes=4, master_bytes=0),
            buffers=BufferBytes(outside_bytes=0.9e9),
            activations=ActivationBytes(
                logit_bytes=8, fused_elementwise=True, keeps_products=True, skips_last_product=True
            ),
        ),
        # 4 + 4 + 8 = 16, everything in fp32.
        TrainingRecipe(
            name="fp32",
            states=StateBytes(weight_bytes=4, gradient_bytes=4, master_bytes=0),
            wire=Wire(reduce_bytes=4, gather_bytes=4),
            activations=ActivationBytes(element_bytes=4, flash_attention=False),
            arithmetic="fp32",
        ),
        _EAGER,
        replace(_EAGER, name="eager-ddp", backward=replace(_EAGER.backward, gradient_path=GradientPath.BUCKETS)),
        replace(
            _EAGER, name="eager-deepspeed-0", backward=replace(_EAGER.backward, gradient_path=GradientPath.FLATTENED)
        ),
        # DeepSpeed keeps weights and masters in two copies in fp32 too, and at stage 1 no other rank's gradients.
        replace(
            _EAGER,
            name="eager-deepspeed-1",
            states=replace(_EAGER.states, master_bytes=4, gradient_stage=1),
            backward=replace(_EAGER.backward, gradient_path=GradientPath.STAGED),
        ),
        replace(
            _EAGER,
            name="eager-deepspeed-2",
            states=replace(_EAGER.states, master_bytes=4),
            backward=replace(_EAGER.backward, gradient_path=GradientPath.STREAMED),
        ),
        replace(
            _EAGER,
            name="eager-deepspeed-3",
            states=replace(_EAGER.states, master_bytes=4),
            backward=replace(_EAGER.backward, gradient_path=GradientPath.MODULES),
        ),
        replace(_EAGER, name="eager-fsdp1", backward=replace(_EAGER.backward, gradient_path=GradientPath.FLAT_UNITS)),
        replace(_EAGER, name="eager-fsdp2", backward=replace(_EAGER.backward, gradient_path=GradientPath.UNITS)),
    )
}


def recipe(name: str) -> TrainingRecipe:
    """Return the recipe called `name`. Raises `UnknownNameError` when there is none."""
    if name not in RECIPES:
        raise UnknownNameError("recipe", name, RECIPES)
    return RECIPES[name]


def narrowed(using: TrainingRecipe, precision: str) -> TrainingRecipe:
    """Return the recipe with linear layers in `precision`: fp8, mxfp8 or nvfp4.

    Sharded weights are gathered in 8 bits, as Megatron's `fp8_param_gather` and torchao's
    `enable_fsdp_float8_all_gather` do. Memory is planned as in 16 bits. Raises `InputError` for a recipe in fp32.
    """
    if precision not in NARROW:
        raise UnknownNameError("precision of products", precision, NARROW)
    if using.eager or using.arithmetic == "fp32":
        raise InputError(f"recipe {using.name!r} has products in fp32, not in {precision}")
    return replace(using, products=NARROW[precision], wire=replace(using.wire, gather_bytes=1.0))


QUANTIZED = {"nf4": 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0)}
"""Bytes of a quantized frozen weight.

NF4 has 4 bits, a scale of 8 bits for each 64 of them, and one of 32 bits for each 256 scales (QLoRA, arXiv:2305.14314
section 3: 0.127 bits a weight beside its 4).
"""


def adapted(using: TrainingRecipe, rank: int, model: ModelSpec, quantized: str = "") -> TrainingRecipe:
    """Return the recipe that trains LoRA's adapters of this rank alone, beside weights `quantized` as `QUANTIZED` says.

    Raises `InputError` for a rank, a model or a recipe that adapters are not planned for.
    """
    if quantized and quantized not in QUANTIZED:
        raise UnknownNameError("format of frozen weights", quantized, QUANTIZED)
    if rank == 0:
        if quantized:
            raise InputError(f"frozen weights in {quantized}, but none are frozen: give LoRA's rank too")
        return using
    most = min(model.hidden, model.ffn_hidden)
    if not 1 <= rank <= most:
        raise InputError(f"a LoRA of rank {rank}, expected 1 to {most}, the narrowest linear layer of {model.name!r}")
    if model.routing_share or model.latent_weights:
        raise InputError(f"LoRA is not planned for experts or latent attention, which {model.name!r} has")
    if using.products or using.eager:
        what = using.products.name if using.products else f"recipe {using.name!r}"
        raise InputError(f"LoRA is not planned with {what}: name products in bf16, and a recipe that is not eager")
    using = replace(using, adapter_rank=rank)
    if not quantized:
        return using
    width = QUANTIZED[quantized]  # which is also what ZeRO-3 gathers
    return replace(using, frozen_bytes=width, wire=replace(using.wire, gather_bytes=width))


def eager_recipe(case: Case, name: str = "eager", *, casts_weights: bool = False) -> TrainingRecipe:
    """Return the eager recipe called `name` in the case's precision and with its optimizer.

    Weights, gradients and moments are in the wide dtype, since autocast makes its copies for one operation at a time.
    `casts_weights` is as in `Widths.of`.
    """
    precision, optimizer, using = case.precision, case.workload.optimizer, recipe(name)
    wide = precision.master.itemsize
    widths = Widths.of(precision, casts_weights=casts_weights)
    low = precision.weights.itemsize if casts_weights else wide
    moments = 0.0 if optimizer.is_matrix_wise else precision.states.itemsize * optimizer.states_per_parameter
    return replace(
        using,
        states=replace(
            using.states,
            weight_bytes=wide,
            gradient_bytes=precision.accumulation.itemsize,
            moment_bytes=moments,
            matrix_wise=MatrixWise(optimizer=optimizer, dtype=precision.states) if optimizer.is_matrix_wise else None,
        ),
        wire=replace(using.wire, reduce_bytes=precision.reduction.itemsize, gather_bytes=low),
        activations=replace(using.activations, element_bytes=widths.stream),
        eager=widths,
        update=UpdateForm.FUSED if case.tuning.fused_optimizer else using.update,
    )
