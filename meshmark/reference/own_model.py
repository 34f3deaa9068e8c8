"""A user's own workload behind the interface of the models here: her module, her batches, her loss.

A workload is a class with three methods in plain PyTorch (`meshmark.Workload` has their documentation): `model()`,
`batch(step)` and `loss(model, batch)`, which returns a sum and its weight. The module that frameworks wrap computes
that sum, so no framework sees the loss. The share that a part of a batch has in the loss of the global batch is its sum
over the weight of the global batch, however rows are dealt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import gc
import glob
import hashlib
import inspect
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import meshmark
from meshmark.errors import InputError, MeshmarkError, UnknownNameError
from meshmark.import_target import import_file_again, import_module_of
from meshmark.models.config import Dataset, ModelConfig
from meshmark.models.module import Block, Model, Recomputer, skeleton
from meshmark.reference.data import Batch
from meshmark.reference.tensor_plan import Style, plan_of, split_dim, split_of
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm, algorithm_presets
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.own_model import HUGGING_FACE, LayerCount, OwnModelConfig, TensorSplit
from meshmark.spec.workload import Loss, Workload
from meshmark.text import describe_error

_NARROW = (torch.bfloat16, torch.float16)
_REQUIRED = ("model", "batch", "loss")
_DEFAULT_OPTIMIZER = OptimizerSpec(clip_norm=0.5)


class OwnWorkload(Protocol):
    """Interface of a user's class."""

    def model(self) -> nn.Module: ...

    def batch(self, step: int) -> Any: ...  # noqa: ANN401

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]: ...  # noqa: ANN401


@functools.lru_cache(maxsize=8)
def load_workload(target: str) -> OwnWorkload:
    """Return the instance of the class at "path/to/file.py:Class" or "package.module:Class".

    Raises `InputError` when it cannot be imported or made, or lacks one of the three methods.
    """
    return _made(target, import_module_of)


