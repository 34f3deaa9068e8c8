"""DeepSpeed's own optimizer and scheduler, from the `optimizer` and `scheduler` sections of its configuration."""

from __future__ import annotations

from typing import Any, ClassVar

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.errors import AdapterError
from meshmark.reference.objective import parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec

_SECTIONS = {OptimizerKind.ADAMW: "AdamW", OptimizerKind.SGD: "SGD"}
"""Names of DeepSpeed's `optimizer` section."""


class DeepSpeedConfigured(DeepSpeed):
    """DeepSpeed makes the optimizer and the scheduler: `WarmupLR`, linear.

    DeepSpeed's schedulers set the rate after a step, to that of the step before: `WarmupLR` gives its first rate twice.
    `last_batch_iteration: 0` has it count the first step, which takes the rate of the `optimizer` section.
    """

    scheduler: ClassVar[str] = "WarmupLR"

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        spec = case.workload.optimizer
        if spec.kind not in _SECTIONS:
            kinds = " and ".join(_SECTIONS)
            return f"{case.adapter} does not support {spec.kind} (its `optimizer` section is written for {kinds})"
        return super().supports(case, device, backend) or cls.unsupported_reason(spec)

    @classmethod
    def unsupported_reason(cls, spec: OptimizerSpec) -> str | None:
        """Return why the scheduler cannot follow the schedule of `spec`, or None."""
        if spec.warmup_steps == 1:
            return "no warm-up of a single step can be configured: WarmupLR takes two at least"
        return None

    @classmethod
    def section(cls, spec: OptimizerSpec) -> dict[str, Any]:
        """Return the `params` of the `scheduler` section, for a warm-up of at least two steps."""
        return {
            "warmup_min_lr": spec.learning_rate / spec.warmup_steps,
            "warmup_max_lr": spec.learning_rate,
            "warmup_num_steps": spec.warmup_steps - 1,
            "warmup_type": "linear",
            "last_batch_iteration": 0,
        }

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        spec = case.workload.optimizer
        arguments = {**reference_optimizer(spec).arguments()[1], "lr": spec.learning_rate * spec.rate_factor(0)}
        if spec.kind is OptimizerKind.ADAMW:
            arguments["torch_adam"] = True  # its own is compiled for a GPU
        config = {
            **super().config(case, context),
            "optimizer": {"type": _SECTIONS[spec.kind], "params": arguments},
        }
        if spec.warmup_steps:
            config["scheduler"] = {"type": self.scheduler, "params": self.section(spec)}
        return config

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where DeepSpeed made another optimizer or scheduler than it was asked for."""
        prepare(context)
        import deepspeed

        model, spec = self.model(case, context), case.workload.optimizer
        module, _, _, schedule = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(spec, model.named_parameters()),
            config=self.config(case, context),
        )
        optimizer, kind = module.basic_optimizer, reference_optimizer(spec).arguments()[0]
        expected = self.scheduler if spec.warmup_steps else "NoneType"
        if type(optimizer) is not kind or type(schedule).__name__ != expected:
            raise AdapterError(
                f"rank {context.rank}: DeepSpeed made {type(optimizer).__name__} and {type(schedule).__name__}, asked "
                f"for {kind.__name__} and {expected}"
            )
        engine = DeepSpeedEngine(case, context, module, optimizer)
        engine.restore_masters()
        return engine


class DeepSpeedRangeTest(DeepSpeedConfigured):
    """`LRRangeTest`, whose rate grows by the same amount a step. It does not stop growing where the warm-up ends."""

    scheduler: ClassVar[str] = "LRRangeTest"

    @classmethod
    def unsupported_reason(cls, spec: OptimizerSpec) -> str | None:
        return None

    @classmethod
    def section(cls, spec: OptimizerSpec) -> dict[str, Any]:
        return {
            "lr_range_test_min_lr": spec.learning_rate / spec.warmup_steps,
            "lr_range_test_step_size": 1,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        }


class DeepSpeedOneCycle(DeepSpeedConfigured):
    """`OneCycle`, whose rate falls again after the warm-up. Its cycle of momentum is off: it would replace the second
    beta (adapters/gaps/deepspeed_one_cycle_betas.py)."""

    scheduler: ClassVar[str] = "OneCycle"

    @classmethod
    def section(cls, spec: OptimizerSpec) -> dict[str, Any]:
        return {
            "cycle_min_lr": spec.learning_rate / spec.warmup_steps,
            "cycle_max_lr": spec.learning_rate,
            "cycle_first_step_size": spec.warmup_steps - 1,
            "cycle_momentum": False,
        }
