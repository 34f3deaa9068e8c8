"""The truth of a model that is too large to differentiate at once: float64, layer by layer, on any device.

The forward pass keeps only the inputs of each layer. The backward pass runs every layer again, from the last to the
first, and yields its gradients before the next. One layer is in memory at a time, for as many rows as take at most
`MOST_BYTES`.
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
"""Approximate upper bound for one layer's activations, in bytes."""
_WORKING = 4
"""Tensors of the size of a layer's largest that autograd holds at once: logits, their logarithms, gradients."""


Piece = dict[str, Tensor | None]
"""Gradients of some parameters, on the device. None for a parameter without effect on the loss."""


class LayeredTruth:
    """Loss and gradients of a global batch at given parameters, without dropout."""

    def __init__(self, workload: Workload, parameters: Tensors, batch: Batch, device: torch.device) -> None:
        """`parameters` are read one layer at a time. The workload's rows must not be coupled."""
        assert not workload.couples_rows
        self.workload, self.parameters, self.batch, self.device = workload, parameters, batch, device
        self.loss = 0.0
        """The loss. Complete once the first piece has been yielded."""
        self._tied: dict[str, Tensor] = {}
        """Gradients of parameters that another layer also contributes to."""

    @property
    def num_layers(self) -> int:
        return self.workload.model.num_layers + 2

    def pieces(self) -> Iterator[Piece]:
        """Yield each layer's gradients, from the last to the first. Every trained parameter comes once."""
        inputs, above = self._inputs(), list[Tensor]()
        for layer in reversed(range(self.num_layers)):
            model, values = self._layer(layer)
            gradients, above = self._differentiate(model, values, inputs.pop(), above)
            rank_progress.advance()
            yield self._untied(model, gradients)

    @torch.no_grad()
    def _inputs(self) -> list[list[Tensor]]:
        """Return the inputs of each layer, in parts of some rows."""
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
        """Return a model of one layer without values, and its values."""
        with torch.device("meta"):
            model = build_model(self.workload.model, [layer])
        model.eval().skipped_block = self.batch.skipped_block
        return model, {name: self._value(drawn_name(model.spec, name), p.shape) for name, p in model.named_parameters()}

    def _value(self, name: str, shape: torch.Size) -> Tensor:
        """Return a parameter's value, or NaN if the run did not report it."""
        told = self.parameters.get(name)
        value = torch.full(shape, math.nan) if told is None else torch.from_numpy(told)
        return value.to(self.device, torch.float64).requires_grad_(self.workload.trains(name))

    def _differentiate(
        self, model: Model, values: dict[str, Tensor], inputs: list[Tensor], above: list[Tensor]
    ) -> tuple[Piece, list[Tensor]]:
        """Return the gradients of a layer's trained parameters and of its inputs. `above` is those of its outputs."""
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
        """Return whole gradients by canonical name. A tied head's part is kept until the embedding's gradient."""
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
    """Return the number of rows whose activations of one layer fit into `MOST_BYTES`."""
    spec, positions = workload.model, workload.model.seq_len
    if isinstance(spec, ModelSpec):
        widest = max(4 * spec.hidden, spec.num_heads * positions, spec.vocab_size, spec.ffn_hidden)
    else:
        widest = spec.widest
    return max(MOST_BYTES // (8 * _WORKING * positions * widest), 1)