def _made(target: str, import_module: Callable[[str], ModuleType]) -> OwnWorkload:
    """Return a new instance of the class at `target`."""
    if target.startswith(HUGGING_FACE):
        from meshmark.reference import transformers_model  # Transformers is imported where it is asked for alone

        return transformers_model.from_target(target)
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise InputError(
            f"workload {target!r}: expected path/to/file.py:Class, package.module:Class or "
            f"{HUGGING_FACE}FILE.json[:HEAD]"
        )
    try:
        cls = getattr(import_module(where), name, None)
    except (Exception, SystemExit) as error:
        raise InputError(f"workload {target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(cls):
        raise InputError(f"workload {target!r}: {where} has no class {name}")
    if lacking := [method for method in _REQUIRED if not callable(getattr(cls, method, None))]:
        raise InputError(
            f"workload {target!r} lacks {', '.join(f'{method}()' for method in lacking)}; a workload has model(), "
            "batch(step) and loss(model, batch): see meshmark.Workload"
        )
    try:
        made = cast(OwnWorkload, cls())
    except Exception as error:
        raise InputError(
            f"workload {target!r} cannot be made: {type(error).__name__}: {error}; its class takes no arguments"
        ) from error
    return made


def describe(target: str) -> Workload:
    """Return the workload at `target` as a case names it, after looking at its model and its first batch.

    Raises `InputError` for a workload that cannot be trained: one whose batches differ between two calls, whose rows
    are uneven, whose loss is no sum and weight, whose module has dropout or changes its inputs, and one whose own code
    raises.
    """
    target = _from_here(target)
    try:
        return _described(target)
    except MeshmarkError:
        raise
    except Exception as error:
        if not (place := _users_line(error)):
            raise
        told = f"workload {target!r} raised {describe_error(error)} at {place}"
        if "does not require grad" in str(error):
            told += (
                "; losses are computed without gradients too, as evaluation does: a loss that differentiates does so "
                "in `with torch.enable_grad():`"
            )
        raise InputError(told) from error


def _users_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error has passed, as "file.py:12". Empty if none."""
    own = Path(meshmark.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and own not in path.parents and not {"site-packages", "dist-packages"} & set(path.parts):
            return f"{path.name}:{frame.lineno}" if not path.is_relative_to(sys.base_prefix) else ""
    return ""


def _described(target: str) -> Workload:
    from meshmark.reference import dry_run  # which runs a workload, and so imports this module

    own = load_workload(target)
    module = built(target, 0)
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise InputError(
            f"workload {target!r}: {lazy[0]} has no shape yet; let model() return a module that has seen a batch, for "
            "lazy modules take their shapes from it"
        )
    _expect_no_dropout(target, module)
    _expect_no_gradient_hooks(target, module)
    _expect_dense_float32(target, module)
    batch = _checked_batch(target, own)
    has_batch_norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    couples = bool(getattr(own, "couples_rows", False)) or has_batch_norms
    _expect_a_sum_and_a_weight(target, own, module, batch, couples)
    _expect_the_same_on_every_rank(target)
    blocks = OwnModel.around(module, own).blocks.values()
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    parameters = list(module.parameters())
    if not parameters:
        raise InputError(f"workload {target!r}: its model has no parameters")
    frozen = _frozen(target, module)
    layers, shared_layers = _count_layers(target, own, module, batch)
    use = dry_run.use_of(own, module, batch)
    digest = _digest(target, own)
    label = f"{re.sub('[^A-Za-z0-9-]+', '_', type(own).__name__).lower()}.{digest}"
    config = OwnModelConfig(
        name=label,
        target=target,
        digest=digest,
        num_parameters=sum(p.numel() for p in parameters),
        num_tensors=len(parameters),
        block_sizes=tuple(sizes),
        shares_weights=sum(1 for _ in module.named_parameters(remove_duplicate=False)) > len(parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        saves_buffers=not module.state_dict().keys() <= {n for n, _ in module.named_parameters(remove_duplicate=False)},
        unused=use.unused,
        gathers=use.gathers,
        indexed=use.indexed,
        indexed_in_blocks=use.indexed_in_blocks,
        repeats=use.repeats,
        runs=use.runs,
        has_scalars=any(p.dim() == 0 for p in parameters),
        has_float_inputs=any(leaf.is_floating_point() for leaf in _leaves(batch)),
        chooses=use.chooses,
        computes_weights=use.computes_weights,
        reads_elsewhere=use.reads_elsewhere,
        repeats_arguments=use.repeats_arguments,
        couples_rows=couples,
        has_batch_norms=has_batch_norms,
        layers=layers,
        layers_share=bool(shared_layers),
        shared_layers=shared_layers,
        split=_split(target, own, module),
        narrow_error=_narrow_error(own, module, batch),
        has_frozen=bool(frozen),
        num_frozen=sum(p.numel() for p in parameters if not p.requires_grad),
    )
    optimizer = getattr(own, "optimizer", _DEFAULT_OPTIMIZER)
    if not isinstance(optimizer, OptimizerSpec):
        raise InputError(
            f"workload {target!r}: optimizer is {optimizer!r:.80}, expected meshmark.spec.optimizer.OptimizerSpec"
        )
    return Workload(
        name=label,
        model=config,
        dataset=Dataset.OWN,
        loss=Loss.OWN,
        optimizer=_grouped(target, optimizer, module),
        global_batch=_num_rows(batch),
        masked=False,
        frozen=frozen,
        algorithm=algorithm_of(target, getattr(own, "algorithm", SYNCHRONOUS)),
    )


def _grouped(target: str, optimizer: OptimizerSpec, module: nn.Module) -> OptimizerSpec:
    """Return the optimizer with its group without weight decay by canonical names.

    A user's norms have any name, so `decay_matrices_only` goes by shapes here: what has fewer than two dimensions does
    not decay. Raises `InputError` for a pattern that fits no parameter, or patterns that fit all.
    """
    trained = {name: p for name, p in OwnModel.around(module).named_parameters() if p.requires_grad}
    if optimizer.decay_matrices_only:
        vectors = tuple(glob.escape(name) for name, p in trained.items() if p.dim() < 2)
        return dataclasses.replace(optimizer, decay_matrices_only=False, no_decay=vectors)
    patterns = tuple(f"model.{pattern}" for pattern in optimizer.no_decay)
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(trained, pattern)]:
        raise InputError(
            f"workload {target!r}: no_decay names {unknown[0].removeprefix('model.')!r}, which fits no trained "
            f"parameter; those are {', '.join(name.removeprefix('model.') for name in trained)}"
        )
    grouped = dataclasses.replace(optimizer, no_decay=patterns)
    if patterns and not any(map(grouped.decays, trained)):
        raise InputError(f"workload {target!r}: no_decay fits every parameter; give weight_decay=0.0 instead")
    return grouped


def algorithm_of(target: str, given: object) -> Algorithm:
    """Return the algorithm that a workload asks for, by an object or by the id of a preset, such as "local-sgd2"."""
    if isinstance(given, str):
        presets = algorithm_presets()
        if given not in presets:
            raise UnknownNameError(f"algorithm of workload {target!r}", given, presets)
        return presets[given]
    if not isinstance(given, Algorithm):
        raise InputError(
            f"workload {target!r}: algorithm is {given!r:.80}, expected the id of a preset or a "
            "meshmark.spec.algorithm.Algorithm"
        )
    return given


@torch.no_grad()
def _narrow_error(own: OwnWorkload, module: nn.Module, batch: Any) -> str:  # noqa: ANN401
    """Return what a module raises where its weights are cast to bf16, as FSDP2 and one half of the noise runs do."""
    wrapper = OwnModel.around(module, own)
    widened = module.register_forward_hook(_wide_outputs)
    weights = {name: parameter.bfloat16() for name, parameter in wrapper.named_parameters()}
    try:
        torch.func.functional_call(wrapper, weights, (batch,))
    except Exception as error:  # of the user's code, such as a TypeError of NumPy's, which has no bf16
        return (str(error) or type(error).__name__).splitlines()[0]
    finally:
        widened.remove()
    return ""


def _expect_dense_float32(target: str, module: nn.Module) -> None:
    """Raise `InputError` for sparse gradients, and for parameters of another dtype than the case's precision casts."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise InputError(
                f"workload {target!r}: {name} has sparse gradients, which are not judged; set sparse=False"
            )
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise InputError(
                f"workload {target!r}: parameter {name} is {parameter.dtype}; expected torch.float32: build the model "
                "in it, and ask for another precision by --precision. Parameters that are complex numbers cannot be "
                "judged"
            )


