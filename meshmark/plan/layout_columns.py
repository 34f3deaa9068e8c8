"""Columns of a layout table: those that `meshmark predict` reads, and those that it copies unchanged."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from meshmark.errors import InputError, LayoutError, UnknownNameError
from meshmark.models.transformer import TEXT_FAMILIES, Family, ModelSpec, gpt, llama
from meshmark.plan.model_names import known_models, plan_model
from meshmark.plan.rows import Row
from meshmark.spec.hardware import MOST_GPUS
from meshmark.spec.layout import AXES, Layout, Offload, Recompute, RecomputeModule, Schedule, parse_layout
from meshmark.theory.activations import expect_modules
from meshmark.theory.grid import module_code
from meshmark.theory.recipe import NARROW

DIMENSIONS = {
    "family": "family",
    "layers": "num_layers",
    "hidden": "hidden",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn_hidden": "ffn_hidden",
    "vocab": "vocab_size",
    "tied_embeddings": "tied_embeddings",
    "seq_len": "seq_len",
}
"""Columns of a model, and the field of `ModelSpec` for each."""
DEGREES = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "zero_stage": "zero_stage",
    "grad_accum": "num_micro_batches",
    "virtual_stages": "virtual_stages",
    "sequence_parallel": "sequence_parallel",
    "schedule": "schedule",
    "recompute": "recompute",
    "offload": "offload",
}
"""Columns of a layout, and the field of `Layout` for each."""
READ = (
    "model",
    *DIMENSIONS,
    "layout",
    *DEGREES,
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "offload_layers",
    "lora_rank",
    "quantize",
    "replicas",
    "ep",
    "etp",
    "micro_batch",
    "global_batch",
    "gpus",
    "gpu",
    "framework",
    "recipe",
    "precision",
)
PASSED_ON = (
    *("", "id", "name", "label", "note", "source", "flag", "status", "table", "params", "nodes"),
    *("tokens_per_s_per_gpu", "tokens_per_s", "mfu_percent", "mfu_percent_published", "hfu_percent"),
    *("gpu_memory_gb", "peak_memory_gib"),
)
"""Columns of notes and measurements, which no prediction reads. Names that begin with `PREFIXES` are notes too."""
PREFIXES = ("measured_", "predicted_", "note_")
OTHER_NAMES = {
    **dict.fromkeys(("ga", "gas", "grad_acc", "gradient_accumulation_steps", "micro_batches"), "grad_accum"),
    **dict.fromkeys(("mbs", "mb", "micro_batch_size", "per_device_train_batch_size"), "micro_batch"),
    **dict.fromkeys(("gbs", "global_batch_size", "train_batch_size"), "global_batch"),
    **dict.fromkeys(("vp", "vpp", "v", "interleave", "virtual_pipeline_parallel_size"), "virtual_stages"),
    **dict.fromkeys(("zero", "fsdp"), "zero_stage"),
    **dict.fromkeys(("sp", "seq_parallel"), "sequence_parallel"),
    **dict.fromkeys(("seq", "seqlen", "sequence_length", "max_seq_len"), "seq_len"),
    **dict.fromkeys(("ac", "activation_checkpointing", "recomputation", "recompute_granularity"), "recompute"),
    **dict.fromkeys(("recompute_layers", "num_recompute_layers"), "recompute_num_layers"),
    **dict.fromkeys(("cpu_offloading_num_layers", "activation_offload"), "offload_layers"),
    **dict.fromkeys(("lora", "lora_dim", "lora_r", "peft"), "lora_rank"),
    **dict.fromkeys(("num_gpus", "n_gpus", "world_size"), "gpus"),
    **dict.fromkeys(("dtype", "quantization"), "precision"),
    **dict.fromkeys(("expert_parallel", "expert_model_parallel_size"), "ep"),
    **dict.fromkeys(("hsdp", "dp_replicate"), "replicas"),
}
"""Names that frameworks have for columns, and the column's name here."""
_NEEDED = ("layers", "hidden", "heads", "vocab", "seq_len")
_LARGEST = 10**9
METHODS = ("uniform", "block")
"""How full recomputation chooses layers: units of layers that keep one input each, or the first layers of a chunk."""
_Word = TypeVar("_Word", bound=StrEnum)


