"""FLOPs of a training step, with separate names for the conventions that the literature mixes.

A multiply-add is two operations. The backward pass does twice the matrix products of the forward pass.
"""

from __future__ import annotations

from typing import Literal

from meshmark.spec.model_spec import ModelSpec

Attention = Literal["full", "causal"]


def layer_matrix_parameters(model: ModelSpec) -> int:
    """Return the matrix weights of one layer. Norms and biases do no matrix products."""
    return round(model.layer_matrix_weights)


def model_flops_per_token(model: ModelSpec, *, attention: Attention = "full", adapter_rank: int = 0) -> float:
    """Return the FLOPs of the forward and backward pass of one token, without recomputation.

    It is 6 per matrix weight (including the head, excluding the embedding), and 12 s h per layer for the scores and
    their product with the values, or half of it if only the causal half counts. With full attention this is PaLM's
    count (arXiv:2204.02311 appendix B), and for a GPT that of arXiv:2205.05198 appendix A: 72 B L s h^2 (1 + s/6h +
    V/12hL). With LoRA's adapters, frozen weights have no gradients, and count 4 instead of 6 (arXiv:2106.09685).
    """
    weights = model.num_layers * layer_matrix_parameters(model) + model.vocab_size * model.hidden
    scores = 12.0 * model.num_layers * model.seq_len * model.attention_width * (0.5 if attention == "causal" else 1.0)
    if adapter_rank:
        return 4.0 * weights + 6.0 * model.num_layers * adapter_rank * model.adapted_widths + scores
    return 6.0 * weights + scores


def hardware_flops_per_token(model: ModelSpec, *, recompute: str, attention: Attention = "full") -> float:
    """Return the FLOPs per token that the device computes, including recomputation.

    `full` repeats the forward pass of the layers (not of the head), `selective` that of the attention core; see
    arXiv:2205.05198 appendix A and arXiv:2104.04473 eq. (3).
    """
    flops = model_flops_per_token(model, attention=attention)
    half = 0.5 if attention == "causal" else 1.0
    core = 4.0 * model.num_layers * model.seq_len * model.attention_width * half
    if recompute == "full":
        return flops + 2.0 * model.num_layers * layer_matrix_parameters(model) + core
    return flops + (core if recompute == "selective" else 0.0)