def _frozen(target: str, module: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters that the module's own code freezes, as starts of names."""
    trained = dict(OwnModel.around(module).named_parameters())
    frozen = tuple(name for name, parameter in trained.items() if not parameter.requires_grad)
    if len(frozen) == len(trained):
        raise InputError(f"workload {target!r}: its model has no parameter that requires a gradient")
    for name in trained.keys() - set(frozen):
        if longer := [start for start in frozen if name.startswith(start)]:
            raise InputError(
                f"workload {target!r}: {longer[0]} is frozen and {name} is trained; rename one, for a name that starts "
                "with a frozen one is taken for frozen"
            )
    return frozen


def _split(target: str, own: OwnWorkload, module: nn.Module) -> TensorSplit | None:
    """Return what a plan splits; why it cannot, where the plan is not the user's own."""
    try:
        plan = plan_of(target, own, module)
    except InputError as error:
        if hasattr(own, "tensor_parallel_plan"):
            raise
        return TensorSplit(sizes=(), by_rows=(), by_columns=(), refusal=str(error).partition(": ")[2])
    return None if plan is None else split_of(module, plan)


@torch.no_grad()
def _count_layers(
    target: str,
    own: OwnWorkload,
    module: nn.Module,
    batch: Any,  # noqa: ANN401
) -> tuple[tuple[LayerCount, ...], tuple[tuple[int, int], ...]]:
    """Return what each of a workload's layers holds and puts out, and the pairs of them that share a parameter.

    A parameter counts in the first layer that holds it.

    Raises `InputError` for layers that, run one after another, are not the model.
    """
    layers = layers_of(own, module)
    if not layers:
        return (), ()
    held = [dict[int, nn.Parameter]() for _ in layers]
    for found, layer in zip(held, layers, strict=True):
        found.update((id(p), p) for p in (layer.parameters() if isinstance(layer, nn.Module) else ()))
    everywhere = {key for found in held for key in found}
    if outside := [name for name, p in module.named_parameters() if id(p) not in everywhere]:
        raise InputError(f"workload {target!r}: {outside[0]} is in none of the layers that layers(model) returned")
    first: dict[int, int] = {}
    shared = set[tuple[int, int]]()
    for index, found in enumerate(held):
        shared.update((first[key], index) for key in found if key in first)
        first.update((key, index) for key in found if key not in first)
    args, kwargs = arguments_of(own.loss, batch)
    counts, rows = list[LayerCount](), _num_rows(batch)
    x: Any = None
    for index, layer in enumerate(layers):
        x = layer(x) if index else layer(*args, **kwargs)
        if not (isinstance(x, Tensor) and x.is_floating_point() and len(x) == rows):
            raise InputError(
                f"workload {target!r}: layer {index} of layers(model) returned {type(x).__name__}; expected one "
                f"floating-point tensor of {rows} rows, which the next layer takes alone"
            )
        counted = [p for key, p in held[index].items() if first[key] == index]
        buffers = layer.buffers() if isinstance(layer, nn.Module) else ()
        counts.append(
            LayerCount(
                num_parameters=sum(p.numel() for p in counted),
                num_tensors=len(counted),
                row_shape=tuple(x.shape[1:]),
                buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
            )
        )
    cut, whole = float(own.loss(returning(x), batch)[0]), float(own.loss(module, batch)[0])
    if abs(cut - whole) > _COUPLED * max(abs(whole), 1e-30):
        raise InputError(
            f"workload {target!r}: the layers of layers(model), one after another, have a loss of {cut}, and the model "
            f"of {whole}; expected the parts of its forward pass in order"
        )
    return tuple(counts), tuple(sorted(shared))


def layers_of(own: OwnWorkload, module: nn.Module) -> list[Callable[..., Any]]:
    """Return the parts of a module's forward pass that a workload names, in order; none where it does not."""
    named = getattr(own, "layers", None)
    return list(named(module)) if callable(named) else []


class _CalledWith(Exception):
    """Ends a loss where it calls its model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_of_model, self.kwargs_of_model = args, kwargs


def arguments_of(loss: Callable[..., Any], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ANN401
    """Return what a loss calls its model with. Raises `InputError` where it does something else with it."""

    def model(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        raise _CalledWith(args, kwargs)

    try:
        loss(model, batch)
    except _CalledWith as called:
        return called.args_of_model, called.kwargs_of_model
    except AttributeError as error:
        raise InputError(
            f"loss(model, batch) does more with its model than to call it ({error}); a model that is cut into layers "
            "is called once"
        ) from error
    raise InputError("loss(model, batch) does not call its model, which layers(model) cuts")


def returning(outputs: Tensor) -> nn.Module:
    """Return a stand-in for a model, whose outputs are there already."""
    return cast(nn.Module, lambda *_args, **_kwargs: outputs)


def _from_here(target: str) -> str:
    """Return `target` with the path of a file as seen from the working directory, which ranks have too.

    So two checkouts of a project name one workload alike.
    """
    start = HUGGING_FACE if target.startswith(HUGGING_FACE) else ""
    path, ending, rest = target.removeprefix(start).partition(".json" if start else ".py")
    if not ending:
        return target
    absolute = Path(f"{path}{ending}").resolve()
    here = Path.cwd()
    file = absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    return f"{start}{file}{rest}"


def _digest(target: str, own: OwnWorkload) -> str:
    """Return what tells two versions of a workload apart: of its source, or of its config where there is none."""
    given: str = getattr(own, "digest", "")
    if target.startswith(HUGGING_FACE):
        return given
    source = b"".join(path.read_bytes() for path in _sources(type(own)))
    return hashlib.sha256(source + given.encode()).hexdigest()[:8]


def _sources(kind: type) -> list[Path]:
    """Return the file of a class, and those beside it, or in its package, from which it and they import."""
    first = Path(inspect.getfile(kind)).resolve()
    top = sys.modules.get(kind.__module__.partition(".")[0])
    root = Path(getattr(top, "__file__", None) or first).resolve().parent
    found, left = {first}, [sys.modules[kind.__module__]]
    while left:
        for value in list(vars(left.pop()).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) and name.partition(".")[0] != "meshmark" else None
            path = Path(getattr(module, "__file__", None) or "/").resolve()
            if module is None or path in found or path.suffix != ".py" or not path.is_relative_to(root):
                continue
            if "site-packages" not in path.relative_to(root).parts:  # of an environment that lies beside the file
                found.add(path)
                left.append(module)
    return [first, *sorted(found - {first})]


def built(target: str, seed: int) -> nn.Module:
    """Return a new module of the workload, with the values that its own code draws under `seed`."""
    return _build(target, load_workload(target), seed)


def _build(target: str, own: OwnWorkload, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = own.model()
    if not isinstance(module, nn.Module):
        raise InputError(f"workload {target!r}: model() returned {type(module).__name__}, expected a torch.nn.Module")
    return module


@functools.lru_cache(maxsize=2)
def reference_values(target: str, seed: int) -> dict[str, Tensor]:
    """Return the initial values of all parameters and buffers, on the CPU, by canonical name."""
    with torch.device("cpu"):
        module = OwnModel.around(built(target, seed))
    values = {name: _unmetered(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    del module
    gc.collect()  # modules are in cycles, and a rank's meter would count what has not been collected yet
    return values


def _unmetered(tensor: Tensor) -> Tensor:
    """Return a copy in numpy's memory, which the meters of a rank do not take for the framework's."""
    return torch.from_numpy(tensor.detach().numpy().copy())


def initial_value(
    model: OwnModelConfig,
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the value that the workload's own code gives a parameter, or a block of it, as float32."""
    value = reference_values(model.target, seed)[name].float()
    if block:
        where = tuple(slice(start, start + size) for start, size in zip(block.offset, block.shape, strict=True))
        value = value[where]
    return value.clone() if device is None else value.to(device, copy=True)


def make_batch(workload: Workload, step: int) -> Batch:
    """Return global batch `step`: the tree of tensors that the workload makes, with the weight of its loss."""
    assert isinstance(workload.model, OwnModelConfig)
    own = load_workload(workload.model.target)
    # A copy, because an engine may change its batch in place, and a workload may return views of its data.
    tree = pytree.tree_map_only(torch.Tensor, torch.clone, own.batch(step))
    rows = _num_rows(tree)
    _expect_rows(workload.model.target, step, rows, workload.global_batch)
    return Batch(
        inputs=tree,
        targets=torch.zeros(rows, dtype=torch.int64),
        weights=torch.ones(rows),
        total_weight=weight_of(workload.model.target, tree),
        frozen=workload.frozen_at(step),
    )


@torch.no_grad()
def weight_of(target: str, rows: Any) -> float:  # noqa: ANN401
    """Return the weight of the loss of some rows; a workload with a method `weight` need not compute the loss."""
    own = load_workload(target)
    if callable(weight := getattr(own, "weight", None)):
        return float(weight(rows))
    module = _weighing_model(target)
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        return float(own.loss(module, rows)[1])
    finally:  # what its code keeps as attributes would count as memory of the framework's
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@functools.lru_cache(maxsize=2)
def _weighing_model(target: str) -> nn.Module:
    """Return the model by which a batch's weight is asked for, which must not depend on its values."""
    module = built(target, 0).eval()
    for tensor in (*module.parameters(), *module.buffers(), *attributes_of(module)):
        tensor.data = _unmetered(tensor)
    return module


def attributes_of(module: nn.Module) -> list[Tensor]:
    """Return the tensors that modules keep as plain attributes."""
    every_module_has = vars(nn.Module())
    held = [value for part in module.modules() for name, value in vars(part).items() if name not in every_module_has]
    return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]


