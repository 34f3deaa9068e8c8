"""Run FSDP2, alone or with tensor parallelism, as one rank of a thousand on this machine, and read off what it holds.

torch's fake process group answers every collective without a peer, so one real rank runs the framework's real code on
real tensors of its own shards. What it holds and asks for is compared with the plan:
`python -m studies.dry_run`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshmark.spec.layout import Layout
from meshmark.spec.model_spec import Family, ModelSpec, llama
from meshmark.theory.grid import make_grid
from meshmark.theory.memory import state_bytes
from meshmark.theory.recipe import recipe
from meshmark.theory.states import local_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

DRY_MODEL = llama("dry", 2, 1024, 8, 4096, vocab_size=2048, seq_len=32)
"""Small, with every first dimension a multiple of 1,024, so that shards are equal."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one rank: states after a step, and collectives asked for in one, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float


def planned(model: ModelSpec, layout: Layout, *, batch: int = 1) -> Held:
    """What the plan says: fp32, ZeRO-3 over dp, Megatron's tensor parallelism (arXiv:1909.08053 sec. 3) over tp.

    A step of one micro-batch gathers the rank's weights twice and reduce-scatters their gradients once
    (arXiv:1910.02054 sec. 7.2.2). Tensor parallelism all-reduces the residual stream twice a block forward. Backward
    Megatron needs two more; torch's ColwiseParallel, applied to each projection, one for each of their inputs.
    """
    count = float(local_parameters(model, Layout(tp=layout.tp), 0))
    if layout.tp > 1:
        # Here embedding and head are left whole on every tensor-parallel rank.
        count += (2 - model.tied_embeddings) * model.vocab_size * model.hidden * (1.0 - 1.0 / layout.tp)
    grid = make_grid(dp=[layout.dp], tp=[layout.tp], zero_stage=[3])
    states = state_bytes(np.array([count]), grid, recipe("fp32"))
    num_inputs = 4 if model.family is Family.GPT else 5
    stream = batch * model.seq_len * model.hidden * 4.0
    return Held(
        parameters=float(states["parameters"][0]),
        gradients=float(states["gradients"][0]),
        optimizer=float(states["optimizer"][0]),
        all_gather=2.0 * count * 4.0,
        reduce_scatter=count * 4.0,
        all_reduce=(2.0 + num_inputs) * model.num_layers * stream if layout.tp > 1 else 0.0,
    )


def dry_run(model: ModelSpec, layout: Layout, *, batch: int = 1) -> Held:
    """One real step of rank 0 of `layout`, everything else faked. Must run in a process without a process group."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from meshmark.reference.transformer import Transformer

    with _fake_group(layout.world_size):
        mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        network = Transformer(model)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        if layout.tp > 1:
            _tensor_parallel(network, mesh["tp"])
        for block in network.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(network, mesh=mesh["dp"], reshard_after_forward=True)
        optimizer = torch.optim.AdamW(network.parameters(), foreach=False)
        tokens = torch.randint(0, model.vocab_size, (batch, model.seq_len))
        with _asked() as asked:
            logits = network(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        return Held(
            parameters=_local_bytes(network.parameters()),
            gradients=_local_bytes(p.grad for p in network.parameters() if p.grad is not None),
            optimizer=_local_bytes(states),
            **asked,
        )


def _tensor_parallel(network: nn.Module, mesh: DeviceMesh) -> None:
    """Column-parallel into heads and the feed-forward network, row-parallel out of them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for name, module in list(network.named_modules()):
        leaf = name.rpartition(".")[2]
        if type(module).__name__ == "Linear" and leaf in ("q", "k", "v", "up", "gate"):
            parallelize_module(module, mesh, ColwiseParallel())
        elif type(module).__name__ == "Linear" and leaf in ("out", "down") and ".blocks." in f".{name}":
            parallelize_module(module, mesh, RowwiseParallel())


def _local_bytes(tensors: Iterable[Tensor]) -> float:
    from torch.distributed.tensor import DTensor

    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return float(sum(t.numel() * t.element_size() for t in local))


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """A process group in which this process is rank 0 and nobody else exists."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _asked() -> Iterator[dict[str, float]]:
    """Bytes of the full tensors of every collective asked for inside, by kind."""
    from torch.utils._python_dispatch import TorchDispatchMode

    asked = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            name = str(func)
            result = func(*args, **(kwargs or {}))
            if "_allgather_base_" in name or "all_gather_into_tensor" in name:
                whole = args[0] if "_allgather_base_" in name else result
                asked["all_gather"] += whole.numel() * whole.element_size()
            elif "_reduce_scatter_base_" in name or "reduce_scatter_tensor" in name:
                whole = args[1] if "_reduce_scatter_base_" in name else args[0]
                asked["reduce_scatter"] += whole.numel() * whole.element_size()
            elif "c10d" in name and ("allreduce" in name or "all_reduce" in name):
                tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
                asked["all_reduce"] += sum(t.numel() * t.element_size() for t in tensors)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield asked


def main() -> int:
    """Dry runs of FSDP2 on 1,024 ranks and FSDP2 x TP 4 on 256 x 4, each beside the plan; 1 when one differs by 2 %."""
    worst = 0.0
    for layout in (Layout(dp=1024, zero_stage=3), Layout(dp=256, tp=4, zero_stage=3)):
        seen, plan = dry_run(DRY_MODEL, layout), planned(DRY_MODEL, layout)
        print(f"{layout.id}: {'':12} {'held':>14} {'planned':>14} {'error %':>8}")
        for name in Held.__dataclass_fields__:
            a, b = getattr(seen, name), getattr(plan, name)
            error = abs(a / b - 1.0) if b else float(a != 0)
            worst = max(worst, error)
            print(f"  {name:32} {a:14.0f} {b:14.0f} {100 * error:8.3f}")
    return int(worst > 0.02)


if __name__ == "__main__":
    sys.exit(main())
