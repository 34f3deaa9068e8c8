"""Accelerate's FSDP2 as `accelerate launch` has it: by what its launcher puts in the environment, not by a plugin."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import RankContext
from meshmark.adapters.accelerate import AccelerateFSDP2
from meshmark.adapters.accelerate.prepare import sharding_accelerator
from meshmark.models.module import block_classes
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision

_OURS = ("ACCELERATE_", "FSDP_")
"""Variables that the launcher makes of its options; others are its ranks', threads' and ports'."""


class AccelerateFSDP2Launched(AccelerateFSDP2):
    capabilities: ClassVar = dataclasses.replace(
        AccelerateFSDP2.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **AccelerateFSDP2.capabilities.lacks,
            Feature.TIED_EMBEDDINGS: "its launcher loads weights by one rank (cpu_ram_efficient_loading), and "
            "ties again only models with Transformers' `tie_weights`",
            Precision.FP64: "its launcher knows no float64",
            Precision.BF16: "its launcher's bf16 reduces gradients in bf16",
            Precision.BF16_REDUCE_BF16: "not tried",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.model.saves_buffers:
            return (
                "loading weights by one rank, as its launcher does, fails for models with persistent buffers "
                "(huggingface/accelerate#3898; adapters/gaps/accelerate_fsdp2_ram_efficient_buffers.py)"
            )
        return super().supports(case, device, backend)

    def accelerator(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        os.environ.update(launched(case))
        return sharding_accelerator(case, context, None)


def launched(case: Case) -> dict[str, str]:
    """Return the variables that `accelerate launch` gives a script for its options, from its own function."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    options = {
        "fsdp_version": "2",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(
            sorted(kind.__name__ for kind in block_classes(case.workload.model))
        ),
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "num_machines": "1",
        "num_processes": str(case.world_size),
    }
    asked = ["--use_fsdp", *(word for name, value in options.items() for word in (f"--{name}", value))]
    told = prepare_multi_gpu_env(launch_command_parser().parse_args([*asked, "train.py"]))
    return {name: value for name, value in told.items() if name.startswith(_OURS)}
