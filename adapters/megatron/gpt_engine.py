"""Trains megatron-core's own GPTModel by its schedules, its DistributedDataParallel and its optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.engine import Engine, Gathered, Holdings, RankContext, optimizer_state_tensors
from meshmark.adapters.megatron.gpt_weights import Fused, dense, fused_of, split
from meshmark.adapters.megatron.on_cpu import cuda_is
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_schedule
from meshmark.spec.case import Case


class GPTModelEngine(Engine):
    """`chunks` are the rank's virtual stages, each a GPTModel inside Megatron's DistributedDataParallel. Every
    tensor-parallel rank computes the same loss; the last stage's first one returns it."""

    checkpoint_metadata: ClassVar[dict[str, Any]] = {"distrib_optim_sharding_type": "fully_reshardable"}
    """How a distributed optimizer's states are saved, here for all other layouts to read them."""

    def __init__(self, case: Case, context: RankContext, chunks: Sequence[Any], optimizer: Any) -> None:  # noqa: ANN401
        """`optimizer`: Megatron's."""
        self.case, self.context, self.chunks, self.optimizer = case, context, chunks, optimizer
        self.stands = case.layout.coordinates(context.rank)
        self.positions = torch.arange(case.workload.model.seq_len, device=context.device)
        schedules = [build_schedule(case.workload.optimizer, each) for each in self.pytorchs_optimizers()]
        self.learning_rates = [schedule for schedule in schedules if schedule]

    def pytorchs_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return PyTorch's, inside Megatron's: one, or one each for experts and for all else."""
        return [each.optimizer for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def backward(self, batch: Batch) -> Tensor:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        return self._run(batch, forward_only=False)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """As in Megatron-LM's own training, weights that the next forward pass would gather are gathered at once."""
        hooked = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        with cuda_is(self.context.device):
            for chunk in hooked:
                chunk.disable_forward_pre_hook()
        for chunk in self.chunks:
            chunk.eval()
        total = self._run(batch, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        return total

    def _run(self, batch: Batch, *, forward_only: bool) -> Tensor:
        """Run this replica's rows through Megatron's schedule, and return this rank's share of the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        layout, workload = self.case.layout, self.case.workload
        rows = batch.shard(self.stands.dp, layout.dp).to(self.context.device)
        feeds = [rows.micro_batches(layout.num_micro_batches) for _ in self.chunks]
        with cuda_is(self.context.device):
            told: list[dict[str, Tensor]] = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=feeds if len(feeds) > 1 else feeds[0],
                model=[*self.chunks],
                num_microbatches=layout.num_micro_batches,
                seq_length=workload.model.seq_len,
                micro_batch_size=len(rows) // layout.num_micro_batches,
                forward_only=forward_only,
            )
        shares = [each["share"] for each in told]
        return torch.stack(shares).sum() if shares and self.stands.tp == 0 else torch.zeros(())

    def _forward(self, feed: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:  # noqa: ANN401
        """Megatron's forward step: what a stage makes of one micro-batch, and the loss of what the last one makes."""
        micro = next(feed)
        positions = self.positions.expand(len(micro), -1)
        output: Tensor = model(micro.inputs, positions, None, labels=micro.targets)
        return output, functools.partial(self._loss, micro)

    def _loss(self, micro: Batch, loss_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss share times the micro-batches and replicas, by which Megatron divides.

        Shares add up to the global mean.
        """
        share = (loss_BT * micro.weights).sum() / micro.total_weight
        layout = self.case.layout
        return share * (layout.num_micro_batches * layout.dp), {"share": share.detach()}

    def update(self) -> Tensor | None:
        with cuda_is(self.context.device):
            _, norm, _ = self.optimizer.step()
            self.optimizer.zero_grad()
        for schedule in self.learning_rates:
            schedule.step()
        return None if self.case.workload.optimizer.clip_norm is None else torch.as_tensor(norm)

    def save(self, folder: Path) -> None:
        """Save by megatron-core's distributed checkpoint, which every layout can read."""
        from megatron.core import dist_checkpointing

        with cuda_is(self.context.device):
            dist_checkpointing.save(self._sharded_state(is_loading=False), str(folder), self.save_strategy())

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        with cuda_is(self.context.device):
            state = self._sharded_state(is_loading=True)
            loaded = dist_checkpointing.load(state, str(folder), self.load_strategy(folder))
            for name, chunk in self._chunks_by_name():
                chunk.module.load_state_dict(loaded[name])
            self.optimizer.load_state_dict(loaded["optimizer"])
        for schedule, state in zip(self.learning_rates, loaded["schedule"], strict=True):
            schedule.load_state_dict(state)

    def save_strategy(self) -> Any:  # noqa: ANN401
        """Return Megatron's object that writes shards; None for its default."""
        return None

    def load_strategy(self, folder: Path) -> Any:  # noqa: ANN401
        """Return Megatron's object that reads shards; None for its default."""
        return None

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return megatron-core's description of everything on this rank, assembled as in Megatron-LM's own
        training.
        """
        state = {name: chunk.module.sharded_state_dict() for name, chunk in self._chunks_by_name()}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=self.checkpoint_metadata
        )
        return state | {"schedule": [schedule.state_dict() for schedule in self.learning_rates]}

    def _chunks_by_name(self) -> Iterator[tuple[str, Any]]:
        for index, chunk in enumerate(self.chunks):
            yield f"model{index}", chunk

    def parameters(self) -> Mapping[str, Tensor]:
        """Weights that are gathered while the next forward pass goes on are each rank's own part until then."""
        held = {parameter: _master(parameter).detach for _, parameter in self.fused_parameters()}
        if any(chunk.ddp_config.overlap_param_gather for chunk in self.chunks):
            return self._canonical({**held, **self._buffered("param_data")})
        return self._canonical(held)

    def gradients(self) -> Mapping[str, Tensor]:
        return self._canonical(self._buffered("grad_data"))

    def _buffered(self, which: str) -> Mapping[Tensor, Callable[[], Tensor]]:
        """Return, by parameter, the content of `which` data of its bucket."""
        found: dict[Tensor, Callable[[], Tensor]] = {}
        for buffer in self.buffers_of_gradients():
            for bucket in buffer.buckets:
                for parameter in bucket.params_list:
                    start, end, _ = buffer.param_index_map[parameter]
                    place, data = range(start - bucket.offset, end - bucket.offset), getattr(bucket, which)
                    found[parameter] = functools.partial(self._whole, buffer, data, place, parameter.shape)
        return found

    def buffers_of_gradients(self) -> list[Any]:
        """Return Megatron's buffers; those of experts are apart."""
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _whole(self, buffer: Any, data: Tensor, place: range, shape: torch.Size) -> Tensor:  # noqa: ANN401
        """Return the whole tensor at `place` of a bucket's data.

        With the distributed optimizer only each rank's own part is right. The parts are added to zeros, which changes
        no value.
        """
        here = data[place.start : place.stop]
        if self.case.layout.zero_stage:
            group, share = buffer.data_parallel_group, data.numel() // buffer.data_parallel_group.size()
            own = range(max(place.start, group.rank() * share), min(place.stop, (group.rank() + 1) * share))
            here = torch.zeros_like(here)
            if own:
                here[own.start - place.start : own.stop - place.start] = data[own.start : own.stop]
            torch.distributed.all_reduce(here, group=group)
        return here.view(shape)

    def fused_parameters(self) -> Iterator[tuple[Fused, Tensor]]:
        for chunk in self.chunks:
            model = getattr(chunk.module, "module", chunk.module)  # within Float16Module
            layers = model.decoder.layers
            first = layers[0].layer_number - 1 if len(layers) else 0
            for name, parameter in model.named_parameters():
                yield fused_of(self.case.workload, name, first, parameter), parameter

    def _canonical(self, values: Mapping[Tensor, Callable[[], Tensor]]) -> Gathered:
        """Return values by the model's names, joined with the parts of other tensor-parallel ranks. Frozen parameters
        have no gradients."""
        fused = [(each, parameter) for each, parameter in self.fused_parameters() if parameter in values]
        return Gathered((each.names, functools.partial(self._joined, each, values[p])) for each, p in fused)

    def _joined(self, fused: Fused, value: Callable[[], Tensor]) -> list[Tensor]:
        """Return the model's tensors that one of megatron-core's contains, gathered over its ranks."""
        from megatron.core import parallel_state

        own = value().contiguous()
        if fused.of_experts:
            return _all_gathered(own, parallel_state.get_expert_model_parallel_group())
        shards = [own]
        if fused.dim is not None:
            shards = _all_gathered(own, parallel_state.get_tensor_model_parallel_group())
        return list(split(dense(self.case.workload), fused, shards).values())

    def holdings(self) -> Holdings:
        return Holdings(
            parameters=[
                tensor.detach() for _, p in self.fused_parameters() for tensor in dict.fromkeys((p, _master(p)))
            ],
            gradients=[buffer.grad_data for buffer in self.buffers_of_gradients()],
            optimizer_states=[state for each in self.pytorchs_optimizers() for state in optimizer_state_tensors(each)],
        )


def _all_gathered(own: Tensor, group: Any) -> list[Tensor]:  # noqa: ANN401
    if group.size() == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own, group=group)
    return parts


def _master(parameter: Tensor) -> Tensor:
    """Return the tensor that Megatron's optimizer updates in place of a bf16 weight."""
    master: Tensor = getattr(parameter, "main_param", parameter)
    return master
