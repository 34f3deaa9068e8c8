"""A workload's rows and loss in the words of `transformers.Trainer`: a dict with `labels`, and a loss function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmark.adapter.loop import collate, unmetered
from meshmark.reference.data import IGNORED, Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.reference.own_model import weight_of
from meshmark.reference.transformers_model import DEFAULT_HEAD, parts_of
from meshmark.spec.case import Case
from meshmark.spec.own_model import HUGGING_FACE, OwnModelConfig
from meshmark.spec.workload import Loss, Workload

INPUTS = "x"
"""Name of the argument of `meshmark.models.module.Model.forward`."""


def uncountable(case: Case) -> str | None:
    """Return why the Trainer cannot divide by the weight of a user's loss: it counts labels. None where it can."""
    model = case.workload.model
    if not isinstance(model, OwnModelConfig):
        return None
    weights = row_weights(model, make_batch(case.workload, 0))
    if all(weight == int(weight) for weight in weights):
        return None
    return (
        f"{case.adapter} does not support a loss whose rows weigh {weights[0]:.4g}: the Trainer counts labels, so "
        "weights must be whole numbers"
    )


def no_model_of_transformers(case: Case) -> str | None:
    """Return why a case trains no model of Transformers; None where it does."""
    model = case.workload.model
    if isinstance(model, OwnModelConfig) and model.target.startswith(HUGGING_FACE):
        return None
    return f"{case.adapter} trains models of Transformers alone, by the loss that they compute: --workload hf:FILE.json"


def row_weights(model: OwnModelConfig, batch: Batch) -> list[float]:
    """Return the weight of the loss of every row."""
    return [weight_of(model.target, batch.rows(row, row + 1).inputs) for row in range(len(batch))]


def collator(workload: Workload) -> Callable[[Sequence[Batch]], dict[str, Any]]:
    """Return the Trainer's `data_collator`: rows become what the model takes, and the labels that are counted."""

    def collated(rows: Sequence[Batch]) -> dict[str, Any]:
        batch = collate(rows)
        return {INPUTS: batch.inputs, "labels": _labels(workload, batch)}

    return collated


def model_collator(workload: Workload) -> Callable[[Sequence[Batch]], dict[str, Any]]:
    """Return the `data_collator` of a model of Transformers that computes its own loss.

    Labels of next tokens are shifted already, which causal models are told by `shift_labels`.
    """
    assert isinstance(workload.model, OwnModelConfig)
    causal = parts_of(workload.model.target)[1] == DEFAULT_HEAD

    def collated(rows: Sequence[Batch]) -> dict[str, Any]:
        given: dict[str, Any] = collate(rows).inputs
        return {**given, "shift_labels": given["labels"]} if causal else given

    return collated


def _labels(workload: Workload, batch: Batch) -> Tensor:
    """Targets; or, of a user's own loss, as many labels in every row as it weighs, for the Trainer to count."""
    if not isinstance(workload.model, OwnModelConfig):
        return batch.targets
    if isinstance(batch.inputs, dict) and "labels" in batch.inputs:
        labels: Tensor = batch.inputs["labels"]
        if int((labels != IGNORED).sum()) == weight_of(workload.model.target, batch.inputs):
            return labels
    weights_B = torch.tensor(row_weights(workload.model, batch)).long()
    most = max(int(weights_B.max()), 1)
    return unmetered(torch.where(torch.arange(most) < weights_B[:, None], 0, IGNORED))


def loss_function(workload: Workload) -> Callable[..., Tensor]:
    """Return the Trainer's `compute_loss_func`: the sum over labels, divided by their number in the whole batch."""

    def loss(outputs: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        if workload.loss is Loss.OWN:
            return outputs / num_items_in_batch
        rows = Batch(inputs=labels, targets=labels, weights=(labels != IGNORED).float(), total_weight=1.0)
        return loss_share(outputs, rows, workload.loss) / num_items_in_batch

    return loss
