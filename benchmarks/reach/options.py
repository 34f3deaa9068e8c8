"""The public options of each framework, read from the installed version, and the values that judged passes give them.

An option is *judged* when a judged pass gave it a value other than its default (or, of a method, called it). Options
that the table options.toml excludes have a reason there: *refused* or *not training*. All others are *not asked*.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import importlib
import inspect
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TABLE = Path(__file__).with_name("options.toml")


class Kind(StrEnum):
    """Where a source's options are read from."""

    ARGUMENTS = "arguments"
    """Arguments of a function, or of a class's constructor."""
    FIELDS = "fields"
    """Fields of a dataclass or pydantic model."""
    ATTRIBUTES = "attributes"
    """Attributes of DeepSpeed's configuration, which is no model as a whole."""
    METHODS = "methods"
    """Public methods of a class: modes that are switched by a call."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One function or class that has options."""

    framework: str
    target: str
    """`module:name`."""
    kind: Kind
    only: tuple[str, ...] = ("*",)
    """Patterns of the options that count, where the class has many others."""
    set_later: tuple[str, ...] = ()
    """Fields that scripts set on the object once there is a model, as its framework's own do: noted at the end too."""

    @property
    def name(self) -> str:
        """Framework and class, as the table and the page name the source."""
        methods = " methods" if self.kind is Kind.METHODS else ""
        return f"{self.framework} {self.target.partition(':')[2]}{methods}"

    def load(self) -> Any:  # noqa: ANN401
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)

    def options(self) -> dict[str, str]:
        """Return every option and a summary of its default, as the installed version has them."""
        found = {
            Kind.ARGUMENTS: _arguments,
            Kind.FIELDS: _fields,
            Kind.ATTRIBUTES: _attributes,
            Kind.METHODS: _methods,
        }[self.kind](self.load())
        return {name: default for name, default in found.items() if any(fnmatch.fnmatch(name, p) for p in self.only)}


REQUIRED = "required"
"""Default of an option that has none."""


def _source(
    framework: str,
    target: str,
    kind: Kind = Kind.ARGUMENTS,
    only: tuple[str, ...] = ("*",),
    set_later: tuple[str, ...] = (),
) -> Source:
    return Source(framework=framework, target=target, kind=kind, only=only, set_later=set_later)


_FABRIC, _DS, _ACC, _MEG = "lightning_fabric.strategies", "deepspeed.runtime", "accelerate.utils", "megatron.core"

