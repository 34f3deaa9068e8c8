"""Accelerate's DeepSpeed plugin as its users have it: by a JSON file that leaves to Accelerate what it can work out
("auto"), with optimizer states offloaded to the host, for which Accelerate puts DeepSpeed's CPU Adam in the place of
PyTorch's."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.accelerate import AccelerateDeepSpeed
from meshmark.adapters.accelerate.prepare import deepspeed_plugin
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.operators import load
from meshmark.adapters.deepspeed.variants import DeepSpeedOffload
from meshmark.errors import AdapterError
from meshmark.models.mixture.module import Mixture
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.optimizer import OptimizerKind

_AUTO = ("train_batch_size", "gradient_accumulation_steps")
"""Settings that Accelerate derives from the micro-batch and its own settings."""
_STRAY = (
    "the optimizer that Accelerate puts in the place of PyTorch's shares its groups until a checkpoint is loaded; then "
    "the schedule changes the rates of one that does not train"
)


class AccelerateDeepSpeedFile(AccelerateDeepSpeed, DeepSpeedOffload):
    capabilities: ClassVar = dataclasses.replace(
        AccelerateDeepSpeed.capabilities, offloads=DeepSpeedOffload.capabilities.offloads
    )
    known_gaps: ClassVar = (
        *DeepSpeedOffload.known_gaps,
        *(
            KnownGap(
                clause=clause,
                symptom="with the learning rate of the step before",
                reason=_STRAY,
                reproducer="accelerate_deepspeed_scheduler_after_load",
            )
            for clause in ("resume", "recovery")
        ),
    )

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        """The default, by which DeepSpeed refuses other optimizers than its own on the host, is left in place where
        there is such."""
        config = {**super().config(case, context), **dict.fromkeys(_AUTO, "auto")}
        if case.workload.optimizer.kind is OptimizerKind.ADAMW:
            del config["zero_force_ds_cpu_optimizer"]
        return config

    def plugin(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "ds_config.json"
            file.write_text(json.dumps(self.config(case, context)))
            return deepspeed_plugin(str(file))

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raises `AdapterError` where Accelerate has left PyTorch's AdamW in place, which no number would tell."""
        load("cpu_adam")
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        kind = type(engine.zero.optimizer).__name__
        if case.workload.optimizer.kind is OptimizerKind.ADAMW and kind != "DeepSpeedCPUAdam":
            raise AdapterError(f"rank {context.rank}: the host updates by {kind}, expected DeepSpeedCPUAdam")
        return engine


class AccelerateDeepSpeedAuto(AccelerateDeepSpeed):
    """Sizes of batches are `auto`, which Accelerate fills in from the largest batch of the prepared loaders
    (`is_train_batch_min=False`). It is given the plugin by a name (`deepspeed_plugins`). Of a mixture, the class of its
    layers of experts is gathered as a whole (`transformer_moe_cls_names`)."""

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().config(case, context), **dict.fromkeys((*_AUTO, "train_micro_batch_size_per_gpu"), "auto")}

    def plugins(self, case: Case, context: RankContext) -> dict[str, Any]:
        experts = Mixture.__name__ if case.workload.model.family is Family.MIXTURE else None
        plugin = deepspeed_plugin(
            self.config(case, context), is_train_batch_min=False, transformer_moe_cls_names=experts
        )
        return {"deepspeed_plugins": {"training": plugin}}

    def loaders(self, case: Case) -> tuple[DataLoader[Any], ...]:
        """One of micro-batches of all processes, and a smaller one, as of an evaluation."""
        rows: Any = range(case.workload.global_batch)
        largest = case.workload.global_batch // case.layout.num_micro_batches
        return DataLoader(rows, batch_size=largest), DataLoader(rows, batch_size=case.layout.dp)

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where Accelerate has filled in another size, which no number would tell."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        rows = case.workload.global_batch // (case.layout.dp * case.layout.num_micro_batches)
        if (found := engine.module.train_micro_batch_size_per_gpu()) != rows:
            raise AdapterError(f"rank {context.rank}: Accelerate took {found} rows for a micro-batch, expected {rows}")
        return engine
