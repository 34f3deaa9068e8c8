"""PyTorch's communication hooks of DistributedDataParallel that make gradients smaller: `fp16_compress_hook`,
`bf16_compress_hook` and `powerSGD_hook` (arXiv:1905.13727)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.engine import RankContext
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.algorithms.compressed import Compressed, Compressing, ErrorFeedback
from meshmark.algorithms.compressed.compressor import CompressorKind
from meshmark.algorithms.compressed.compressors import Draw
from meshmark.algorithms.compressed.traffic import summed_bytes, trained_shapes
from meshmark.errors import AdapterError
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

Hook = Callable[["GradBucket"], Future[Tensor]]


class CompressedDDPEngine(DDPEngine):
    """Reports each replica's gradients as they were before the hook compressed them."""

    def __init__(
        self, case: Case, context: RankContext, module: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(case, context, module, optimizer)
        self.own: dict[str, Tensor] = {}
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.named_parameters()}
        self.factors: PowerSGDState | None = None
        # Not `self.noting` itself: DDP compares annotations, which here are text.
        module.register_comm_hook(self.make_hook(), lambda hook, bucket: self.noting(hook, bucket))

    def noting(self, hook: Hook, bucket: GradBucket) -> Future[Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.own[self.names[parameter]] = gradient.clone()
        return hook(bucket)

    def make_hook(self) -> Hook:
        compressor = self.case.workload.algorithm_as(Compressing).compressor
        assert compressor is not None
        if compressor.kind is CompressorKind.POWER_SGD:
            return self.power_sgd()
        hook = fp16_compress_hook if compressor.kind is CompressorKind.FP16 else bf16_compress_hook
        assert (group := dist.group.WORLD) is not None
        return lambda bucket: hook(group, bucket)

    def power_sgd(self) -> Hook:
        # Here, for importing it takes time.
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        algorithm = self.case.workload.algorithm_as(ErrorFeedback)
        assert algorithm.compressor is not None
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=algorithm.compressor.rank,
            start_powerSGD_iter=algorithm.warmup_steps,
            min_compression_rate=2,
        )
        self.factors = state

        def hook(bucket: GradBucket) -> Future[Tensor]:
            # A step early, when buckets are those of the rest of the run: the first step that compresses holds no more
            # than the next.
            if state.iter >= state.start_powerSGD_iter - 1 and bucket.index() not in state.p_memory_dict:
                self.start_factors(state, bucket)
            found: Future[Tensor] = powerSGD_hook(state, bucket)
            return found

        return hook

    def start_factors(self, state: PowerSGDState, bucket: GradBucket) -> None:
        """Set the initial factor Q of every matrix, as a warm start would.

        It is drawn by the matrix's name. The hook's own draws cannot be reproduced, because it does not expose them.
        """
        compressor = self.case.workload.algorithm_as(Compressing).compressor
        assert compressor is not None
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        outer = 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if factored := compressor.factors(gradient.shape):
                rows, columns, rank = factored
                draw = Draw(seed=self.case.workload.seed, step=0, replica=0, name=self.names[parameter])
                first = torch.from_numpy(draw.uniform(columns * rank)).to(gradient) - 0.5
                by_shape.setdefault((rows, columns), []).append(first)
                outer += rows * rank
        drawn = [first for alike in by_shape.values() for first in alike]
        buffer = bucket.buffer()
        state.q_memory_dict[bucket.index()] = torch.cat([buffer.new_empty(0), *drawn])
        state.p_memory_dict[bucket.index()] = buffer.new_empty(outer)
        state.error_dict.setdefault(bucket.index(), torch.zeros_like(buffer))

    def gradients(self) -> Mapping[str, Tensor]:
        return self.own

    def update(self) -> Tensor | None:
        self.own = {}
        return super().update()

    def save(self, folder: Path) -> None:
        if self.factors is not None:
            raise AdapterError(
                "PyTorch's PowerSGD remembers by bucket, and buckets are built anew in the second step after a resume: "
                "what is left would be added to other parameters; train through, or take another compressor"
            )
        super().save(folder)


class DDPCompressed(DDP):
    engine: ClassVar = CompressedDDPEngine
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        algorithms=frozenset({Compressed.kind, ErrorFeedback.kind}),
        compressors=frozenset({CompressorKind.FP16, CompressorKind.BF16, CompressorKind.POWER_SGD}),
        lacks={
            Precision.BF16_REDUCE_BF16: "what is sent has a format of its own",
            Precision.FP16: "a replica that skips an overflowing step would send what others do not",
            Feature.UNUSED: "PowerSGD makes no number of a gradient that is all zero",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "what each replica has yet to send is its own",
        },
    )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return the extra memory of PowerSGD: what it has yet to send, and the factors of the step before."""
        algorithm = case.workload.algorithm_as(Compressing)
        compressor = algorithm.compressor
        if compressor is None or compressor.kind is not CompressorKind.POWER_SGD:
            return ()
        itemsize = case.precision.accumulation.itemsize
        _, *factors = summed_bytes(compressor, trained_shapes(case, rank), itemsize)
        left = itemsize * sum(map(math.prod, trained_shapes(case, rank)))
        return (ExtraMemory(category="steady", num_bytes=left + sum(factors), reason="what is left, and two factors"),)