SOURCES = (
    _source("PyTorch", "torch.nn.parallel:DistributedDataParallel"),
    _source("PyTorch", "torch.nn.parallel:DistributedDataParallel", Kind.METHODS),
    _source("PyTorch", "torch.distributed.fsdp:FullyShardedDataParallel"),
    _source("PyTorch", "torch.distributed.fsdp:FullyShardedDataParallel", Kind.METHODS),
    _source("PyTorch", "torch.distributed.fsdp:MixedPrecision", Kind.FIELDS),
    _source("PyTorch", "torch.distributed.fsdp:fully_shard"),
    _source("PyTorch", "torch.distributed.fsdp:FSDPModule", Kind.METHODS),
    _source("PyTorch", "torch.distributed.fsdp:MixedPrecisionPolicy", Kind.FIELDS),
    _source("PyTorch", "torch.distributed.fsdp:CPUOffloadPolicy", Kind.FIELDS),
    _source("PyTorch", "torch.distributed.pipelining:PipelineStage"),
    _source("PyTorch", "torch.distributed.pipelining:Schedule1F1B"),
    _source("PyTorch", "torch.distributed.pipelining:ScheduleInterleaved1F1B"),
    _source("PyTorch", "torch.distributed.tensor.parallel:parallelize_module"),
    _source("PyTorch", "torch.distributed.tensor.parallel:ColwiseParallel"),
    _source("PyTorch", "torch.distributed.tensor.parallel:RowwiseParallel"),
    _source("PyTorch", "torch.distributed.tensor.parallel:SequenceParallel"),
    _source("PyTorch", "torch.distributed.optim:ZeroRedundancyOptimizer"),
    _source("PyTorch", "torch.distributed.checkpoint.state_dict:StateDictOptions", Kind.FIELDS),
    _source("DeepSpeed", f"{_DS}.config:DeepSpeedConfig", Kind.ATTRIBUTES),
    _source("DeepSpeed", f"{_DS}.zero.config:DeepSpeedZeroConfig", Kind.FIELDS),
    _source("DeepSpeed", f"{_DS}.zero.offload_config:DeepSpeedZeroOffloadParamConfig", Kind.FIELDS),
    _source("DeepSpeed", f"{_DS}.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig", Kind.FIELDS),
    _source("DeepSpeed", f"{_DS}.precision_config:DeepSpeedFP16Config", Kind.FIELDS),
    _source("DeepSpeed", f"{_DS}.precision_config:DeepSpeedBF16Config", Kind.FIELDS),
    _source("DeepSpeed", f"{_DS}.pipe.module:PipelineModule"),
    _source(
        "DeepSpeed",
        f"{_DS}.engine:DeepSpeedEngine",
        Kind.METHODS,
        (
            "no_sync",
            "backward",
            "step",
            "set_*",
            "train_batch",
            "eval_batch",
            "save_*",
            "load_*",
            "scale",
            "coalesce_*",
            "offload_states",
            "reload_states",
            "compile",
        ),
    ),
    _source("Megatron", f"{_MEG}.distributed:DistributedDataParallelConfig", Kind.FIELDS),
    _source("Megatron", f"{_MEG}.distributed:DistributedDataParallel", Kind.METHODS),
    _source("Megatron", f"{_MEG}.optimizer:OptimizerConfig", Kind.FIELDS),
    _source(
        "Megatron",
        f"{_MEG}.model_parallel_config:ModelParallelConfig",
        Kind.FIELDS,
        set_later=("no_sync_func", "grad_sync_func", "param_sync_func"),
    ),
    _source(
        "Megatron",
        f"{_MEG}.transformer:TransformerConfig",
        Kind.FIELDS,
        (
            "recompute_*",
            "distribute_saved_*",
            "cp_comm_type",
            "moe_*parallel*",
            "num_layers_in_*_pipeline_stage",
            "account_for_*",
        ),
    ),
    _source("Accelerate", "accelerate:Accelerator"),
    _source(
        "Accelerate",
        "accelerate:Accelerator",
        Kind.METHODS,
        (
            "accumulate",
            "autocast",
            "backward",
            "clip_*",
            "gather*",
            "join_*",
            "load_state",
            "maybe_*",
            "no_sync",
            "prepare*",
            "reduce",
            "save_state",
            "skip_first_batches",
            "trigger_*",
            "unscale_*",
            "set_trigger",
            "check_trigger",
            "get_state_dict",
        ),
    ),
    _source("Accelerate", f"{_ACC}:GradientAccumulationPlugin", Kind.FIELDS),
    _source("Accelerate", f"{_ACC}:DataLoaderConfiguration", Kind.FIELDS),
    _source("Accelerate", f"{_ACC}:DistributedDataParallelKwargs", Kind.FIELDS),
    _source("Accelerate", f"{_ACC}:FullyShardedDataParallelPlugin", Kind.FIELDS),
    _source("Accelerate", f"{_ACC}:DeepSpeedPlugin", Kind.FIELDS),
    _source("Accelerate", "accelerate.scheduler:AcceleratedScheduler"),
    _source("FairScale", "fairscale.nn.data_parallel:FullyShardedDataParallel"),
    _source("FairScale", "fairscale.nn.data_parallel:FullyShardedDataParallel", Kind.METHODS),
    _source("FairScale", "fairscale.nn.data_parallel:ShardedDataParallel"),
    _source("FairScale", "fairscale.nn.data_parallel:ShardedDataParallel", Kind.METHODS),
    _source("FairScale", "fairscale.optim:OSS"),
    _source("Fabric", "lightning_fabric:Fabric"),
    _source(
        "Fabric",
        "lightning_fabric:Fabric",
        Kind.METHODS,
        (
            "all_gather",
            "all_reduce",
            "autocast",
            "backward",
            "broadcast",
            "clip_gradients",
            "init_*",
            "load*",
            "no_backward_sync",
            "save",
            "seed_everything",
            "setup*",
            "sharded_model",
        ),
    ),
    _source("Fabric", f"{_FABRIC}:DDPStrategy"),
    _source("Fabric", f"{_FABRIC}:FSDPStrategy"),
    _source("Fabric", f"{_FABRIC}:DeepSpeedStrategy"),
    _source("Fabric", f"{_FABRIC}:ModelParallelStrategy"),
)

