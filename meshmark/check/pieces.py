"""Locate one rank's part of a parameter in the whole. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")
"""Attributes under which wrappers of PyTorch's, and Fabric's, store the single module they wrap."""
_WITH_MODULE = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
"""Wrappers that store it as `module`, a name that other modules may have too."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a parameter that one rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offset: tuple[int, ...] | None
    """Offset of the part in the whole, by dimension. None: the part is a range of the flattened whole."""
    start: int = 0
    """Start of that range."""
    ranks: tuple[int, ...] = ()
    """Ranks that together hold one whole copy. Empty: this rank holds all of it."""

    def put(self, whole: Tensor, part: Tensor, *, add: bool = False) -> None:
        """Copy `part` to its place in `whole`, or add it to what is there."""
        place = self._place(whole, part)
        place.copy_(place + part.reshape(place.shape) if add else part.reshape(place.shape))

    def take(self, whole: Tensor, part: Tensor) -> Tensor:
        """Return a copy of what lies in `whole` where `part` would."""
        return self._place(whole, part).reshape(part.shape).clone()

    def _place(self, whole: Tensor, part: Tensor) -> Tensor:
        if self.offset is None:
            return whole.view(-1)[self.start : self.start + part.numel()]
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, part.shape, strict=True))]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers such as DDP, FSDP1 or `torch.compile`."""
    *_, inner = layers(module)
    return inner


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the wrappers around the user's module, the outermost first, and then that module."""
    yield module
    # Not by `or`: a container without modules is false, and a compiled module has no length.
    names = ("module", *WRAPPED) if type(module).__name__ in _WITH_MODULE else WRAPPED
    inner = next((module._modules[name] for name in names if module._modules.get(name) is not None), None)
    if inner is not None:
        yield from layers(inner)


def bare_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that is not a wrapper, with the name it has without wrappers."""
    module = unwrapped(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from bare_modules(child, f"{prefix}.{name}" if prefix else name)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without wrappers, each once."""
    found: dict[str, nn.Parameter] = {}
    seen = set[int]()
    for prefix, inner in bare_modules(module):
        for name, parameter in inner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter. ZeRO 3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_dtensor(tensor: object) -> bool:
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, detached."""
    if is_dtensor(tensor):
        return tensor._local_tensor.detach()  # type: ignore[attr-defined, no-any-return]
    return tensor.detach()


class CannotTellError(Exception):
    """Something cannot be observed or recomputed. The text gives the reason."""


def piece_of(name: str, parameter: Tensor) -> Piece:
    """Return the place of this rank's part of a parameter or gradient in the whole.

    A part may also be a summand of what lies there.
    """
    if not is_dtensor(parameter):
        shape = tuple(parameter.shape)
        return Piece(name=name, shape=shape, offset=(0,) * len(shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed: Any = parameter
    mesh, placements = placed.device_mesh, placed.placements
    sharded = [i for i, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]
    _, offset = compute_local_shape_and_global_offset(placed.shape, mesh, placements)
    coordinates = mesh.get_coordinate()
    where = tuple(slice(None) if i in sharded else c for i, c in enumerate(coordinates))
    ranks = tuple(mesh.mesh[where].flatten().tolist())
    return Piece(name=name, shape=tuple(placed.shape), offset=tuple(offset), ranks=ranks)


def flat_pieces(root: nn.Module) -> dict[str, tuple[Any, slice, Piece]]:
    """Return, by name, what FSDP1 stores of each parameter on this rank.

    The values are the flat parameter, the parameter's range in the local part, and the place of that range in the
    whole parameter.
    """
    found: dict[str, tuple[Any, slice, Piece]] = {}
    for prefix, module in _wrapped_modules(root):
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        import torch.distributed as dist

        group = handle.process_group
        ranks = tuple(dist.get_process_group_ranks(group))
        whole = not handle.uses_sharded_strategy
        starts = flat._param_infos
        begin = 0
        for info, shape, numel, shard in zip(
            starts,
            flat._shapes,
            flat._numels,
            flat._shard_param_infos if not whole else [None] * len(starts),
            strict=True,
        ):
            inner = _bare_name(info.module_name)
            name = ".".join(part for part in (prefix, inner, info.param_name) if part)
            if whole:
                found[name] = flat, slice(begin, begin + numel), Piece(name=name, shape=tuple(shape), offset=None)
                begin += numel
            elif shard.in_shard:
                piece = Piece(
                    name=name, shape=tuple(shape), offset=None, start=shard.intra_param_start_idx, ranks=ranks
                )
                end = shard.offset_in_shard + shard.numel_in_shard
                found[name] = flat, slice(shard.offset_in_shard, end), piece
            else:
                found[name] = flat, slice(0, 0), Piece(name=name, shape=tuple(shape), offset=None, ranks=ranks)
    return found


def _wrapped_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module, wrappers included, with the name it has without wrappers."""
    yield prefix, module
    single = [a for a in WRAPPED if a in module._modules]
    for name, child in module._modules.items():
        if child is not None:
            plain = name in single or type(module).__name__ in _WITH_MODULE
            yield from _wrapped_modules(child, prefix if plain else f"{prefix}.{name}" if prefix else name)


def _bare_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in WRAPPED)


def assembled(
    parts: Mapping[int, Mapping[str, Tensor]],
    pieces: Mapping[int, Mapping[str, Piece]],
    sums: Mapping[str, Mapping[int, int]] | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Assemble whole tensors from the parts of all ranks.

    The result is keyed by replica: the lowest of the ranks that together hold one copy. `sums` names tensors whose
    parts are added up, and gives the replica of each rank.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for rank, tensors in parts.items():
        for name, part in tensors.items():
            piece, added = pieces[rank][name], sums is not None and name in sums
            first = sums[name][rank] if sums is not None and added else min(piece.ranks, default=rank)
            copy = found.setdefault(first, {})
            if name not in copy:
                unknown = float("nan") if part.is_floating_point() and not added else 0.0
                copy[name] = torch.full(piece.shape, unknown, dtype=part.dtype)
            piece.put(copy[name], part, add=added)
    return found
