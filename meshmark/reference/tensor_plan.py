"""How a user's model is split by tensor parallelism: a plan of module names and styles, as for `parallelize_module`.

A plan comes from the workload (`tensor_parallel_plan()`) or from the module itself, as Transformers' models have one.
Styles are PyTorch's own objects or Transformers' names for them.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.errors import InputError
from meshmark.spec.own_model import TensorSplit


class Split(StrEnum):
    """Which dimension of a product a module is split by."""

    COLUMNS = "columns"
    """Split by outputs (ColwiseParallel)."""
    ROWS = "rows"
    """Split by inputs or, for an embedding, by vocabulary (RowwiseParallel)."""
    NONE = "none"
    """Every rank has all of it."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The treatment of one module in a plan."""

    split: Split
    gathers_outputs: bool = False
    """For a module split by columns: every rank gets all outputs."""
    splits_inputs: bool = False
    """For a module split by rows: its inputs are whole, and each rank takes its part."""
    sums_gradients: bool = False
    """For a module that every rank has but calls on its own part: its gradients are added up."""
    given: object = None
    """PyTorch's own object, where the plan has one that these words do not describe."""


STYLES: dict[str, Style] = {
    "colwise": Style(split=Split.COLUMNS),
    "colwise_gather_output": Style(split=Split.COLUMNS, gathers_outputs=True),
    "rowwise": Style(split=Split.ROWS),
    "rowwise_split_input": Style(split=Split.ROWS, splits_inputs=True),
    "embedding_rowwise": Style(split=Split.ROWS, splits_inputs=True),
    "replicated_with_grad_allreduce": Style(split=Split.NONE, sums_gradients=True),
}
"""Styles by the names that Transformers uses."""


def plan_of(target: str, own: object, module: nn.Module) -> dict[str, Style] | None:
    """Return the style of every module that is split, by its path; None where nobody has a plan.

    Raises `InputError` for a plan that names no module, an unknown style, or a module that PyTorch does not split.
    """
    told = getattr(own, "tensor_parallel_plan", None)
    if callable(told):
        told = told()
    given = told if told is not None else getattr(module, "tp_plan", None)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise InputError(f"workload {target!r}: tensor_parallel_plan() returned {given!r:.80}; expected a dict")
    found = dict[str, Style]()
    for pattern, style in given.items():
        known = _style(target, pattern, style)
        paths = [path for path, _ in module.named_modules() if _matches(path, pattern)]
        if not paths and told is not None:
            raise InputError(
                f"workload {target!r}: tensor_parallel_plan() names {pattern!r}, and no module is called so"
            )
        found.update(dict.fromkeys(paths, known))
    for path, style in found.items():
        part = module.get_submodule(path)
        if style.split is not Split.NONE and not isinstance(part, nn.Linear | nn.Embedding):
            raise InputError(
                f"workload {target!r}: its tensor-parallel plan splits {path}, a {type(part).__name__}; PyTorch's "
                "styles split Linear and Embedding"
            )
    return found


def _matches(path: str, pattern: str) -> bool:
    """As `parallelize_module` does, each part of a path by itself."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _style(target: str, pattern: str, style: object) -> Style:
    if isinstance(style, str):
        if style not in STYLES:
            raise InputError(
                f"workload {target!r}: its tensor-parallel plan gives {pattern!r} the style {style!r}; expected one of "
                f"{', '.join(STYLES)}, or an object such as ColwiseParallel()"
            )
        return STYLES[style]
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if not isinstance(style, ParallelStyle):
        raise InputError(
            f"workload {target!r}: its tensor-parallel plan gives {pattern!r} {style!r:.60}; expected one of "
            f"{', '.join(STYLES)}, or an object such as ColwiseParallel()"
        )
    whole, parts, local = (Replicate(),), (Shard(-1),), getattr(style, "use_local_output", True)
    if isinstance(style, ColwiseParallel):
        plain = local and style.input_layouts == whole and style.output_layouts in (whole, parts)
        gathers = style.output_layouts == whole
        return Style(split=Split.COLUMNS, gathers_outputs=gathers, given=None if plain else style)
    if isinstance(style, RowwiseParallel):
        plain = local and style.input_layouts in (whole, parts) and style.output_layouts == whole
        return Style(split=Split.ROWS, splits_inputs=style.input_layouts == whole, given=None if plain else style)
    return Style(split=Split.NONE, given=style)


def split_dim(module: nn.Module, style: Style, name: str) -> int | None:
    """Return the dimension along which a parameter of a module is split; None where every rank has all of it."""
    if style.split is Split.NONE:
        return None
    if isinstance(module, nn.Embedding):
        return int(style.split is Split.COLUMNS)
    if style.split is Split.COLUMNS:
        return 0
    return 1 if name == "weight" else None


def split_of(module: nn.Module, plan: Mapping[str, Style]) -> TensorSplit:
    """Return what a plan splits, as theory knows it."""
    sizes, by_dim = set[int](), dict[int, list[int]]({0: [], 1: []})
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    refusal = ""
    for path, style in plan.items():
        part = module.get_submodule(path)
        for name, parameter in part.named_parameters(recurse=False):
            if (dim := split_dim(part, style, name)) is not None:
                sizes.add(parameter.shape[dim])
                by_dim[dim].append(parameter.numel())
                if holders[id(parameter)] > 1:
                    refusal = f"the plan splits {path}.{name}, which another module shares"
    rows = [module.get_submodule(path) for path, style in plan.items() if style.split is Split.ROWS]
    looked_up = [part.weight.numel() for part in rows if isinstance(part, nn.Embedding)]
    planned = all(style.given is None for style in plan.values())
    return TensorSplit(
        sizes=tuple(sorted(sizes)),
        by_rows=tuple(by_dim[0]),
        by_columns=tuple(by_dim[1]),
        looked_up=sum(looked_up),
        num_looked_up=len(looked_up),
        refusal=refusal,
        is_planned=planned,
    )


def parallelize_by(module: nn.Module, mesh: Any, plan: Mapping[str, Style]) -> None:  # noqa: ANN401
    """Split a module, which has its values, over a mesh by PyTorch's `parallelize_module`; keep no whole copy."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def pytorchs(style: Style) -> Any:  # noqa: ANN401
        if style.given is not None:
            return style.given
        if style.split is Split.COLUMNS:
            return ColwiseParallel(output_layouts=Replicate() if style.gathers_outputs else Shard(-1))
        return RowwiseParallel(input_layouts=Replicate() if style.splits_inputs else Shard(-1))

    for path, style in plan.items():
        part = module.get_submodule(path)
        if style.sums_gradients:
            for parameter in part.parameters():
                parameter.register_hook(_sum_over(mesh.get_group()))  # type: ignore[no-untyped-call]
        else:
            parallelize_module(part, mesh, pytorchs(style), src_data_rank=None)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            if local.untyped_storage().nbytes() > local.nbytes:
                parameter._local_tensor = local.clone()


def _sum_over(group: Any) -> Any:  # noqa: ANN401
    def reduce(gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed

    return reduce
