"""Run one forward and backward pass of a user's module in a plain process, to find what no formula gives.

It finds which parameters have a gradient, which appear again in another module, and how many bytes autograd saves.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshmark.errors import InputError
from meshmark.models.module import build_model
from meshmark.reference.data import make_batch
from meshmark.reference.own_model import (
    OwnModel,
    OwnWorkload,
    arguments_of,
    attributes_of,
    layers_of,
    load_workload,
    returning,
)
from meshmark.reference.tensor_plan import Split, Style, split_dim
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, Schedule
from meshmark.spec.own_model import OwnModelConfig

LARGEST = 100_000_000
"""Parameters of the largest model that is run so: a larger one takes minutes, and its activations are not planned."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """How a pass uses the parameters."""

    unused: tuple[str, ...]
    """Trained parameters that have no gradient."""
    gathers: tuple[tuple[int, int], ...]
    """As `ModelConfig.gathers`."""
    indexed: int
    """As `ModelConfig.indexed`."""
    indexed_in_blocks: int
    """As `ModelConfig.indexed_in_blocks`."""
    repeats: bool
    """As `OwnModelConfig.repeats`."""
    runs: int
    """As `ModelConfig.runs`."""
    chooses: bool
    """As `OwnModelConfig.chooses`."""
    computes_weights: bool
    """As `ModelConfig.computes_weights`."""
    reads_elsewhere: bool
    """As `ModelConfig.reads_elsewhere`."""
    repeats_arguments: bool
    """As `ModelConfig.repeats_arguments`."""


def use_of(own: OwnWorkload, module: nn.Module, batch: Any) -> Use:  # noqa: ANN401
    """Run one forward and backward pass of a module with its values.

    Raises `InputError` where `torch.autograd.grad` cannot differentiate it.
    """
    reads = {id(p): list[bool]() for p in module.parameters()}
    inside, repeating = Counter[int](), list[bool]()

    def enter(part: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        differentiable = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))
        calls[id(part)] += bool(part._parameters)
        given = [id(x) for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        repeating.append(len(set(given)) < len(given))
        for parameter in map(id, part.parameters(recurse=False)):
            if not inside[parameter]:  # else a module around it reads it already
                reads[parameter].append(differentiable)
            inside[parameter] += 1

    def leave(part: nn.Module, _args: object, _output: object) -> None:
        inside.subtract(id(p) for p in part.parameters(recurse=False))

    units = {module, *OwnModel.around(module, own).blocks.values()}
    runs, calls = Counter[int](), Counter[int]()
    handles = [unit.register_forward_pre_hook(lambda part, _: runs.update([id(part)])) for unit in units]
    handles += [part.register_forward_pre_hook(enter, with_kwargs=True) for part in module.modules()]
    handles += [part.register_forward_hook(leave) for part in module.modules()]
    wholes = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    indexed, computed, elsewhere = set[int](), set[int](), set[int]()
    blocks = OwnModel.around(module, own).blocks.values()
    in_blocks = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}
    linear = torch.nn.functional.linear

    def note(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        whole = wholes.get(address)
        if whole is not None and tensor is not whole:
            indexed.add(address)
        if whole is not None and not inside[id(whole)]:
            elsewhere.add(address)
        return tensor

    def linear_of_a_whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute as `linear`. It saves a transposed view, where DeepSpeed's own saves the weight itself."""
        before, found = set(indexed), linear(x, weight, bias)
        if isinstance(weight, nn.Parameter):
            indexed.intersection_update(before)
        elif weight.untyped_storage().data_ptr() not in wholes:
            computed.add(id(weight))
        return found

    torch.nn.functional.linear = linear_of_a_whole  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), _Choices() as choices:
            total = own.loss(module, batch)[0]
    finally:
        torch.nn.functional.linear = linear
    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        gradients = torch.autograd.grad(total, trained, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise
        raise InputError(
            f"workload {type(own).__name__}: its model calls torch.utils.checkpoint with use_reentrant=True, through "
            "which torch.autograd.grad cannot differentiate; give use_reentrant=False"
        ) from error
    unused = {id(p) for p, gradient in zip(trained, gradients, strict=True) if gradient is None}
    for handle in handles:
        handle.remove()
    named = OwnModel.around(module).named_parameters()
    more = [(p.numel(), _num_reads(reads[id(p)]) - 2) for p in module.parameters()]
    return Use(
        unused=tuple(name for name, p in named if id(p) in unused),
        gathers=tuple((elements, times) for elements, times in more if times),
        indexed=sum(wholes[address].numel() for address in indexed),
        indexed_in_blocks=sum(wholes[address].numel() for address in indexed & in_blocks),
        repeats=max(runs.values(), default=0) > 1,
        runs=max(calls.values(), default=1),
        chooses=choices.found,
        computes_weights=bool(computed),
        reads_elsewhere=bool(elsewhere),
        repeats_arguments=any(repeating),
    )


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation picks the largest of floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(  # noqa: ANN202
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.overloadpacket in _PICK and args[0].is_floating_point():
            self.found = True
        return func(*args, **(kwargs or {}))


_PICK = (torch.ops.aten.topk, torch.ops.aten.argmax, torch.ops.aten.argmin, torch.ops.aten.sort, torch.ops.aten.argsort)


def _num_reads(calls: list[bool]) -> int:
    """Return how often a parameter is gathered in a forward and a backward pass, by whether the inputs of each call are
    differentiable: after the backward of one that is not, nothing tells a framework to release it."""
    found, there = len(calls), False
    for differentiable in reversed(calls):
        found += not there
        there = not differentiable
    return found


def activation_bytes(case: Case, rank: int, step: int, casts_weights: bool) -> int | None:
    """Return the bytes that the forward pass of the first micro-batch of `rank` at `step` leaves: what autograd saves,
    and what modules keep.

    Parameters, buffers and the batch itself are not counted, and what two operations save is counted once.
    `casts_weights`: in mixed precision the weights are cast, in place of autocast. None where it is not known.
    """
    found = _counted(case, rank, step, casts_weights)
    return None if found is None else found[0]


def kept_bytes(case: Case, rank: int, step: int, casts_weights: bool) -> int | None:
    """Return the bytes of tensors that modules keep as attributes after that forward pass, such as the hidden values
    that a loss reads, for which no framework can be held responsible.
    """
    found = _counted(case, rank, step, casts_weights)
    return None if found is None else found[1]


@functools.lru_cache(maxsize=256)
def _counted(case: Case, rank: int, step: int, casts_weights: bool) -> tuple[int, int] | None:
    """Return `activation_bytes` and `kept_bytes`."""
    config = case.workload.model
    assert isinstance(config, OwnModelConfig)
    if config.num_parameters > LARGEST:
        return None
    layout, precision, low = case.layout, case.precision, getattr(torch, case.precision.compute)
    if layout.tp > 1 and config.chooses:
        return None  # which part a rank would choose, a part of its sums does not tell
    model = build_model(config)
    model.initialize(case.workload.seed)
    if not precision.is_mixed:
        model.to(low)
    assert isinstance(model, OwnModel)
    sent: list[Tensor] = []
    if layout.tp > 1:
        _take_part(model, layout.tp, layout.coordinates(rank).tp, sent)
    blocks: list[Any] = []

    def recompute(block: Any, *args: Tensor) -> Tensor:  # noqa: ANN401
        blocks.append(block)
        return cast(Tensor, checkpoint(block, *args, use_reentrant=False))

    if layout.recompute is Recompute.FULL:
        model.recompute = recompute
    part = make_batch(case.workload, step).shard(layout.coordinates(rank).dp, layout.dp)
    inputs = next(part.micro_batches(layout.num_micro_batches)).inputs
    forward, given = (model, inputs) if layout.pp == 1 else _stage_of(case, rank, model, inputs, sent)
    blocks.clear()  # of the stages before
    whole = _storages([*model.parameters(), *model.buffers(), *pytree.tree_leaves(part.inputs), given])
    saved = weakref.WeakSet[_Saved]()  # what only a part of the graph that is forgotten again has saved, is gone

    def note(tensor: Tensor) -> _Saved:
        # Detached: an operation that saves its own result, such as a sigmoid, would be held by that for ever.
        saved.add(made := _Saved(tensor.detach()))
        return made

    read = list[bool]()

    def take_back(each: _Saved) -> Tensor:
        read.append(True)
        return each.tensor

    drawing = list[weakref.ref[Tensor]]()
    take = torch.get_rng_state

    def taken() -> Tensor:  # PyTorch keeps one for each part of a model that it will run again
        drawing.append(weakref.ref(state := take()))
        return state

    weights = {}
    if precision.is_mixed and casts_weights:
        weights = {name: p.detach().to(low).requires_grad_() for name, p in model.named_parameters()}
        whole |= _storages(weights.values())
    autocast = precision.is_mixed and not casts_weights
    with (
        torch.autograd.graph.saved_tensors_hooks(note, take_back),
        torch.autocast("cpu", low, autocast),
        _taking_states_by(taken),
    ):
        kept = torch.func.functional_call(model, weights, (given,)) if forward is model else forward(given)
    if read:  # by a backward pass within the loss, as of forces: when the step's own begins, nobody can see
        return None
    whole |= _storages(sent)
    # A block that is computed again keeps its arguments by name too, such as masks.
    named = [leaf for block in blocks for leaf in pytree.tree_leaves(block.keywords)]
    there = _storages([*(each.tensor for each in saved), *(kept[1:] if isinstance(kept, tuple) else ()), *named])
    found = sum(size for address, size in there.items() if address not in whole)
    found += sum(state.nbytes for each in drawing if (state := each()) is not None)
    lasting = {address: size for address, size in _storages(attributes_of(model)).items() if address not in whole}
    beside = sum(size for address, size in lasting.items() if address not in there)
    del kept
    return found * _in_flight(layout, layout.coordinates(rank).pp) + beside, sum(lasting.values())


def _in_flight(layout: Layout, stage: int) -> int:
    """Return how many micro-batches a stage has run forward when its first backward pass begins."""
    if layout.pp == 1:
        return 1
    all_first = layout.schedule is Schedule.GPIPE
    return layout.num_micro_batches if all_first else min(layout.num_micro_batches, layout.pp - stage)


def _stage_of(
    case: Case,
    rank: int,
    model: OwnModel,
    inputs: Any,  # noqa: ANN401
    sent: list[Tensor],
) -> tuple[Callable[[Any], object], Any]:
    """Return what one pipeline stage computes, and what it is given of a micro-batch.

    `sent` gets what it sends on, which is communication and no activation. The last stage keeps its outputs, as
    PyTorch's does.
    """
    layout, config = case.layout, case.workload.model
    assert isinstance(config, OwnModelConfig)
    (stage,) = layout.stages_of(layout.coordinates(rank).pp)
    own = load_workload(config.target)
    layers, kept = layers_of(own, model.model), config.stage_layers(layout.pp, stage)
    args, kwargs = arguments_of(own.loss, inputs)
    x: Any = None

    def through(index: int, x: Any) -> Any:  # noqa: ANN401
        return layers[index](x) if index else layers[0](*args, **kwargs)

    with torch.no_grad():
        for index in range(kept[0]):
            x = through(index, x)
    is_last = len(layers) - 1 in kept

    def run(x: Any) -> object:  # noqa: ANN401
        for index in kept:
            x = through(index, x)
        if not is_last:
            sent.append(x.detach())
            return x
        return own.loss(returning(x), inputs)[0], x

    return run, x.detach().requires_grad_() if stage else None


def _take_part(model: OwnModel, tp: int, rank: int, sent: list[Tensor]) -> None:
    """Leave in each module that a plan splits a rank's part of its weights, and put no communication between ranks.

    Values are then those of no training, but all shapes are those of one rank. `sent` gets what a collective would have
    put, which is communication and no activation.
    """

    def collective(output: Tensor) -> Tensor:
        sent.append(output.detach())
        return output

    for path, style in model.tensor_parallel_plan().items():
        part = model.model.get_submodule(path)
        for name, parameter in list(part.named_parameters(recurse=False)):
            if (dim := split_dim(part, style, name)) is not None:
                setattr(part, name, nn.Parameter(parameter.detach().chunk(tp, dim)[rank].clone()))
        if isinstance(part, nn.Embedding):
            if style.split is Split.ROWS:
                part.register_forward_pre_hook(lambda part, args: (args[0].clamp(max=len(part.weight) - 1),))
        elif style.splits_inputs:
            part.register_forward_pre_hook(lambda _, args: (args[0].chunk(tp, -1)[rank].clone(),))
        if style.split is Split.ROWS:
            part.register_forward_hook(lambda _part, _args, output: collective(output.clone()))
        elif style.gathers_outputs:
            part.register_forward_hook(lambda _part, _args, output: collective(torch.cat([output] * tp, -1)))


@functools.lru_cache(maxsize=256)
def tensor_parallel_sends(case: Case, rank: int, step: int) -> tuple[tuple[str, int, int], ...]:
    """Return what a rank's modules send over the tensor-parallel ranks in a step: kind, bytes and calls.

    A module that is split by columns adds up the gradients of its input, where that has any; one that is split by rows
    its output (arXiv:1909.08053, section 3).
    """
    layout = case.layout
    model = build_model(case.workload.model)
    model.initialize(case.workload.seed)
    assert isinstance(model, OwnModel)
    model.to(getattr(torch, case.precision.compute))
    plan = model.tensor_parallel_plan()
    sent = dict[str, list[int]]()
    part = make_batch(case.workload, step).shard(layout.coordinates(rank).dp, layout.dp)
    if layout.recompute is Recompute.FULL:
        model.recompute = functools.partial(checkpoint, use_reentrant=False)
    in_backward = False

    def note(kind: str, tensor: Tensor) -> None:
        entry = sent.setdefault(kind, [0, 0])
        entry[0] += tensor.nbytes
        entry[1] += 1

    def watch(module: nn.Module, style: Style) -> None:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:  # noqa: ANN401
            """In a backward pass, of a block that is computed again, as far as it is needed."""
            if style.split is Split.ROWS:
                note("all_reduce", output)
            if style.gathers_outputs:
                note("all_gather", output)
            if in_backward:
                return
            if style.split is not Split.NONE and args[0].requires_grad:
                if style.split is Split.COLUMNS:
                    note("all_reduce", args[0])
                elif style.splits_inputs:
                    note("all_gather", args[0])
            for parameter in module.parameters() if style.sums_gradients else ():
                note("all_reduce", parameter)

        module.register_forward_hook(hook)

    for path, style in plan.items():
        watch(model.model.get_submodule(path), style)
    for micro in part.micro_batches(layout.num_micro_batches):
        total, in_backward = model(micro.inputs), True
        total.backward()
        in_backward = False
    return tuple((kind, num_bytes, calls) for kind, (num_bytes, calls) in sorted(sent.items()))


@functools.lru_cache(maxsize=16)
def recomputed_gathers(config: OwnModelConfig) -> tuple[tuple[int, int], ...]:
    """Return, of parameters by their elements, how much more often modules gather them where blocks are recomputed.

    A module gathers what it reads before its forward and before its backward pass, and gives it up after it. What it
    gathered for a backward pass is still there when that pass computes the block again.
    """
    plain, again = (_module_gathers(config, recomputes) for recomputes in (False, True))
    sizes = {name: p.numel() for name, p in build_model(config).named_parameters()}
    return tuple((sizes[name], again[name] - plain[name]) for name in sizes if again[name] != plain[name])


def _module_gathers(config: OwnModelConfig, recomputes: bool) -> Counter[str]:
    model = build_model(config)
    model.initialize(0)
    model.recompute = functools.partial(checkpoint, use_reentrant=False) if recomputes else None
    named = {id(p): name for name, p in model.named_parameters()}
    there, backward, counts = set[str](), set[int](), Counter[str]()

    def gather(module: nn.Module) -> None:
        for name in (named[id(p)] for p in module.parameters(recurse=False)):
            counts[name] += name not in there
            there.add(name)

    def release(module: nn.Module) -> None:
        there.difference_update(named[id(p)] for p in module.parameters(recurse=False))

    def forward_ends(module: nn.Module, _args: object, _output: object) -> None:
        if id(module) not in backward:
            release(module)

    def backward_begins(module: nn.Module, _gradients: object) -> None:
        backward.add(id(module))
        gather(module)

    def backward_ends(module: nn.Module, _inputs: object, _outputs: object) -> None:
        backward.discard(id(module))
        release(module)

    for module in model.model.modules() if isinstance(model, OwnModel) else ():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda part, _: gather(part))
            module.register_forward_hook(forward_ends)
            module.register_full_backward_pre_hook(backward_begins)
            module.register_full_backward_hook(backward_ends)
    own = load_workload(config.target)
    model(own.batch(0)).backward()
    return counts


@contextlib.contextmanager
def _taking_states_by(take: Callable[[], Tensor]) -> Iterator[None]:
    """Let checkpointing take the state of the random numbers by `take`."""
    before = torch.get_rng_state
    torch.get_rng_state = take
    try:
        yield
    finally:
        torch.get_rng_state = before


class _Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _storages(tensors: Iterable[object]) -> dict[int, int]:
    """Return the address and size of every storage, which the caller must keep alive."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