class OwnModel(Model):
    """A user's module, as the models of this folder are used: it takes a tree of tensors and returns the loss's sum."""

    block = nn.Module

    def __init__(self, spec: ModelConfig, layers: Sequence[int] | None = None) -> None:
        assert isinstance(spec, OwnModelConfig)
        nn.Module.__init__(self)
        self.spec, self.skipped_block = spec, None
        self.embedding = self.head = None
        own = load_workload(spec.target)
        if torch.get_default_device().type == "meta":
            # Built on the CPU first, for the module's own code may not build on the meta device.
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                module = _to_meta(own.model())
        else:
            module = own.model()
        self._wrap(module, own)
        module.register_forward_hook(_wide_outputs)
        if layers is not None:
            self._keep(layers_of(own, module), layers)

    def _wrap(self, module: nn.Module, own: OwnWorkload | None) -> None:
        self.model, self._loss = module, own.loss if own else None
        self.__dict__.update(own=own, part=None, part_is_first=True, held=None, recomputer=None)
        self.__dict__["blocks"] = BlocksOf(self)  # no submodule: its blocks have their names in the user's module

    def _keep(self, layers: Sequence[Callable[..., Any]], kept: Sequence[int]) -> None:
        """Become a part of the model: some of its layers, which keep their names, and no other parameters."""
        part = [layers[index] for index in kept]
        # No submodule: these are registered where the user's module has them.
        self.__dict__.update(part=part, part_is_first=0 in kept)
        modules = [layer for layer in part if isinstance(layer, nn.Module)]
        inside = {id(t) for layer in modules for t in (*layer.parameters(), *layer.buffers())}
        for module in self.model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if id(tensor) not in inside:
                    setattr(module, name, None)

    @classmethod
    def join(cls, chunks: Sequence[Model]) -> Model:
        """Return a model that holds what all parts hold."""
        if len(chunks) == 1:
            return chunks[0]
        joined = cls.__new__(cls)
        nn.Module.__init__(joined)
        first = cast(OwnModel, chunks[0])
        joined.spec, joined.skipped_block = first.spec, None
        joined.embedding = joined.head = None
        with torch.device("meta"):
            assert isinstance(first.spec, OwnModelConfig)
            joined._wrap(load_workload(first.spec.target).model(), None)
        for path, module in joined.model.named_modules():
            own = [cast(OwnModel, chunk).model.get_submodule(path) for chunk in chunks]
            for kind in ("_parameters", "_buffers"):
                tensors = getattr(module, kind)
                for name in tensors:
                    held = (getattr(part, kind)[name] for part in own)
                    setattr(module, name, next((tensor for tensor in held if tensor is not None), None))
        return joined

    @classmethod
    def around(cls, module: nn.Module, own: OwnWorkload | None = None) -> OwnModel:
        """Return the wrapper of a module that is there already; its names are canonical."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._wrap(module, own)
        return made

    @property
    def recompute(self) -> Recomputer | None:
        """Runs a block so that its activations are computed again; None keeps them."""
        found: Recomputer | None = self.__dict__["recomputer"]
        return found

    @recompute.setter
    def recompute(self, recomputer: Recomputer | None) -> None:
        self.__dict__["recomputer"] = recomputer
        for block in self.blocks.values():
            if "_plain_forward" in block.__dict__:
                del block.__dict__["_plain_forward"], block.__dict__["forward"]
            if recomputer:
                block.__dict__["_plain_forward"] = plain = block.forward
                block.__dict__["forward"] = _recomputed(block, plain, recomputer)

    def tensor_parallel_plan(self) -> dict[str, Style]:
        """Return the style of every module that tensor parallelism splits, by its path in the user's module."""
        assert isinstance(self.spec, OwnModelConfig)
        plan = plan_of(self.spec.target, self.own, self.model)
        assert plan is not None, "a layout with tensor parallelism does not fit a model without a plan"
        return plan

    def split_dims(self) -> dict[str, int]:
        found = dict[str, int]()
        for path, style in self.tensor_parallel_plan().items():
            part = self.model.get_submodule(path)
            for name, _ in part.named_parameters(recurse=False):
                if (dim := split_dim(part, style, name)) is not None:
                    found[f"model.{path}.{name}"] = dim
        return found

    @classmethod
    def block_classes_of(cls, spec: ModelConfig) -> set[type[nn.Module]]:
        blocks = skeleton(spec).blocks
        assert isinstance(blocks, BlocksOf)
        return blocks.classes

    @classmethod
    def initial_buffers(cls, spec: ModelConfig, seed: int) -> dict[str, Tensor]:
        assert isinstance(spec, OwnModelConfig)
        values = reference_values(spec.target, seed)
        return {name: values[name] for name, _ in skeleton(spec).named_buffers()}

    def make_embedding(self) -> nn.Module:
        raise NotImplementedError

    def make_block(self, index: int) -> nn.Module:
        raise NotImplementedError

    def make_head(self) -> nn.Module:
        raise NotImplementedError

    def block_of(self, name: str) -> str:
        keys = (key for key in self.blocks if name.startswith(f"{key}."))
        return next(keys, "")

    def hold(self, batch: Batch) -> None:
        """Keep the rows of a step, which the first part of a model and the loss behind the last one look up."""
        self.__dict__["held"] = batch.inputs

    def stage_inputs(self, batch: Batch) -> Tensor:
        """Return the numbers of the rows, which a pipeline deals to micro-batches, whatever a row is."""
        return torch.arange(len(batch), device=batch.targets.device)

    def _rows(self, numbers: Tensor) -> Any:  # noqa: ANN401
        """Return consecutive rows of the step, as views."""
        start, stop = int(numbers[0]), int(numbers[-1]) + 1
        return pytree.tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, self.held)

    def stage_loss(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the sum of the loss of the rows with these numbers, whose outputs are there."""
        return cast(OwnWorkload, self.own).loss(returning(outputs), self._rows(numbers))[0]

    def forward(self, x: Any) -> Tensor:  # noqa: ANN401
        """Return the sum of the loss; of a part, what its last layer puts out: the first part takes numbers of rows.

        Weights that are narrow meet a batch as narrow, as FSDP2 casts it at its root.
        """
        if self.part is not None:
            for index, layer in enumerate(cast("list[Callable[..., Any]]", self.part)):
                if index or not self.part_is_first:
                    x = layer(x)
                else:
                    args, kwargs = arguments_of(cast(OwnWorkload, self.own).loss, self._rows(x))
                    x = layer(*args, **kwargs)
            return cast(Tensor, x)
        assert self._loss is not None
        weights = next(self.parameters()).dtype
        if weights is torch.float64:
            with InFloat64():
                return self._loss(self.model, _cast(x, weights))[0]
        return self._loss(self.model, _cast(x, weights) if weights in _NARROW else x)[0]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        assert isinstance(self.spec, OwnModelConfig)
        values = reference_values(self.spec.target, seed)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            tensor.copy_(values[name])

    @torch.no_grad()
    def initialize_buffers(self) -> None:
        """Buffers are computed when a module is built, as rotary tables and masks are, and not drawn."""
        assert isinstance(self.spec, OwnModelConfig)
        values = reference_values(self.spec.target, 0)
        for name, buffer in self.named_buffers():
            buffer.copy_(values[name])


def _recomputed(block: nn.Module, plain: Callable[..., Any], recomputer: Recomputer) -> Callable[..., Any]:
    """Return a forward pass of a block whose activations are computed again in the backward pass."""

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not block.training:
            return plain(*args, **kwargs)
        return recomputer(functools.partial(plain, **kwargs), *args)  # type: ignore[arg-type]

    return forward


def _to_meta(module: nn.Module) -> nn.Module:
    """Put a module's tensors on the meta device; `Module.to` would give every module that shares one its own."""
    there: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in there:
            empty = tensor.detach().to("meta")
            trained = tensor.requires_grad
            there[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
        return there[id(tensor)]

    for part in module.modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                setattr(part, name, moved(tensor))  # an LSTM keeps a list of its weights besides, and sets it so
    return module


class BlocksOf(MutableMapping[str, nn.Module]):
    """The blocks of a module, by their path: what frameworks shard or wrap one by one.

    They are all modules of some classes, for some frameworks wrap by class: those that the module names in
    `_no_split_modules`, as Transformers do, or the most frequent one in the longest `ModuleList`, or without any in the
    longest `Sequential`. A model without either is one block. To set a block replaces it, as frameworks that wrap do.
    """

    def __init__(self, wrapper: OwnModel) -> None:
        self.module: nn.Module = wrapper
        self.classes = _block_classes(wrapper)
        self.paths: list[str] = []
        for path, part in wrapper.named_modules():
            if type(part) in self.classes and not any(path.startswith(f"{outer}.") for outer in self.paths):
                self.paths.append(path)
        if not self.paths:
            self.paths, self.classes = ["model"], {type(wrapper.model)}

    def __getitem__(self, key: str) -> nn.Module:
        return self.module.get_submodule(key)

    def __setitem__(self, key: str, block: nn.Module) -> None:
        self.module.set_submodule(key, block)

    def __delitem__(self, key: str) -> None:
        raise TypeError("a block cannot be taken out of a module")

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def _block_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of a module's blocks, less those that hold a parameter that a module outside of them has too.

    A framework that shards a block by itself cannot share its parameters, and would fail on BERT's embeddings, which
    Transformers names and whose weight is that of the head.
    """
    named = (getattr(part, "_no_split_modules", None) for part in module.modules())
    chosen = getattr(module.__dict__.get("own"), "units", None)
    names = set[str](chosen or next(filter(None, named), ()))
    classes = {type(part) for part in module.modules() if type(part).__name__ in names}
    if chosen and (absent := names - {kind.__name__ for kind in classes}):
        raise InputError(f"units names {', '.join(sorted(absent))}, which is the class of none of the model's modules")
    if not classes:
        entries = _longest(module, nn.ModuleList) or _longest(module, nn.Sequential)
        classes = {kind for kind, _ in Counter(map(type, entries)).most_common(1)}
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    return {kind for kind in classes if not _shares(module, kind, holders)}


def _shares(module: nn.Module, kind: type[nn.Module], holders: Mapping[int, int]) -> bool:
    """Return whether a module of class `kind` shares a parameter with a module outside it."""
    for part in module.modules():
        if type(part) is kind:
            inside = Counter(id(p) for inner in part.modules() for p in inner.parameters(recurse=False))
            if any(holders[parameter] > count for parameter, count in inside.items()):
                return True
    return False


def _longest(module: nn.Module, kind: type[nn.ModuleList] | type[nn.Sequential]) -> list[nn.Module]:
    """Return the entries that have parameters, of the longest list of a kind; the whole model is no list of itself."""
    lists = [part for part in module.modules() if type(part) is kind]
    each = [[entry for entry in part if any(True for _ in entry.parameters())] for part in lists]
    return max(each, key=len, default=[])


class InFloat64(TorchFunctionMode):
    """Turns what asks for float32 into float64, for modules that compute in float32 inside (norms, rotary positions).

    So a module in float64 is a truth, whatever its code casts. New tensors are in float64 by default.
    """

    def __enter__(self) -> Self:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self.default)

    def __torch_function__(  # noqa: ANN202
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = pytree.tree_map(_wider, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:  # noqa: ANN401
    return torch.float64 if value is torch.float32 else value


def _cast(tree: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    def cast_leaf(leaf: Any) -> Any:  # noqa: ANN401
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast_leaf, tree)


def _wide_outputs(_module: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401
    """Give the loss float32 where the model's outputs are narrow, as Accelerate does: a sum over many rows in bf16
    would have two digits."""

    def widen(leaf: Any) -> Any:  # noqa: ANN401
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _NARROW else leaf

    return pytree.tree_map(widen, output)


def _leaves(tree: Any) -> list[Tensor]:  # noqa: ANN401
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _num_rows(tree: Any) -> int:  # noqa: ANN401
    return len(_leaves(tree)[0])


_ASKED_STEPS = 5
"""Number of batches that are looked at before a run: as many steps are judged."""


def _checked_batch(target: str, own: OwnWorkload) -> Any:  # noqa: ANN401
    """Return the first batch. Raises `InputError` if one of the first batches cannot be judged."""
    first, num_rows = own.batch(0), 0
    for step in range(_ASKED_STEPS):
        one, again = (first if step == 0 else own.batch(step)), own.batch(step)
        leaves = _leaves(one)
        if not leaves or any(leaf.dim() == 0 for leaf in leaves):
            raise InputError(f"workload {target!r}: batch({step}) holds no tensors with rows as their first dimension")
        if len(sizes := {len(leaf) for leaf in leaves}) > 1:
            raise InputError(
                f"workload {target!r}: tensors of batch({step}) have {', '.join(map(str, sorted(sizes)))} rows; "
                "expected as many rows in each, along the first dimension"
            )
        num_rows = num_rows or len(leaves[0])
        _expect_rows(target, step, len(leaves[0]), num_rows)
        if not _are_equal(leaves, _leaves(again)):
            raise InputError(
                f"workload {target!r}: batch({step}) differs between two calls; expected a function of the step alone: "
                "draw with torch.Generator().manual_seed(step)"
            )
    return first


def _are_equal(leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if len(leaves) != len(others):
        return False
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(leaves, others, strict=True))


def _expect_rows(target: str, step: int, rows: int, expected: int) -> None:
    if rows != expected:
        raise InputError(
            f"workload {target!r}: batch({step}) has {rows} rows, and batch(0) has {expected}; expected as many in "
            "every batch: leave out what remains at the end of an epoch, as drop_last=True does"
        )


def _expect_a_sum_and_a_weight(
    target: str,
    own: OwnWorkload,
    module: nn.Module,
    batch: Any,  # noqa: ANN401
    couples_rows: bool,
) -> None:
    before = [leaf.clone() for leaf in _leaves(batch)]
    if others := [leaf for leaf in pytree.tree_leaves(batch) if not isinstance(leaf, Tensor)]:
        raise InputError(
            f"workload {target!r}: batch(0) holds {others[0]!r:.80}, a {type(others[0]).__name__}; expected tensors "
            "alone, with rows as their first dimension"
        )
    try:
        with torch.no_grad():
            found = own.loss(module, batch)
            total, weight = found
            total, weight = torch.as_tensor(total), torch.as_tensor(weight)
            repeated = torch.as_tensor(own.loss(module, batch)[0])
    except (TypeError, ValueError) as error:
        raise InputError(
            f"workload {target!r}: loss(model, batch) did not return a sum and its weight: {error}"
        ) from error
    if total.dim() or weight.dim() or not float(weight) > 0:
        raise InputError(
            f"workload {target!r}: loss(model, batch) returned a sum of shape {tuple(total.shape)} and a weight "
            f"{weight!r:.60}; expected two numbers, the weight above 0: sum over rows, and how many count"
        )
    if callable(told := getattr(own, "weight", None)) and abs(float(told(batch)) - float(weight)) > _COUPLED * float(
        weight
    ):
        raise InputError(
            f"workload {target!r}: weight(batch) is {float(told(batch)):g}, and loss(model, batch) returned a weight "
            f"of {float(weight):g}; expected the same number"
        )
    if any(not torch.equal(one, other) for one, other in zip(before, _leaves(batch), strict=True)):
        raise InputError(f"workload {target!r}: the model or the loss changes its batch in place; work on a copy")
    if not torch.equal(total, repeated):
        raise InputError(
            f"workload {target!r}: the loss of one batch differs between two calls ({float(total)!r} and "
            f"{float(repeated)!r}); a model that draws random numbers in training cannot be judged by its values"
        )
    parts = [pytree.tree_map(lambda leaf, rows=rows: leaf[rows], batch) for rows in _halves(_num_rows(batch))]
    with torch.no_grad():
        halves = [own.loss(module, part) for part in parts]
    # A loss that differentiates has a gradient here too.
    total, halves = total.detach(), [(loss.detach(), count) for loss, count in halves]
    if abs(float(weight) - sum(float(w) for _, w in halves)) > _COUPLED * float(weight):
        raise InputError(
            f"workload {target!r}: the weights of two halves of a batch, "
            f"{' and '.join(f'{float(w)}' for _, w in halves)}, do not add up to that of the "
            f"whole, {float(weight)}; return a sum over rows and how many count, no mean"
        )
    size, (first, second) = max(abs(float(total)), 1e-30), (float(s) for s, _ in halves)
    apart = abs(float(total) - (first + second)) / size
    mean = sum(float(s) * float(w) for s, w in halves) / float(weight)
    if apart > _COUPLED and abs(float(total) - mean) <= _COUPLED * size:
        raise InputError(
            f"workload {target!r}: the loss of a batch, {float(total):.6g}, is the mean of those of its two halves, "
            f"{first:.6g} and {second:.6g}, not their sum; return the sum over rows, such as reduction='sum' gives, "
            "and the number of rows as its weight"
        )
    if apart > _COUPLED and not couples_rows:
        raise InputError(
            f"workload {target!r}: the losses of two halves of a batch, {first:.6g} and {second:.6g}, do not add up to "
            f"that of the whole, {float(total):.6g}: either loss() returns no sum over rows, or rows enter one "
            "another's loss, as in a contrastive one. Frameworks compute that by micro-batches; to have it judged so, "
            "set couples_rows = True in the workload"
        )


_COUPLED = 1e-4
"""Relative difference allowed between the losses of two halves and that of the whole, which is due to rounding."""


def _halves(rows: int) -> list[slice]:
    return [slice(0, rows // 2), slice(rows // 2, rows)]


def _expect_the_same_on_every_rank(target: str) -> None:
    """Raise `InputError` for a workload that answers otherwise on another rank, or when it is asked again.

    What a rank would see is set up here: the variables that launchers set, and a process group that sends nothing. A
    file is run anew, for it may look at its rank when it is imported.
    """
    first, other = _answers(target, 0), _answers(target, 1)
    if different := [what for what in first if first[what] != other.get(what)] or sorted(other.keys() - first):
        again = _answers(target, 0)
        if any(first[what] != again.get(what) for what in first):
            raise InputError(
                f"workload {target!r}: {different[0]} differs between two calls under one seed; expected the same "
                "each time: of numpy's and Python's random numbers, seed the generators in model() and batch()"
            )
        raise InputError(
            f"workload {target!r}: {different[0]} differs between rank 0 and rank 1 of two; expected the same on every "
            "rank, for Meshmark deals the rows: leave RANK, LOCAL_RANK and torch.distributed.get_rank() out"
        )


@torch.no_grad()
def _answers(target: str, rank: int) -> dict[str, object]:
    """Return what a workload builds and computes on a rank of two, by what it is."""
    with _on_rank(rank):
        own = load_workload(target) if target.startswith(HUGGING_FACE) else _made(target, _module_again)
        module = _build(target, own, 0)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        found: dict[str, object] = {f"the initial value of {name}": _fingerprint(t) for name, t in tensors.items()}
        for step in range(_ASKED_STEPS):
            found[f"batch({step})"] = [_fingerprint(leaf) for leaf in _leaves(own.batch(step))]
        tree = own.batch(0)
        found["the loss of batch(0)"] = [float(number) for number in own.loss(module, tree)]
    return found


def _module_again(where: str) -> ModuleType:
    return import_file_again(Path(where)) if where.endswith(".py") else import_module_of(where)


def _fingerprint(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    values = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(values.numpy().data).hexdigest()


@contextlib.contextmanager
def _on_rank(rank: int) -> Iterator[None]:
    """Let this process look like a rank of two."""
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    before = {name: os.environ.get(name) for name in told}
    grouped = dist.is_available() and not dist.is_initialized()
    os.environ.update(told)
    try:
        if grouped:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        yield
    finally:
        if grouped and dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _expect_no_gradient_hooks(target: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"workload {target!r}: a hook changes the gradient of {name}; frameworks keep parameters of their own, "
                "which do not have it: let model() register none, and put a mask or a factor into the loss"
            )


def _expect_no_dropout(target: str, module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            raise InputError(
                f"workload {target!r}: {name} drops out with p={part.p}; its masks differ between layouts, so build "
                "the model with p=0 here"
            )
