"""What PyTorch's eager autograd keeps of the forward pass of this project's own model (meshmark/model.py) on a CPU,
operation by operation, to the byte: no formula of a paper, whose models fuse and mask other things.

Widths a token: h hidden, f feed-forward, v vocabulary; a heads; those inside a tensor-parallel region and v over t
(arXiv:1909.08053 sec. 3). What two operations save is counted once: a storage is kept, not a use of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.case import Case
from meshmark.layout import Layout, Precision, Recompute, Schedule
from meshmark.model_spec import Family, ModelSpec

_INDEX_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element, by where it is."""

    stream: int
    """The residual stream and the norms' outputs."""
    low: int
    """Inside attention and feed-forward."""
    wide: int
    """Statistics, RMSNorm's inside and the loss: float32 at least."""
    autocast: bool = False
    """A matrix product that finds a wide input or weight saves a low copy of its own."""

    @classmethod
    def of(cls, precision: Precision, *, casts_weights: bool) -> Widths:
        """`casts_weights`: a mixed precision that runs the stream too in the low one, in place of autocast."""
        if precision in (Precision.FP64, Precision.FP32):
            wide = 8 if precision is Precision.FP64 else 4
            return cls(stream=wide, low=wide, wide=wide)
        return cls(stream=2 if casts_weights else 4, low=2, wide=4, autocast=not casts_weights)


def norm_bytes(model: ModelSpec, widths: Widths, num_products: int) -> int:
    """One norm, a token, before `num_products` matrix products: its input, its inside, and what the products save.

    LayerNorm is one operation and saves its input, mean and reciprocal deviation. RMSNorm is written out: the product
    with the reciprocal root saves both factors in the wide precision, the product with the weight the normed value.
    Autocast gives every product its own low copy of the output, which itself is then forgotten.
    """
    h = model.hidden
    output = 2 * num_products * h if widths.autocast else widths.stream * h
    if model.family is Family.GPT:
        return widths.stream * (h + 2) + output
    return widths.wide * (h + 1) + widths.stream * h + output


def attention_bytes(model: ModelSpec, widths: Widths, tp: int = 1) -> float:
    """Queries, keys, values, output and one logarithm a head. The output lies as the queries do: by head where rotary
    positions were written, and then the projection saves a copy that lies by token (of one head, the same thing)."""
    copied = model.family is Family.LLAMA and model.num_heads > tp
    elements = (3 if copied else 2) * model.hidden + 2 * model.kv_hidden
    return (widths.low * elements + widths.wide * model.num_heads) / tp


def feed_forward_bytes(model: ModelSpec, widths: Widths, tp: int = 1) -> float:
    """GELU's input and output; SwiGLU's gate, its SiLU, the other factor and the product."""
    return (2 if model.family is Family.GPT else 4) * widths.low * model.ffn_hidden / tp


def block_bytes(model: ModelSpec, widths: Widths, tp: int = 1) -> float:
    """One block, a token. Residual sums save nothing: the streams are the norms' inputs."""
    norms = norm_bytes(model, widths, 3) + norm_bytes(model, widths, 1 if model.family is Family.GPT else 2)
    return norms + attention_bytes(model, widths, tp) + feed_forward_bytes(model, widths, tp)


def head_bytes(model: ModelSpec, widths: Widths, tp: int = 1) -> float:
    """The last norm, and the log-softmax, which the loss saves instead of the logits."""
    return norm_bytes(model, widths, 1) + widths.wide * model.vocab_size / tp


def cast_weight_bytes(model: ModelSpec, num_layers: int, has_head: bool, tp: int) -> float:
    """The low copies of its matrices that autocast makes for one forward pass, which its products save."""
    h, f = model.hidden, model.ffn_hidden
    matrices = 2 * h * (h + model.kv_hidden) + (2 if model.family is Family.GPT else 3) * h * f
    return 2 * (num_layers * matrices + (model.vocab_size * h if has_head else 0)) / tp


def micro_batch_tokens(case: Case) -> int:
    """Of one rank."""
    layout, workload = case.layout, case.workload
    return workload.global_batch // (layout.dp * layout.num_micro_batches) * workload.model.seq_len


def _is_planned(layout: Layout, model: ModelSpec) -> bool:
    plain = layout.recompute is Recompute.NONE and layout.cp == 1 and not layout.sequence_parallel
    return plain and model.dropout == 0 and (layout.pp == 1 or layout.schedule is Schedule.GPIPE)


def held_activations(case: Case, rank: int, *, casts_weights: bool = False) -> float | None:
    """Bytes that the forward passes of `rank` have left when the step's first backward pass begins: of one micro-batch,
    or of all of them in a pipeline under GPipe's schedule (arXiv:1811.06965). None for what is not planned: dropout,
    recomputation, other schedules, sequence and context parallelism."""
    layout, model = case.layout, case.workload.model
    if not _is_planned(layout, model):
        return None
    widths = Widths.of(case.precision, casts_weights=casts_weights)
    stage = rank // (layout.tp * layout.dp)
    share, rest = divmod(model.num_layers, layout.pp)
    num_layers, is_last = share + (stage < rest), stage == layout.pp - 1
    per_token = num_layers * block_bytes(model, widths, layout.tp)
    if is_last:
        per_token += head_bytes(model, widths, layout.tp)
    if stage:  # the first norm's input lies in the buffer it was received in, which counts as communication
        per_token -= widths.stream * model.hidden
    held = micro_batch_tokens(case) * per_token
    if stage == 0 and model.family is Family.GPT:
        held += _INDEX_BYTES * model.seq_len  # of the positions; those of the tokens are the batch itself
    if widths.autocast:
        held += cast_weight_bytes(model, num_layers, is_last, layout.tp)
    return held * (layout.num_micro_batches if layout.pp > 1 else 1)
