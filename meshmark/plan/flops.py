"""Floating-point operations of a training step."""

from __future__ import annotations

from meshmark.model_spec import Family, ModelSpec


def model_flops_per_token(model: ModelSpec) -> float:
    """Operations that one token's forward and backward need, recomputation not counted: 6 for every parameter in a
    matrix product (the head counts, embeddings do not), and 12 L h T for attention's two products over the full, not
    the causal, square (PaLM, arXiv:2204.02311, appendix B)."""
    feed_forward = (2 if model.family is Family.GPT else 3) * model.hidden * model.ffn_hidden
    attention = 2 * model.hidden * (model.hidden + model.kv_hidden)
    matrices = model.num_layers * (attention + feed_forward) + model.vocab_size * model.hidden
    return 6.0 * matrices + 12.0 * model.num_layers * model.hidden * model.seq_len