_MODULE_METHODS = frozenset(
    "add_module apply bfloat16 buffers children compile cpu cuda double eval extra_repr float forward get_buffer "
    "get_extra_state get_parameter get_submodule half ipu modules mtia named_buffers named_children named_modules "
    "named_parameters parameters register_buffer register_module register_parameter requires_grad_ set_extra_state "
    "set_submodule share_memory to to_empty type xpu zero_grad train state_dict load_state_dict".split()
)
"""Methods of every `torch.nn.Module`, which are no framework's options even where one overrides them."""


def summary(value: object) -> str:
    """Return a short text that tells one value of an option from another."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool | int | float | str | type(None)):
        return repr(value)[:40]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if isinstance(value, list | tuple | dict | set | frozenset):
        return repr(value)[:40] if not value else f"{type(value).__name__} of {len(value)}"
    if inspect.isroutine(value) or inspect.isclass(value):
        return getattr(value, "__name__", "function")
    if dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields"):
        return f"{type(value).__name__}({', '.join(_not_default(value))})".replace("()", "")
    return type(value).__name__


def _not_default(value: Any) -> list[str]:  # noqa: ANN401
    """Return the names of the fields that are not at their default, by which two configurations of a class differ."""
    defaults = {name: default for name, default in _fields(type(value)).items() if hasattr(value, name)}
    return [name for name, default in defaults.items() if summary(getattr(value, name)) != default]


def _arguments(target: Any) -> dict[str, str]:  # noqa: ANN401
    taken = inspect.signature(target).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL,)
    return {
        p.name: REQUIRED if p.default is p.empty else summary(p.default)
        for p in taken
        if p.kind not in kinds and not (p.kind is p.VAR_KEYWORD and p.name == "_")
    }


def _fields(target: Any) -> dict[str, str]:  # noqa: ANN401
    if hasattr(target, "model_fields"):
        found = {}
        for name, field in target.model_fields.items():
            found[name] = REQUIRED if field.is_required() else summary(field.get_default(call_default_factory=True))
        return found
    return {field.name: _default(field) for field in dataclasses.fields(target) if field.init}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return summary(field.default_factory())
    return REQUIRED if field.default is dataclasses.MISSING else summary(field.default)


def _attributes(target: Any) -> dict[str, str]:  # noqa: ANN401
    """Read from a configuration that only has what it must have."""
    return _leaves(target({"train_batch_size": 1}))


def _leaves(made: object) -> dict[str, str]:
    """Return attributes that are no configurations themselves, which have sources of their own."""
    plain = {n: v for n, v in vars(made).items() if not n.startswith("_") and not n.endswith("_config")}
    of_the_world = ("world_size", "global_rank", "mesh_device")
    return {name: summary(value) for name, value in plain.items() if name not in of_the_world}


def _methods(target: Any) -> dict[str, str]:  # noqa: ANN401
    """Public methods that the framework defines, without those of every module."""
    top = target.__module__.partition(".")[0]
    found = {}
    for name, value in inspect.getmembers(target, inspect.isroutine):
        module = getattr(value, "__module__", None) or ""
        own = module.startswith(top) and not module.startswith("torch.nn.modules")
        if not name.startswith("_") and own and name not in _MODULE_METHODS:
            found[name] = "not called"
    return found


# --- What a rank notes.


class Probe:
    """A profile function that notes with which options the sources are called.

    It costs a rank a call per Python call, so it runs in judged passes that nobody times.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._watched: dict[CodeType, Callable[[FrameType, str], None]] = {}
        self._missing = set(SOURCES)
        self._calls = 0
        self._set_later: list[tuple[Source, object]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        self._calls += 1
        if self._missing and self._calls % 4096 == 1:
            self._look_again()
        if (note := self._watched.get(frame.f_code)) is not None:
            note(frame, event)

    def _look_again(self) -> None:
        """Watch sources whose modules have been imported since."""
        for source in list(self._missing):
            module, _, name = source.target.partition(":")
            target = getattr(sys.modules.get(module), name, None)
            if target is not None:
                self._missing.discard(source)
                self._watch(source, target)

    def _watch(self, source: Source, target: Any) -> None:  # noqa: ANN401
        if source.kind is Kind.METHODS:
            for name in _methods(target):
                if code := _code(inspect.getattr_static(target, name)):
                    self._add(code, functools.partial(self._called, source, name))
        elif source.kind is Kind.ATTRIBUTES:
            self._add(target._initialize_params.__code__, functools.partial(self._made, source, target))
        elif source.kind is Kind.FIELDS:
            for cls in [target, *_subclasses(target)]:
                if code := _code(cls.__init__):
                    self._add(code, functools.partial(self._made, source, target))
        elif code := _code(target.__init__ if inspect.isclass(target) else target):
            self._add(code, functools.partial(self._given, source))

    def _add(self, code: CodeType, note: Callable[[FrameType, str], None]) -> None:
        """A code object can be that of several sources, such as pydantic models with one constructor."""
        before = self._watched.get(code)

        def both(frame: FrameType, event: str) -> None:
            if before:
                before(frame, event)
            note(frame, event)

        self._watched[code] = both

    def _called(self, source: Source, name: str, frame: FrameType, event: str) -> None:
        if event == "call":
            self.values[source.name][name].add("called")

    def _given(self, source: Source, frame: FrameType, event: str) -> None:
        """Note the arguments of a call."""
        if event == "call":
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARKEYWORDS)
            for name in code.co_varnames[:count]:
                if name != "self" and name in frame.f_locals:
                    self.values[source.name][name].add(summary(frame.f_locals[name]))

    def _made(self, source: Source, target: type, frame: FrameType, event: str) -> None:
        """Note the fields of an object whose constructor has returned."""
        made = frame.f_locals.get("self")
        if event != "return" or not isinstance(made, target):
            return
        names = _leaves(made) if source.kind is Kind.ATTRIBUTES else _fields(target)
        self._note(source, made, names)
        if source.set_later:
            self._set_later.append((source, made))

    def _note(self, source: Source, made: object, names: Iterable[str]) -> None:
        for name in names:
            if hasattr(made, name):
                self.values[source.name][name].add(summary(getattr(made, name)))

    def finish(self) -> None:
        """Note what scripts have set on objects since they were made."""
        for source, made in self._set_later:
            self._note(source, made, source.set_later)


