"""The GPT whose feed-forward networks are mixtures of experts; see `MixtureSpec`.

Shape suffixes: N tokens, C hidden, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.models.mixture import MixtureSpec
from meshmark.models.transformer.module import Block, FeedForward, Transformer
from meshmark.models.vision_transformer import TransformerSpec

Router = Callable[[Tensor], Tensor]
"""From scores [N, E] to the experts [N, K] that every token is sent to."""


class Mixture(nn.Module):
    """The experts that the gate scores highest, weighed by the softmax of their scores.

    An expert without tokens still runs, on an empty input, so that its parameters have a gradient of zero.
    """

    def __init__(self, spec: MixtureSpec) -> None:
        super().__init__()
        self.experts_per_token = spec.experts_per_token
        self.gate = nn.Linear(spec.hidden, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(spec) for _ in range(spec.num_experts))
        self.router: Router | None = None
        """Chooses the experts instead of the scores. Only the truth sets it."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        scores_NE = self.gate(x_NC)
        chosen_NK = self.router(scores_NE) if self.router else self.route(scores_NE)
        weights_NK = self.weigh(scores_NE.gather(1, chosen_NK))
        out_NC = torch.zeros_like(x_NC)
        for index, expert in enumerate(self.experts):
            token, place = (chosen_NK == index).nonzero(as_tuple=True)
            share = expert(x_NC[token]) * weights_NK[token, place, None]
            out_NC = out_NC.index_add(0, token, share.to(out_NC.dtype))
        return out_NC.view_as(x_BTC)

    def route(self, scores_NE: Tensor) -> Tensor:
        return scores_NE.topk(self.experts_per_token, dim=-1).indices

    def weigh(self, chosen_scores_NK: Tensor) -> Tensor:
        return F.softmax(chosen_scores_NK, dim=-1)


class MixtureBlock(Block):
    def make_feed_forward(self, spec: TransformerSpec) -> nn.Module:
        assert isinstance(spec, MixtureSpec)
        return Mixture(spec)


class MixtureTransformer(Transformer):
    block: ClassVar = MixtureBlock

    def make_block(self, index: int) -> MixtureBlock:
        return MixtureBlock(self.spec)