def expect_known(columns: Sequence[str]) -> None:
    """Raise `InputError` for a column that is neither read nor copied, since its content would be ignored."""
    unknown = [c for c in columns if c not in READ and c not in PASSED_ON and not c.startswith(PREFIXES)]
    if unknown:
        near = [OTHER_NAMES[c.lower()] for c in unknown[:1] if c.lower() in OTHER_NAMES]
        near = near or difflib.get_close_matches(unknown[0][:80], READ, n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        named = ", ".join(repr(column[:80]) for column in unknown[:5])
        raise InputError(
            f"unknown column {named}{hint}. Read are {', '.join(READ)}; passed on unread are "
            f"{', '.join(filter(None, PASSED_ON))} and names that begin with {', '.join(PREFIXES)}"
        )


_NARROW = re.compile(r"(mx|nv)?(fp|float|int)_?[468]", re.IGNORECASE)
"""Pattern of 8-bit and narrower precisions, in any spelling."""
_SPELLED = {"float8": "fp8", "amp_fp8": "fp8", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_SINGLE = ("fp32", "float32", "32", "tf32")
_WIDE = re.compile(r"(amp_)?(bf16|fp16|bfloat16|float16|bf|half|16)([-_ ].*)?", re.IGNORECASE)
"""Pattern of 16-bit precisions, such as `amp_bf16` and `bf16-mixed`. A remark may follow the name."""


def narrow_of(row: Row, position: int) -> str:
    """Return the precision of products narrower than 16 bits that a row names, or an empty string.

    Raises `InputError` for a precision that would be planned as another one.
    """
    said = cell(row, "precision")
    if _NARROW.search(said):
        if said.lower() not in _SPELLED:
            raise InputError(
                f"row {position + 2}: precision is {said[:40]!r}, expected bf16, {', '.join(NARROW)}: no other "
                "products of 8 bits and fewer are planned; leave the row out, or say one that is"
            )
        return _SPELLED[said.lower()]
    if said.lower() in _SINGLE and cell(row, "recipe") not in ("fp32", "eager"):
        raise InputError(
            f"row {position + 2}: precision is {said[:40]!r}, but products are planned in 16 bits; a column recipe "
            "says fp32, or leave precision empty"
        )
    if said and said.lower() not in _SINGLE and not _WIDE.fullmatch(said):
        raise InputError(
            f"row {position + 2}: precision is {said[:40]!r}, expected bf16, {', '.join(NARROW)}, or an empty cell"
        )
    return ""


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """Columns of a row that are no part of a `Layout`, by the names that they have in a `Grid`."""

    micro_batch: int = 1
    replicas: int = 1
    ep: int = 1
    etp: int = 1
    recompute_layers: int = 0
    recompute_unit: int = 1
    recompute_modules: int = 0
    offload_layers: int = 0


def recomputation_of(row: Row, position: int, layout: Layout, spec: ModelSpec) -> dict[str, int]:
    """Return the columns of a grid that say which layers and modules are recomputed, and which layers are offloaded.

    Raises `InputError` where they contradict the layout or the model.
    """
    where, method, modules = (
        f"row {position + 2}",
        cell(row, "recompute_method").lower(),
        cell(row, "recompute_modules"),
    )
    count = integer(row, "recompute_num_layers", position, usual=0)
    away = integer(row, "offload_layers", position, usual=0, least=0)
    try:
        found = recomputed_columns(layout, spec, method=method, count=count, modules=modules)
        found["offload_layers"] = offloaded_layers(layout, spec, away)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return found


def recomputed_columns(layout: Layout, spec: ModelSpec, *, method: str, count: int, modules: str) -> dict[str, int]:
    """Return columns of a grid for Megatron's `recompute_method`, `recompute_num_layers` and `recompute_modules`.

    Raises `InputError` where they contradict the layout or the model.
    """
    found: dict[str, int] = {}
    if method and method not in METHODS:
        raise InputError(f"recompute_method is {method[:40]!r}, expected one of {', '.join(METHODS)}")
    if (method or count) and layout.recompute is not Recompute.FULL:
        said = "recompute_method" if method else "recompute_num_layers"
        raise InputError(
            f"{said} is of full recomputation, but recompute is {layout.recompute}; say full, or leave it out"
        )
    if bool(method) != bool(count):
        missing = "recompute_num_layers" if method else "recompute_method"
        raise InputError(
            f"missing column {missing}: a method ({', '.join(METHODS)}) and its number of layers come together"
        )
    if count:
        most = -(-spec.num_layers // (layout.pp * layout.virtual_stages))
        if count > most:
            raise InputError(f"recompute_num_layers is {count}, but a chunk has {most} of {spec.num_layers} layers")
        found["recompute_layers" if method == "block" else "recompute_unit"] = count
    if modules:
        if layout.recompute is not Recompute.SELECTIVE:
            raise InputError(
                f"recompute_modules is of selective recomputation, but recompute is {layout.recompute}; say selective"
            )
        found["recompute_modules"] = module_code(modules_of(modules, spec))
    return found


def modules_of(text: str, spec: ModelSpec) -> frozenset[RecomputeModule]:
    """Return the modules that a text names, with spaces, commas or `+` between. Raises `InputError` as
    `expect_modules` does, and for an unknown name.
    """
    names = [name for name in re.split(r"[\s,+;]+", text.strip().lower()) if name]
    if not names:
        raise InputError(f"recompute_modules names none, expected some of {', '.join(RecomputeModule)}")
    if unknown := [name for name in names if name not in tuple(RecomputeModule)]:
        raise UnknownNameError("module to recompute", unknown[0], RecomputeModule)
    modules = frozenset(RecomputeModule(name) for name in names)
    expect_modules(spec, modules)
    return modules


def offloaded_layers(layout: Layout, spec: ModelSpec, count: int) -> int:
    """Return the layers of a rank whose activations are offloaded. Raises `InputError` if a rank has fewer."""
    most = -(-spec.num_layers // layout.pp)
    if count > most:
        raise InputError(f"offload_layers is {count}, but a rank has {most} of {spec.num_layers} layers")
    if count and layout.offload is Offload.NVME:
        raise InputError("offload_layers beside offload nvme: activations are planned in host memory; say offload cpu")
    return count


def cell(row: Row, column: str) -> str:
    return (row.get(column) or "").strip()


def model_of(row: Row, position: int) -> ModelSpec:
    """Return the model of a row.

    It is defined by its dimensions, with `model` as a label, or by the name or description in `model`, with the row's
    dimensions as overrides. Raises `InputError` with the row and the column for anything missing or impossible.
    """
    fields = {DIMENSIONS[column]: _dimension(row, column, position) for column in DIMENSIONS if cell(row, column)}
    where, name = f"row {position + 2}", cell(row, "model")
    # A row may say only how many layers of a named model there are, as proxies of large ones do.
    if not {"num_layers", "hidden"} & fields.keys() or ("hidden" not in fields and name in known_models()):
        if not name:
            raise InputError(f"{where} has no model; give a column model, or columns {', '.join(_NEEDED)}")
        try:
            return _changed(plan_model(name), fields)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if missing := [column for column in _NEEDED if DIMENSIONS[column] not in fields]:
        raise InputError(f"{where}: missing column {', '.join(missing)}; a model by its dimensions has all of them")
    known = known_models()
    family = fields.get("family") or (known[name].family if name in known else Family.LLAMA)
    if family is Family.LLAMA and "ffn_hidden" not in fields:
        raise InputError(f"{where}: missing column ffn_hidden, which a llama has no usual proportion of")
    layers, hidden, heads = (int(fields.pop(field)) for field in ("num_layers", "hidden", "num_heads"))
    name = name or "unnamed"
    if family is Family.GPT:
        return _changed(gpt(name, layers, hidden, heads), fields)
    return _changed(llama(name, layers, hidden, heads, int(fields["ffn_hidden"])), fields)


def _changed(spec: ModelSpec, fields: Mapping[str, int | Family]) -> ModelSpec:
    changes: dict[str, object] = {**fields}
    if "tied_embeddings" in fields:
        changes["tied_embeddings"] = bool(fields["tied_embeddings"])
    return dataclasses.replace(spec, **changes) if changes else spec  # type: ignore[arg-type]


def _dimension(row: Row, column: str, position: int) -> int | Family:
    if column == "family":
        return _word(row, column, position, Family, sorted(TEXT_FAMILIES))
    return int(_flag(row, column, position)) if column == "tied_embeddings" else integer(row, column, position)


def layout_of(row: Row, position: int) -> Layout:
    """Return the layout of a row: an id such as `dp2.tp2` in the column layout, or one column per degree.

    Omitted degrees are one. The default schedule is 1F1B, and sequence parallelism is on with tensor parallelism.
    Raises `InputError` with the row and the column for anything impossible.
    """
    where = f"row {position + 2}"
    given = [column for column in DEGREES if cell(row, column)]
    try:
        if name := cell(row, "layout"):
            if given:
                raise LayoutError(f"{given[0]} is also part of the layout {name[:80]!r}; leave one empty")
            return parse_layout(name)
        return Layout(**{DEGREES[column]: _degree(row, column, position) for column in given} | _usual(row, given))  # type: ignore[arg-type]
    except LayoutError as error:
        raise InputError(f"{where}: {error}") from error


def _usual(row: Row, given: Sequence[str]) -> dict[str, object]:
    usual: dict[str, object] = {}
    if "schedule" not in given:
        interleaved = cell(row, "virtual_stages") not in ("", "1")
        usual["schedule"] = Schedule.INTERLEAVED if interleaved else Schedule.ONE_F_ONE_B
    if "sequence_parallel" not in given:
        usual["sequence_parallel"] = cell(row, "tp") not in ("", "1")
    return usual


def _degree(row: Row, column: str, position: int) -> object:
    if column == "sequence_parallel":
        return _flag(row, column, position)
    words = {"schedule": Schedule, "recompute": Recompute, "offload": Offload}
    if column in words:
        return _word(row, column, position, words[column])
    return integer(row, column, position)


def integer(row: Row, column: str, position: int, usual: int | None = None, least: int = 1) -> int:
    """Parse a whole number of at least `least`, or from 0 to 3 for `zero_stage`. Returns `usual` for an empty cell."""
    text = cell(row, column)
    if not text and usual is not None:
        return usual
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    least = 0 if column == "zero_stage" else least
    if not (least <= value < float("inf")) or value != int(value):
        raise InputError(f"row {position + 2}: {column} is {text[:40]!r}, expected a whole number of at least {least}")
    if column == "zero_stage" and value > 3:
        raise InputError(f"row {position + 2}: zero_stage is {text[:40]}, expected 0, 1, 2 or 3")
    if value > (most := MOST_GPUS if column in (*AXES, "gpus") else _LARGEST):
        raise InputError(f"row {position + 2}: {column} is {text[:40]}, more than {most}: is its unit right?")
    return int(value)


def _flag(row: Row, column: str, position: int) -> bool:
    text = cell(row, column).lower()
    if text not in ("0", "1", "false", "true", "0.0", "1.0"):
        raise InputError(f"row {position + 2}: {column} is {text[:40]}, expected 0 or 1")
    return text in ("1", "true", "1.0")


def _word(row: Row, column: str, position: int, words: type[_Word], known: Sequence[str] = ()) -> _Word:
    text = cell(row, column).lower()
    if text not in (known or tuple(words)):
        expected = ", ".join(known or words)
        raise InputError(f"row {position + 2}: {column} is {text[:40]!r}, expected one of {expected}")
    return words(text)