def _code(target: Any) -> CodeType | None:  # noqa: ANN401
    if isinstance(target, classmethod | staticmethod):
        target = target.__func__
    return getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None


def _subclasses(cls: type) -> list[type]:
    return [each for sub in cls.__subclasses__() for each in (sub, *_subclasses(sub))]


# --- The table.


class OptionStatus(StrEnum):
    """The facts that are known of an option."""

    JUDGED = "judged"
    REFUSED = "refused"
    NOT_TRAINING = "not training"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """Options of one source that need not be judged, and why."""

    source: str
    status: OptionStatus
    reason: str
    options: tuple[str, ...]


@functools.cache
def excluded() -> tuple[Excluded, ...]:
    """Return the entries of the table."""
    return tuple(
        Excluded(
            source=entry["source"],
            status=OptionStatus(entry["standing"]),
            reason=entry["reason"],
            options=tuple(entry["options"]),
        )
        for entry in tomllib.loads(TABLE.read_text())["excluded"]
    )


def status(source: str, option: str, default: str, values: Mapping[str, object]) -> tuple[OptionStatus, str]:
    """Return the status of an option, and its reason or the values that judged passes gave it."""
    for entry in excluded():
        if entry.source == source and option in entry.options:
            return entry.status, entry.reason
    if others := [value for value in values if value != default]:
        return OptionStatus.JUDGED, ", ".join(others[:3])
    return OptionStatus.NOT_ASKED, "at its default alone" if values else ""


def stale(options: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return entries of the table that name a source or an option that there is not. `options`: by source."""
    return [
        f"{entry.source}: {name}"
        for entry in excluded()
        for name in entry.options
        if name not in options.get(entry.source, {})
    ]
