"""Megatron-LM tensor parallelism (arXiv:1909.08053): megatron-core's own layers and vocabulary-parallel loss in the
place of the model's linear layers, embedding and cross-entropy; replicas by PyTorch's DistributedDataParallel."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Requirement
from meshmark.adapter.engine import Engine, RankContext, configure
from meshmark.adapters.megatron.connections import one_connection
from meshmark.adapters.megatron.engine import MegatronEngine
from meshmark.adapters.megatron.layers import initialize, parallelize, recompute
from meshmark.adapters.megatron.on_cpu import seed
from meshmark.adapters.megatron.random_states import random_states
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.models.transformer.module import Transformer
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Precision
from meshmark.theory.backward_pass import RNG_STATE_BYTES, cast_weight_bytes
from meshmark.theory.memory import ExtraMemory, micro_batch_tokens
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Purpose, TrafficException, exceptions_for, step_traffic


class Megatron(Adapter):
    """Megatron-core's tensor-parallel layers and vocabulary-parallel loss in Meshmark's model (arXiv:1909.08053).

    Every replica seeds its own random states: by Megatron's default (`data_parallel_random_init` off), all would drop
    the same.
    """

    requires: ClassVar = (Requirement(module="megatron.core", distribution="megatron-core"),)
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST, splits_products=True)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"tp", "dp"}),
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            Family.OWN: "its layers are megatron-core's, in a transformer over tokens",
            Family.IMAGES: "embedding and loss are parallel in a vocabulary; convolutions are not split",
            Family.MIXTURE: "megatron-core's experts are layers of its own",
            Precision.FP64: "the vocabulary-parallel loss and the gradient norm are float32 whatever they are given",
            Precision.FP16: "PyTorch's GradScaler does not tell other tensor-parallel ranks of an overflow",
            Feature.MATRIX_WISE: "its optimizer is given tensor-parallel parts of the parameters",
            Precision.BF16_REDUCE_BF16: "replicas' gradients are reduced as they are, in float32",
        },
    )

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        return one_connection(device)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Under autocast half of the residual streams travel in bf16, half in fp32: the embedding, and gradients of the
        blocks' inputs."""
        if not case.precision.is_mixed:
            return ()
        reason = "row-parallel layers' outputs and the gradient of the head's input are summed in bf16"
        return exceptions_for(
            step_traffic(case, rank),
            Purpose.ACTIVATIONS,
            reason,
            lambda flow: dataclasses.replace(flow, num_bytes=flow.num_bytes // 4 * 3),
        )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """The vocabulary-parallel loss works in place, in a wide copy of logits that are low, as their gradient is."""
        using = eager_recipe(case, "eager-ddp" if case.layout.dp > 1 else "eager")
        low = case.precision.compute.itemsize / case.precision.wide.itemsize if case.precision.is_mixed else 0.0
        return dataclasses.replace(using, backward=dataclasses.replace(using.backward, loss_tensors=low))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return what megatron-core's layers save differently from PyTorch's layers, for which memory is planned."""
        model, tp, tokens = case.workload.transformer, case.layout.tp, micro_batch_tokens(case)
        indices = "masks and shifted indices of the vocabulary-parallel embedding and loss"
        found: list[tuple[float, str]] = [(tokens * (10 if tp == 1 else 19), indices)]
        if tp > 1 and model.family is Family.LLAMA:
            found.append((-4 * tokens * model.hidden, "the embedding's output is all-reduced: communication"))
        if case.precision.is_mixed:
            # Before the head and two norms a block: one wide input in place of a low copy for every product.
            products = 4 if model.family is Family.GPT else 5
            inputs = (2 + model.num_layers * (8 - 2 * products)) * model.hidden
            found.append((tokens * inputs, "linear layers save the input that they find, wide"))
            if model.family is Family.GPT:
                wide = 4 * model.num_layers * model.ffn_hidden // tp
                found.append((tokens * wide, "wide biases make outputs wide, and so what GELU saves"))
            copies = cast_weight_bytes(model, model.num_layers, True) / tp
            found.append((-copies, "linear layers save their wide weights, not autocast's copies"))
        if case.layout.recompute is Recompute.FULL:
            states = "its checkpoint keeps a second random state of every block"
            found.append((model.num_layers * RNG_STATE_BYTES, states))
        declared = [ExtraMemory(category="activations", num_bytes=n, reason=reason) for n, reason in found]
        if tp > 1 and model.family is Family.LLAMA:
            there = "the embedding's output is there all the same"
            declared.append(ExtraMemory(category="peak", num_bytes=4 * tokens * model.hidden, reason=there))
        return (*declared, random_states())

    def build(self, case: Case, context: RankContext) -> Engine:
        from megatron.core import ModelParallelConfig, parallel_state

        layout, workload = case.layout, case.workload
        parallel_state.initialize_model_parallel(layout.tp, create_gloo_process_groups=False)
        config = ModelParallelConfig(
            tensor_model_parallel_size=layout.tp,
            perform_initialization=False,
            use_cpu_initialization=context.device.type == "cpu",  # elsewhere, shards are made on the current GPU
        )
        with torch.device("meta"):
            model = Transformer(workload.transformer)
        parallelize(model, config, parallel_state.get_tensor_model_parallel_group())
        stands = layout.coordinates(context.rank)
        initialize(model, workload.seed, layout.tp, stands.tp, context.device)
        configure(model, case, recompute)
        seed(context.device, workload.seed + 10 * stands.dp)
        module: nn.Module = model
        if layout.dp > 1:
            module = DistributedDataParallel(
                model,
                process_group=parallel_state.get_data_parallel_group(),
                gradient_as_bucket_view=True,
                find_unused_parameters=workload.skipped_block is not None,
                device_ids=[context.device] if context.device.type == "cuda" else None,
            )
        return MegatronEngine(
            case, context, model, module, build_optimizer(workload.optimizer, model.named_parameters())
        )
