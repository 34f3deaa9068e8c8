"""Frameworks that own their training loop, presented to the suites as engines.

A trainer has no `backward` and `update` to call from outside: it is built, and then it runs to its end. A `Loop` is one
rank of such a trainer. Its `run` calls the framework's own method, such as `train()` or `fit()`. Hooks in the framework
call the loop back at four moments. At each of them Meshmark observes the state, and then resumes the loop.

The loop runs in a greenlet in Meshmark's own thread. In a separate thread, PyTorch's profiler and dispatch modes would
not see it, because they belong to one thread. Both sides therefore share grad mode and autocast. Each switch restores
the modes of the side that it switches to.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from meshmark.adapter.contract import Feature, Requirement
from meshmark.adapter.engine import DataParallelEngine, Holdings, RankContext, skip_block
from meshmark.errors import AdapterError
from meshmark.models.transformer import Family
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case, Knob
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision

GREENLET = Requirement(module="greenlet", distribution="greenlet")
"""The requirement that all adapters of a loop share."""
NO_EVALUATION = "a trainer evaluates over a data set of its own, not one global batch"
LOOP_LACKS: Mapping[Feature | Precision | Family | Knob, str] = {
    Feature.EVALUATE: NO_EVALUATION,
    Feature.DROPOUT: "masks are drawn in the trainer's own order",
}
"""Features that loops lack by their nature, for `Capabilities.lacks`."""
NUM_STEPS = 20_000
"""Optimizer steps that the data set has rows for; more than any pass takes."""
_KEPT_BATCHES = 4
"""Global batches kept for loaders that read ahead."""


class Moment(StrEnum):
    """Points at which a loop stops and Meshmark observes it."""

    READY = "ready"
    """The model is wrapped and holds its initial values, or those of the checkpoint; no step has begun."""
    GRADIENTS = "gradients complete"
    """Gradients of a step are reduced and not yet clipped."""
    STEPPED = "step done"
    """The optimizer and the schedule have stepped, and gradients are forgotten."""
    SAVED = "saved"
    """A checkpoint that was asked for is complete."""


class Dealing(StrEnum):
    """How a loader deals the rows that it reads in order over ranks."""

    ROWS = "row by row"
    """To one rank after the other, as `torch.utils.data.DistributedSampler` does."""
    MICRO_BATCHES = "micro-batch by micro-batch"
    """To one rank after the other, as Accelerate's `BatchSamplerShard` does."""

    def order(self, layout: Layout, rows: int) -> Tensor:
        """Return the row of a global batch to read at each position, int64 [rows].

        In this order, each rank receives the rows of its data-parallel shard, grouped by micro-batch.
        """
        ranks, micros = layout.dp, layout.num_micro_batches
        row_RMB = torch.arange(rows).view(ranks, micros, -1)
        return (row_RMB.permute(1, 2, 0) if self is Dealing.ROWS else row_RMB.permute(1, 0, 2)).flatten()


class GlobalRows(Dataset[Batch]):
    """The rows of all global batches, one batch after another.

    A trainer trains on the workload's batches if its ranks together read the rows in order, one global batch per
    optimizer step. Within a batch, rows are ordered so that each rank receives the shard that the layout gives it.
    """

    def __init__(self, case: Case, dealing: Dealing) -> None:
        self.workload = case.workload
        self.order = dealing.order(case.layout, case.workload.global_batch).tolist()
        self._batch: Callable[[int], Batch] = functools.lru_cache(maxsize=_KEPT_BATCHES)(self._made)

    def _made(self, step: int) -> Batch:
        return make_batch(self.workload, step).each(unmetered)

    def __len__(self) -> int:
        return NUM_STEPS * self.workload.global_batch

    def __getitem__(self, index: int) -> Batch:
        """Return one row, as a batch of length 1."""
        step, place = divmod(index, self.workload.global_batch)
        row = self.order[place]
        return self._batch(step).rows(row, row + 1)


def unmetered(tensor: Tensor) -> Tensor:
    """Return a copy in NumPy's memory, which a rank's meters do not attribute to the framework.

    The data belong to the suite, like a batch that is passed to an engine.
    """
    return torch.from_numpy(tensor.numpy().copy())


