"""The truth of a model too large to be differentiated whole: float64, layer by layer, on any device.

The forward pass keeps what goes into each layer alone; the backward pass runs every layer again, from the last to the
first, and gives its gradients before it turns to the next. So there is one layer in memory at a time, of as many rows
at once as take no more than `MOST_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from meshmark import rank_progress
from meshmark.judge.deviation import Tensors
from meshmark.reference.build import build_model
from meshmark.reference.data import Batch
from meshmark.reference.model import Model, drawn_name
from meshmark.reference.objective import loss_share
from meshmark.spec.model_spec import ModelSpec
from meshmark.spec.workload import Workload

MOST_BYTES = 2**30
"""Of one layer's activations, about."""
_WORKING = 4
"""Of the largest tensor of a layer, those that autograd has in memory together: logits, their logarithms, gradients."""


Piece = dict[str, Tensor | None]
"""Some parameters' gradients, on the device; None where a parameter has no part in the loss."""


class LayeredTruth:
    """Loss and gradients of a global batch at some parameters, without dropout."""

    def __init__(self, workload: Workload, parameters: Tensors, batch: Batch, device: torch.device) -> None:
        """`parameters` are read a layer at a time; no rows of the workload may be coupled."""
        assert not workload.couples_rows
        self.workload, self.parameters, self.batch, self.device = workload, parameters, batch, device
        self.loss = 0.0
        """Whole when the first piece is there."""
        self._tied: dict[str, Tensor] = {}
        """Gradients of parameters of which another layer holds a part too."""

    @property
    def num_layers(self) -> int:
        return self.workload.model.num_layers + 2

    def pieces(self) -> Iterator[Piece]:
        """A layer's gradients each, from the last to the first; every trained parameter comes once."""
        inputs, above = self._inputs(), list[Tensor]()
        for layer in reversed(range(self.num_layers)):
            model, values = self._layer(layer)
            gradients, above = self._differentiate(model, values, inputs.pop(), above)
            rank_progress.advance()
            yield self._untied(model, gradients)

    @torch.no_grad()
    def _inputs(self) -> list[list[Tensor]]:
        """What goes into each layer, some rows each."""
        rows = [part.inputs.to(self.device) for part in self._parts()]
        found = [rows]
        for layer in range(self.num_layers - 1):
            model, values = self._layer(layer)
            rows = [torch.func.functional_call(model, values, (x,)) for x in rows]
            found.append(rows)
            rank_progress.advance()
        return found

    def _parts(self) -> list[Batch]:
        count = min(rows_at_once(self.workload), len(self.batch))
        return [self.batch.rows(i, min(i + count, len(self.batch))) for i in range(0, len(self.batch), count)]

    def _layer(self, layer: int) -> tuple[Model, dict[str, Tensor]]:
        """A model of one layer, without values, and its values."""
        with torch.device("meta"):
            model = build_model(self.workload.model, [layer])
        model.eval().skipped_block = self.batch.skipped_block
        return model, {name: self._value(drawn_name(model.spec, name), p.shape) for name, p in model.named_parameters()}

    def _value(self, name: str, shape: torch.Size) -> Tensor:
        """No number where the run did not tell."""
        told = self.parameters.get(name)
        value = torch.full(shape, math.nan) if told is None else torch.from_numpy(told)
        return value.to(self.device, torch.float64).requires_grad_(self.workload.trains(name))

    def _differentiate(
        self, model: Model, values: dict[str, Tensor], inputs: list[Tensor], above: list[Tensor]
    ) -> tuple[Piece, list[Tensor]]:
        """The gradients of a layer's trained parameters, and of its inputs; `above` are those of its outputs."""
        trained = {name: value for name, value in values.items() if value.requires_grad}
        total, below = Piece.fromkeys(trained), list[Tensor]()
        for i, (rows, part) in enumerate(zip(inputs, self._parts(), strict=True)):
            x = rows.detach().requires_grad_(rows.is_floating_point())
            wanted = [*trained.values(), *([x] if x.requires_grad else [])]
            out: Tensor = torch.func.functional_call(model, values, (x,))
            if not above:
                part = part.to(self.device)
                out = loss_share(out, part, self.workload.loss)
                self.loss += float(out.detach())
            inwards = above[i] if above else None
            found = torch.autograd.grad(out, wanted, inwards, allow_unused=True) if out.requires_grad else ()
            for name, gradient in zip(trained, found, strict=False):
                before = total[name]
                total[name] = before if gradient is None else gradient if before is None else before + gradient
            below += [g for g in found[len(trained) :] if g is not None]
        return total, below

    def _untied(self, model: Model, gradients: Piece) -> Piece:
        """By canonical name, and whole: what a tied head adds to the embedding's gradient waits for that."""
        found: Piece = {}
        for name, gradient in gradients.items():
            whole = drawn_name(model.spec, name)
            if whole != name:
                self._tied |= {} if gradient is None else {whole: gradient}
            elif gradient is not None and name in self._tied:
                found[name] = gradient.add_(self._tied.pop(name))
            else:
                found[name] = gradient
        return found


def rows_at_once(workload: Workload) -> int:
    """Rows of a batch whose activations of one layer fit into `MOST_BYTES`."""
    spec, positions = workload.model, workload.model.seq_len
    if isinstance(spec, ModelSpec):
        widest = max(4 * spec.hidden, spec.num_heads * positions, spec.vocab_size, spec.ffn_hidden)
    else:
        widest = spec.widest
    return max(MOST_BYTES // (8 * _WORKING * positions * widest), 1)
