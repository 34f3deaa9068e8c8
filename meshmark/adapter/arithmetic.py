"""How a framework computes what a precision leaves open: what another process must know to compute the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Casting(StrEnum):
    """Who makes the narrow copies of weights that matrix products read in mixed precision."""

    AUTOCAST = "autocast"
    """`torch.autocast`, one operation at a time; norms and the residual stream stay wide."""
    WEIGHTS = "weights"
    """All weights are cast, and with them the whole residual stream, as sharding frameworks do."""


class Summing(StrEnum):
    """Where gradients of a tensor that is read several times are added up first, each sum rounded to its format."""

    TENSORS = "tensors"
    """All in turn, as autograd meets them."""
    BLOCKS = "blocks"
    """Once for every block that reads the tensor. An autograd node at the block's inputs shows when it is done."""
    MODULES = "modules"
    """Once for every module, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Arithmetic that an adapter declares for a case in mixed precision, besides the precision itself.

    The order of rows, products fused or in parts and the attention kernel stay open. Under autocast the micro-batches
    do too.
    """

    casting: Casting
    averages: bool = True
    """Losses are multiplied by the number of data-parallel ranks and their gradients averaged; else added up."""
    divides: bool = False
    """Losses are multiplied by the number of micro-batches, for the framework divides by it again."""
    reduces_each: bool = False
    """The gradients of every micro-batch are reduced, not their sum once a step: the same where nothing is rounded on
    the way."""
    sums: Summing = Summing.TENSORS
    """At ZeRO's stage 3, where frameworks watch modules; without it, all in turn."""
    splits_products: bool = False
    """Linear layers and loss are in parts, one a tensor-parallel rank, as Megatron-LM's: summed over ranks in the
    narrow format behind products by rows and before the head; and biases are added wide, by one rank alone too."""
    gpt_model_order: bool = False
    """They are those of megatron-core's own GPTModel: queries, keys and values are one product, attention is unfused,
    with its softmax in float32, sequences come first, and biases of row-parallel products are added by themselves."""