def collate(rows: Sequence[Batch]) -> Batch:
    """Return the batch of these rows, in this order: a loader's `collate_fn`."""
    first = rows[0]

    def joined(*tensors: Tensor) -> Tensor:
        return unmetered(torch.cat(tensors))

    return Batch(
        inputs=pytree.tree_map(joined, first.inputs, *(row.inputs for row in rows[1:])),
        targets=joined(*(row.targets for row in rows)),
        weights=joined(*(row.weights for row in rows)),
        total_weight=first.total_weight,
        skipped_block=first.skipped_block,
        frozen=first.frozen,
    )


class Loop(ABC):
    """A trainer's loop on one rank, for trainers that own their loop.

    `run` starts the framework's own loop over `self.rows`. Hooks in it call `ready` once, and then
    `gradients_complete` and `step_done` once in every optimizer step, in this order. Each returns when Meshmark lets
    the loop continue. The end of the last step needs no special handling: an exception that `except Exception` does not
    catch ends the loop.
    """

    def __init__(self, case: Case, context: RankContext, dealing: Dealing) -> None:
        """`dealing`: how the framework's loader deals rows over ranks."""
        self.case, self.context = case, context
        self.rows = GlobalRows(case, dealing)
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.loss: Tensor
        self.norm: Tensor | None = None
        self._stop: Callable[[Moment], None] = self._no_engine

    def inner(self) -> nn.Module:
        """Return the workload's model inside what the framework has made of it: its parameters have canonical names."""
        module = self.module
        return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

    @abstractmethod
    def run(self, checkpoint: Path | None) -> None:
        """Run the framework's own loop until an exception ends it.

        `checkpoint` is a folder that `save_to` was given, or None to start from the initial values.
        """

    def save_to(self, folder: Path) -> None:
        """Ask the framework for a checkpoint in `folder`, which all ranks share, as soon as the loop goes on.

        It is called after `step_done`; the loop must call `saved` when the checkpoint is complete.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_to: write it, or name Feature.SAVE in `lacks`")

    def close(self) -> None:  # noqa: B027
        """Undo what the framework has changed in the process, after the loop was left."""

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows that one rank trains on at a time."""
        layout = self.case.layout
        return self.case.workload.global_batch // (layout.dp * layout.num_micro_batches)

    def ready(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Stop before the first step. `module` is the framework's wrapper, and `optimizer` PyTorch's optimizer."""
        self.module, self.optimizer = module, optimizer
        self._stop(Moment.READY)

    def gradients_complete(self, loss: Tensor) -> None:
        """Stop where gradients are reduced over all ranks, unscaled and not yet clipped.

        `loss` is this rank's share of the loss that the loop minimises, a scalar. The shares of all ranks add up to
        that loss. A loop that averages gradients over ranks differentiates `dp` times its share.
        """
        self.loss = loss
        self._stop(Moment.GRADIENTS)

    def step_done(self, norm: Tensor | float | None = None) -> None:
        """Stop where the step is done. `norm`: the global norm before clipping, where the framework tells it."""
        self.norm = None if norm is None else torch.as_tensor(norm)
        self._stop(Moment.STEPPED)

    def saved(self) -> None:
        """Stop where the checkpoint that `save_to` asked for is complete on all ranks."""
        self._stop(Moment.SAVED)

    def _no_engine(self, moment: Moment) -> NoReturn:
        raise AdapterError(f"{type(self).__name__} reached {moment!r} without an engine: run it by LoopEngine")


@dataclass(frozen=True)
class _Modes:
    """The states of autograd and autocast in this thread."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """Device, whether autocast is on, and its dtype."""
    nesting: int
    """Number of `torch.autocast` blocks around the code. Autocast drops its cast weights where it falls to 0."""

    @classmethod
    def now(cls, devices: tuple[str, ...]) -> _Modes:
        autocast = tuple((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices)
        return cls(torch.is_grad_enabled(), autocast, _autocast_nesting())

    @classmethod
    def of_a_script(cls, devices: tuple[str, ...]) -> _Modes:
        """The modes in which a script starts."""
        return cls(True, tuple((each, False, torch.get_autocast_dtype(each)) for each in devices), 0)

    def restore(self) -> None:
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        for _ in range(_autocast_nesting(), self.nesting):
            torch.autocast_increment_nesting()
        for _ in range(self.nesting, _autocast_nesting()):
            torch.autocast_decrement_nesting()
        # What the code on the other side has cast may be of weights that have changed since.
        torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    """Return the number of `torch.autocast` blocks around the code. PyTorch tells it only when it changes."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


class _Interruptible:
    """Work that alternates with its caller in one thread, and stops at points of its own choice.

    Both sides share the thread's modes of autograd and autocast. Each switch restores the modes of the side that it
    switches to, also when it ends the work. The blocks that the work leaves then undo their own changes.
    """

    def __init__(self, work: Callable[[], None], devices: tuple[str, ...]) -> None:
        import greenlet  # ranks of engines need none

        self._exit: type[BaseException] = greenlet.GreenletExit
        self._devices = devices
        self._greenlet = greenlet.greenlet(functools.partial(self._begin, work))

    def _begin(self, work: Callable[[], None]) -> None:
        """Run the work in the modes that a script starts in, because the first caller may be under `no_grad`."""
        _Modes.of_a_script(self._devices).restore()
        work()

    def stop(self, moment: Moment) -> None:
        """Return control to the caller until it resumes the work. Only the work calls this."""
        inside = _Modes.now(self._devices)
        try:
            self._greenlet.parent.switch(moment)
        finally:
            inside.restore()

    def resume(self) -> Moment | None:
        """Let the work go on to its next stop and return where that is; None where it has ended instead."""
        outside = _Modes.now(self._devices)
        try:
            moment: Any = self._greenlet.switch()
        finally:
            outside.restore()
        return moment if isinstance(moment, Moment) else None

    def leave(self) -> None:
        """Leave the work where it stands; its `finally` clauses are run."""
        if not self._greenlet.dead and self._greenlet:
            outside = _Modes.now(self._devices)
            try:
                self._greenlet.throw(self._exit)
            finally:
                outside.restore()


class LoopEngine(DataParallelEngine):
    """Presents a `Loop` as an engine: `backward` runs the loop to its gradients, `update` to the end of the step.

    The loop starts at the first call that needs it, so that `load` can set its starting point. The engine's module and
    optimizer are `loop.module` and `loop.optimizer`.
    """

    def __init__(self, case: Case, context: RankContext, loop: Loop) -> None:
        self.case, self.context, self.loop = case, context, loop
        self._checkpoint: Path | None = None
        self._beside: _Interruptible | None = None
        self._step = 0

    @property
    def module(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """The module into which the framework has turned the model."""
        self._start()
        return self.loop.module

    @property
    def optimizer(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """PyTorch's optimizer inside the framework's."""
        self._start()
        return self.loop.optimizer

    def _start(self) -> None:
        if self._beside is None:
            devices = tuple(sorted({"cpu", self.context.device.type}))
            self._beside = _Interruptible(lambda: self.loop.run(self._checkpoint), devices)
            self.loop._stop = self._beside.stop
            self._go_on(Moment.READY)

    def _go_on(self, until: Moment) -> None:
        """Run the loop to its next stop. Raises `AdapterError` where that is another."""
        assert self._beside is not None
        moment = self._beside.resume()
        if moment is not until:
            self._beside.leave()
            found = f"came to {moment.value!r}" if moment else "ended"
            raise AdapterError(
                f"rank {self.context.rank}, step {self._step}: {type(self.loop).__name__} {found}, expected "
                f"{until.value!r}: ready() once, then gradients_complete() and step_done() in every optimizer step"
            )

    def backward(self, batch: Batch) -> Tensor:
        """Let the loop train on its own data, which are those of `batch` if the trainer reads its rows in order."""
        skip_block(self.module, batch, self.case.workload)
        self._go_on(Moment.GRADIENTS)
        return self.loop.loss

    def update(self) -> Tensor | None:
        self._go_on(Moment.STEPPED)
        self._step += 1
        return self.loop.norm

    def loss_scale(self) -> float:
        return 1.0

    def inner(self) -> nn.Module:
        self._start()
        return self.loop.inner()

    def holdings(self) -> Holdings:
        self._start()
        return super().holdings()

    def save(self, folder: Path) -> None:
        self.loop.save_to(folder)
        self._go_on(Moment.SAVED)
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        if self._beside is not None:
            raise AdapterError(f"rank {self.context.rank}: a loop loads a checkpoint before its first step alone")
        self._checkpoint = folder

    def close(self) -> None:
        if self._beside is not None:
            self._beside.leave()
            self.loop.close()
