"""Read and write GPU files (TOML): the figures of a datasheet in the datasheet's units."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import InputError, UnknownNameError, refuse_device
from meshmark.plan.rates import Rates
from meshmark.spec.hardware import GIB, GIGA, TERA, Gpu, Host, gpu

_UNITS: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "memory_gb_per_s": ("memory_bandwidth", GIGA),
    "link_gb_per_s": ("link_bandwidth", GIGA),
    "network_gb_per_s": ("network_bandwidth", GIGA),
}
_HOST_UNITS: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "gb_per_s": ("bandwidth", GIGA),
    "nvme_tb": ("nvme_bytes", TERA),
    "nvme_gb_per_s": ("nvme_bandwidth", GIGA),
}
"""Key in the file, field, and the key's unit in SI units."""
_REMARKS = {
    "memory_gib": "that a program can allocate",
    "link_gb_per_s": "one direction, to the GPUs of its node together",
    "network_gb_per_s": "one direction, its share of the node's adapters: 400 Gb/s are 50",
    "gb_per_s": "one direction, from host memory to one GPU while all are served",
    "nvme_tb": "of one node's drives",
    "nvme_gb_per_s": "of one node's drives together",
}
_MATMUL_REMARK = "of the 16-bit peak, what the best shapes of products reach (MAMF); leave it out where not known"
_SHARES = {
    "matmul_share": _MATMUL_REMARK,
    "fp8_share": "the same, of the fp8 peak",
    "attention_share": "of the 16-bit peak, what attention of 8,192 tokens reaches, forward and backward",
    "memory_share": "of memory's bandwidth, what norms reach, forward and backward",
    "fp4_gain": "how many times as fast as in 16 bits products in 4 bits are",
}
_SHIPPED = ("h100", "a100", "cpu")


@dataclass(frozen=True, kw_only=True)
class WrittenGpu:
    """The content of a GPU file."""

    gpu: Gpu
    rates: str | None
    """The GPU whose measured shares of its datasheet this one is assumed to reach. None if the file names none."""


def named_gpu(name: str) -> Gpu:
    """Return the GPU called `name`. Raises `InputError` with near names, and with how to plan for any other."""
    try:
        return gpu(name)
    except UnknownNameError as error:
        raise InputError(
            f"{error}; --gpu FILE.toml takes any other, and `meshmark plan --gpu-template` prints such a file"
        ) from error


def gpu_template(there: Gpu, using: Rates) -> str:
    """Return a GPU file that describes `there`, as a template to edit."""
    nearest = next((name for name in _SHIPPED if using.name == name or using.name.startswith(f"{name}-")), _SHIPPED[0])
    lines = [
        "# A GPU for `meshmark plan --gpu FILE.toml`, from its datasheet: dense peaks, bandwidths in one direction.",
        f"name = {json.dumps(there.name)}",
        f"source = {json.dumps(there.source)}",
        *_lines(there, _UNITS),
        f"gpus_per_node = {there.gpus_per_node}",
        *(f"{name} = {share}  # {remark}" for name, remark in _SHARES.items() if (share := getattr(there, name))),
        f'rates = "{nearest}"  # whose measured shares of its datasheet are assumed: {", ".join(_SHIPPED)}',
        "",
        "[tflops]",
        *(f"{dtype} = {flops / TERA:.6g}" for dtype, flops in there.peak_flops.items()),
    ]
    if there.host:
        lines += ["", "[host]  # of one node, for --offload; leave it out where it is not known"]
        lines += [f"source = {json.dumps(there.host.source)}", *_lines(there.host, _HOST_UNITS)]
    return "\n".join(lines) + "\n"


def _lines(value: Gpu | Host, units: Mapping[str, tuple[str, float]]) -> list[str]:
    found = []
    for key, (field, unit) in units.items():
        remark = f"  # {_REMARKS[key]}" if key in _REMARKS else ""
        found.append(f"{key} = {getattr(value, field) / unit:.6g}{remark}")
    return found


def read_gpu(path: Path) -> WrittenGpu:
    """Read a GPU file. Raises `InputError` with the key for anything missing, unknown or impossible."""
    refuse_device(path)
    try:
        said = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}; `meshmark plan --gpu-template` prints such a file") from error
    host, own = said.pop("host", None), said.pop("rates", None)
    shares = {name: value for name in _SHARES if (value := said.pop(name, None)) is not None}
    if own is not None and own not in _SHIPPED:
        raise InputError(f"{path}: rates is {str(own)[:40]!r}, expected one of {', '.join(_SHIPPED)}")
    peaks = _table(path, said.pop("tflops", None), "tflops")
    flops = {key: TERA * _number(path, f"tflops.{key}", value) for key, value in peaks.items()}
    fields = _fields(path, said, _UNITS, ("name", "source", "gpus_per_node"))
    if host is not None:
        table = _table(path, host, "host")
        fields["host"] = Host(**_fields(path, table, _HOST_UNITS, ("source",), "host."))  # type: ignore[arg-type]
    fields |= {name: _number(path, name, value) for name, value in shares.items()}
    there = Gpu(peak_flops=flops, **fields)  # type: ignore[arg-type]
    return WrittenGpu(gpu=there, rates=own)


def _fields(
    path: Path, said: dict[str, object], units: Mapping[str, tuple[str, float]], plain: tuple[str, ...], where: str = ""
) -> dict[str, object]:
    expected = {*units, *plain}
    if wrong := sorted(said.keys() ^ expected):
        what = "is not known" if wrong[0] in said else "is missing"
        raise InputError(f"{path}: {where}{wrong[0][:40]} {what}; `meshmark plan --gpu-template` prints all keys")
    found: dict[str, object] = {}
    for key in plain:
        kind = int if key == "gpus_per_node" else str
        if not isinstance(said[key], kind) or isinstance(said[key], bool):
            wants = "a whole number" if kind is int else "text"
            raise InputError(f"{path}: {where}{key} is {str(said[key])[:40]!r}, expected {wants}")
        found[key] = said[key]
    for key, (field, unit) in units.items():
        found[field] = unit * _number(path, where + key, said[key])
    return found


def _table(path: Path, value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        raise InputError(f"{path}: a table [{name}] is missing or empty; `meshmark plan --gpu-template` prints one")
    return value


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{path}: {key[:40]} is {str(value)[:40]!r}, expected a number")
    return float(value)
