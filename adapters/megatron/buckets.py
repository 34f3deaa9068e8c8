"""How megatron-core's DistributedDataParallel cuts a chunk's gradients into buckets, and pads them."""

from __future__ import annotations

import math

from meshmark.adapters.megatron.gpt_weights import dense
from meshmark.models.transformer import Family, ModelSpec
from meshmark.spec.case import Case


def default_elements(dp: int) -> int:
    """Return the default number of elements of a bucket (`DistributedDataParallel.__init__`)."""
    return max(40_000_000, 1_000_000 * dp)


def bucket_sizes(case: Case, rank: int, chunk: int, elements: int | None) -> list[int]:
    """Return the sizes of the buckets of one of a rank's chunks, in elements with padding.

    A bucket ends with the tensor that reaches `elements`; None means a single bucket. Chunks after the first, and
    pipeline ranks after the first, also have a single bucket, because their backward passes end before those of others.
    Under the distributed optimizer tensors are laid out from the last to the first and begin at multiples of 64.
    Buckets then end at a multiple of 128 and of the replicas (`_ParamAndGradBuffer`).
    """
    whole = elements is None or chunk > 0 or case.layout.coordinates(rank).pp > 0
    shares = case.layout.zero_stage > 0
    tensor, unit = (64, math.lcm(case.layout.dp, 128)) if shares else (1, 1)
    found, filled = list[int](), 0
    for size in reversed(local_sizes(case, rank, range(chunk, chunk + 1))):
        filled = math.ceil(filled / tensor) * tensor + size
        if not whole and elements is not None and filled >= elements:
            found, filled = [*found, math.ceil(filled / unit) * unit], 0
    return [*found, math.ceil(filled / unit) * unit] if filled else found


def local_sizes(case: Case, rank: int, chunks: range) -> list[int]:
    """Elements of this rank's tensors that are trained, in those of its chunks, in the order of megatron-core's
    modules."""
    layout, spec, stands = case.layout, dense(case.workload), case.layout.coordinates(rank)
    num_places, is_gpt = layout.pp * layout.virtual_stages, spec.family is Family.GPT
    vocabulary = spec.vocab_size * spec.hidden // layout.tp
    found: list[tuple[str, int]] = []
    for place in (chunk * layout.pp + stands.pp for chunk in chunks):
        if place == 0:
            found.append(("embedding.tokens.weight", vocabulary))
            found += [("embedding.positions.weight", spec.seq_len * spec.hidden)] if is_gpt else []
        for block in stage_blocks(case, place):
            found += [(f"blocks.{block}.{name}", size) for name, size in _layer_sizes(spec, layout.tp)]
        if place == num_places - 1:
            found += [("head.norm.weight", spec.hidden), *([("head.norm.bias", spec.hidden)] if is_gpt else [])]
            found.append(("head.output.weight", vocabulary))
    return [size for name, size in found if case.workload.trains(name)]


def stage_blocks(case: Case, place: int) -> list[int]:
    """Return the blocks of a stage, counted from 0."""
    model, num_stages = case.workload.model, case.layout.pp * case.layout.virtual_stages
    return [layer - 1 for layer in model.stage_layers(num_stages, place) if 1 <= layer <= model.num_layers]


def _layer_sizes(spec: ModelSpec, tp: int) -> list[tuple[str, int]]:
    """Return the names and sizes of one layer's tensors, a fused one by the first that it contains.

    They are norm, projection out and in of attention, norm, feed-forward in and out; with biases in GPT.
    """
    is_gpt, width = spec.family is Family.GPT, spec.hidden
    qkv = (width + 2 * spec.kv_hidden) // tp
    inner = spec.ffn_hidden // tp * (1 if is_gpt else 2)
    weights_and_biases = [
        ("attention_norm", width, width),
        ("attention.out", width * width // tp, width),
        ("attention.q", qkv * width, qkv),
        ("feed_forward_norm", width, width),
        ("feed_forward.up", inner * width, inner),
        ("feed_forward.down", spec.ffn_hidden // tp * width, width),
    ]
    return [
        (f"{name}.{kind}", size)
        for name, weight, bias in weights_and_biases
        for kind, size in (("weight", weight), *([("bias", bias)] if is_gpt else []))
    ]
