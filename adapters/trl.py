"""TRL's `SFTTrainer`: `transformers.Trainer` with a loss, a collator and defaults of its own.

It gets token ids and labels as its documentation has them, in a `datasets.IterableDataset`, and puts them together,
counts and divides by itself. Models are causal ones of Transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from meshmark.adapter.contract import Requirement
from meshmark.adapter.loop import Dealing, GlobalRows
from meshmark.adapters.hf_trainer import REQUIRES, HFTrainer
from meshmark.adapters.hf_trainer.loop import HFModelLossLoop
from meshmark.reference.data import IGNORED
from meshmark.reference.transformers_model import DEFAULT_HEAD, parts_of
from meshmark.spec.case import Case
from meshmark.spec.own_model import HUGGING_FACE, OwnModelConfig
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException

_COMMAND = "pip install trl==1.16.0"
_METRIC_BYTES = (8, 4, 8, 8)
"""Of a micro-batch: how many targets, the sum of entropies, how many are found first, how many tokens."""


class SFTLoop(HFModelLossLoop):
    """`SFTTrainer` on rows of token ids, with gradients that are computed from kept activations."""

    def trainer_class(self) -> type[Any]:
        from trl import SFTTrainer

        found: type[Any] = SFTTrainer
        return found

    def arguments_class(self) -> type[Any]:
        from trl import SFTConfig

        found: type[Any] = SFTConfig
        return found

    def training_arguments(self) -> dict[str, Any]:
        """Return the arguments; TRL would turn on bf16, and recompute activations."""
        return {**super().training_arguments(), "bf16": False, "gradient_checkpointing": False}

    def what_is_trained(self, model: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the model, rows of token ids, and a tokenizer, of which nothing but its padding is used."""
        from datasets import IterableDataset
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        super().what_is_trained(model)
        words = Tokenizer(WordLevel({"<eos>": 0}, unk_token="<eos>"))
        return {
            "model": model.model,
            "train_dataset": IterableDataset.from_generator(examples, gen_kwargs={"case": self.case}),
            "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>"),
        }


def examples(case: Case) -> Iterator[dict[str, list[int]]]:
    """Yield every row of a case as a tokenized example: its tokens and the last target, with the first label ignored.

    The labels of rows are shifted already, and those of examples are not.
    """
    rows = GlobalRows(case, Dealing.MICRO_BATCHES)
    for index in range(len(rows)):
        row: dict[str, Any] = rows[index].inputs
        tokens, targets = row["input_ids"][0].tolist(), row["labels"][0].tolist()
        yield {"input_ids": [*tokens, max(targets[-1], 0)], "labels": [IGNORED, *targets]}


class TRLSFT(HFTrainer):
    """TRL's `SFTTrainer`, on causal models of Transformers alone (`--workload hf:FILE.json`)."""

    requires: ClassVar[tuple[Requirement, ...]] = (
        *REQUIRES,
        Requirement(module="trl", distribution="trl", command=_COMMAND),
    )
    preload: ClassVar[tuple[str, ...]] = (*HFTrainer.preload, "datasets", "trl.trainer.sft_trainer")
    loop: ClassVar = SFTLoop

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        model = case.workload.model
        if (
            not isinstance(model, OwnModelConfig)
            or not model.target.startswith(HUGGING_FACE)
            or parts_of(model.target)[1] != DEFAULT_HEAD
        ):
            return f"{case.adapter} trains models of Transformers alone, causal ones: --workload hf:FILE.json"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return DDP's; the head and the loss are TRL's own, which keeps no logits."""
        return replace(super().recipe(case), activations_known=False)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return (*super().traffic_exceptions(case, rank), metrics(case))


def metrics(case: Case) -> TrafficException:
    """Return what TRL gathers in every micro-batch for its log."""
    ranks, micros = tuple(range(case.layout.dp)), case.layout.num_micro_batches
    calls = micros * len(_METRIC_BYTES)
    gathered = Flow(
        kind="all_gather",
        axes="dp",
        ranks=ranks,
        purpose=Purpose.LOSS,
        num_bytes=micros * sum(_METRIC_BYTES) * len(ranks),
        fewest=calls,
        most=calls,
    )
    return TrafficException(sends=(gathered,), reason="entropy and accuracy are gathered in every micro-batch")
