"""Hardware data from datasheets, in SI units: FLOP/s, bytes, bytes per second."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshmark.errors import InputError, UnknownNameError

MOST_GPUS = 2**20
"""Largest number of GPUs to plan for. No cluster has more, and a search still takes seconds."""
_LARGEST = 1e30
"""Upper bound for bytes, or bytes per second. Beyond it, sums and products overflow."""
TERA = 10**12
GIGA = 10**9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host resources of a node, for offloading. Raises `InputError` when memory or its bandwidth is not positive."""

    memory_bytes: float
    """Host memory of one node, in bytes."""
    bandwidth: float
    """Bandwidth in one direction between host memory and one GPU while all GPUs are served, in bytes per second."""
    nvme_bytes: float
    """Total capacity of one node's NVMe drives, in bytes. 0 if unknown, like their bandwidth."""
    nvme_bandwidth: float
    """Bandwidth of one node's drives together, alternating reads and writes, in bytes per second."""
    source: str

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth", "nvme_bytes", "nvme_bandwidth"):
            got, unknown = getattr(self, field), field.startswith("nvme")
            if not (0 < got < _LARGEST or (unknown and got == 0)):
                least = "0 (unknown) or more" if unknown else "more than 0"
                raise InputError(f"host of {self.source!r}: {field} is {got}, expected {least}, in SI units")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator. Raises `InputError` when a size is not positive."""

    name: str
    peak_flops: dict[str, float]
    """Dense FLOP/s by arithmetic ("bf16", "fp32", ...)."""
    memory_bytes: float
    """Memory that a program can allocate, in bytes: the marketed size minus what the driver keeps."""
    memory_bandwidth: float
    """Memory bandwidth in bytes per second."""
    link_bandwidth: float
    """Bandwidth in one direction from a GPU to the other GPUs of its node, in bytes per second."""
    network_bandwidth: float
    """Bandwidth in one direction from a GPU to other nodes (its share of the node's adapters), in bytes per second."""
    gpus_per_node: int
    source: str
    host: Host | None = None
    """Host resources, or None if unknown; nothing can be offloaded then."""
    matmul_share: float | None = None
    """Best share of the 16-bit peak that matrix products of many shapes reach. None if unknown."""
    fp8_share: float | None = None
    """The same of the 8-bit peak."""
    attention_share: float | None = None
    """Share of the 16-bit peak that attention of 8,192 tokens reaches, forward and backward. None if unknown."""
    memory_share: float | None = None
    """Share of the memory bandwidth that norms reach, forward and backward. None if unknown."""
    fp4_gain: float | None = None
    """How many times as fast as in 16 bits a layer's matrix products are in 4 bits. None if unknown."""

    @property
    def is_tpu(self) -> bool:
        """True for Google's TPUs, on which only frameworks over XLA train."""
        return self.name.startswith("tpu")

    @property
    def is_amd(self) -> bool:
        """True for AMD's Instinct GPUs, whose formats of 4 bits are not NVIDIA's."""
        return self.name.startswith("mi")

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
            if not 0 < (got := getattr(self, field)) < _LARGEST:
                raise InputError(f"gpu {self.name!r}: {field} is {_short(got)}, expected more than 0, in SI units")
        if not isinstance(self.gpus_per_node, int) or not 0 < self.gpus_per_node <= MOST_GPUS:
            raise InputError(
                f"gpu {self.name!r}: gpus_per_node is {_short(self.gpus_per_node)}, expected a whole number from 1 to "
                f"{MOST_GPUS}"
            )
        for field in ("matmul_share", "fp8_share", "attention_share", "memory_share"):
            if (share := getattr(self, field)) is not None and not 0.0 < share <= 1.0:
                raise InputError(f"gpu {self.name!r}: {field} is {share}, expected a share of the peak")
        if self.fp4_gain is not None and not 1.0 <= self.fp4_gain <= 16.0:
            raise InputError(f"gpu {self.name!r}: fp4_gain is {self.fp4_gain}, expected 1 to 16 times as fast")
        for dtype, flops in self.peak_flops.items():
            if not 10**8 < flops < 10**17:
                raise InputError(
                    f"gpu {self.name!r}: {flops:g} FLOP/s in {dtype} is no accelerator's peak; "
                    "give it in FLOP/s, not in TFLOP/s"
                )
        if self.memory_bytes < 2**28:
            raise InputError(f"gpu {self.name!r}: {self.memory_bytes:g} bytes of memory; give it in bytes, not GB")

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s in `peak_dtype(dtype)`. Raises `InputError` as that does."""
        return self.peak_flops[self.peak_dtype(dtype)]

    def peak_dtype(self, dtype: str) -> str:
        """Return `dtype`, or the other 16-bit format if the GPU has only that one.

        Raises `InputError` when the GPU has no such arithmetic.
        """
        used = dtype if dtype in self.peak_flops else {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
        if used not in self.peak_flops:
            raise InputError(
                f"{self.name} computes in {', '.join(self.peak_flops)}, not in {dtype}: "
                "name another precision, or a GPU that has it"
            )
        return used


def _short(number: float) -> str:
    """Return `number` as text of bounded length. Users may pass numbers with hundreds of digits."""
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


def _gpu(
    name: str, tflops: dict[str, float], gigabytes: float, hbm: float, link: float, network: float, per_node: int,
    source: str, host: Host | None = None,
) -> Gpu:  # fmt: skip
    """Return a GPU from datasheet figures in TFLOP/s, GB (of 2^30, as HBM is sold) and GB/s."""
    return Gpu(
        name=name, peak_flops={k: v * TERA for k, v in tflops.items()}, memory_bytes=gigabytes * GIB,
        memory_bandwidth=hbm * GIGA, link_bandwidth=link * GIGA, network_bandwidth=network * GIGA,
        gpus_per_node=per_node, source=source, host=host,
    )  # fmt: skip


_AMPERE = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_HOPPER = {"fp32": 67.0, "tf32": 494.5, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
# Dense peaks: half of the datasheets' figures, which assume sparsity.
_BLACKWELL = {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0}
_GRACE_BLACKWELL = {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0}

# One of its drives, a Samsung PM1733 of 3.84 TB, reads 7.0 and writes 3.8 GB/s (datasheet): 4.93 when alternating.
_DGX_H100 = Host(memory_bytes=2048 * GIB, bandwidth=64 * GIGA, nvme_bytes=30.7 * TERA, nvme_bandwidth=39.4 * GIGA,
                 source="NVIDIA DGX H100 datasheet: 2 TB, PCIe 5 x16, 8 x 3.84 TB NVMe")  # fmt: skip
_DGX_A100 = Host(memory_bytes=2048 * GIB, bandwidth=32 * GIGA, nvme_bytes=30.7 * TERA, nvme_bandwidth=39.4 * GIGA,
                 source="NVIDIA DGX A100 640GB datasheet: 2 TB, PCIe 4 x16, 8 x 3.84 TB NVMe")  # fmt: skip
_DGX_A100_40 = Host(memory_bytes=1024 * GIB, bandwidth=32 * GIGA, nvme_bytes=15.4 * TERA, nvme_bandwidth=19.7 * GIGA,
                    source="NVIDIA DGX A100 320GB datasheet: 1 TB, PCIe 4 x16, 4 x 3.84 TB NVMe")  # fmt: skip
_DGX_2 = Host(memory_bytes=1536 * GIB, bandwidth=3 * GIGA, nvme_bytes=28 * TERA, nvme_bandwidth=16 * 1.6 * GIGA,
              source="arXiv:2104.07857 fig. 2b: 1.5 and 28 TB; 3.0 and 1.6 GB/s a GPU with all 16 reading")  # fmt: skip
_DGX_H200 = replace(_DGX_H100, source="NVIDIA DGX H200 datasheet: 2 TB, PCIe 5 x16, 8 x 3.84 TB NVMe")
_DGX_B200 = replace(_DGX_H100, source="NVIDIA DGX B200 datasheet: 2 TB, PCIe 5 x16, 8 x 3.84 TB NVMe")
# NVLink-C2C moves 450 GB/s in one direction between a Grace CPU, with its 480 GB, and the two GPUs beside it.
_NVL72 = Host(memory_bytes=36 * 447 * GIB, bandwidth=225 * GIGA, nvme_bytes=0, nvme_bandwidth=0,
              source="NVIDIA GB200 and GB300 NVL72 datasheets: 36 Grace CPUs, 17 TB, 900 GB/s")  # fmt: skip

# One program measured all of them (github:stas00/ml-engineering compute/accelerator/README.md, MAMF table, Aug. 2026).
# It does not list GB300, which has the chip of B300 and its share.
_MATMUL_SHARES = {
    "h100": 0.803, "h800": 0.803, "h200": 0.803, "b200": 0.776, "b300": 0.786, "gb200-nvl72": 0.729,
    "gb300-nvl72": 0.786, "a100-80": 0.869, "a100-40": 0.869, "a800-80": 0.869, "mi300x": 0.514, "mi325x": 0.604,
    "mi355x": 0.680,
}  # fmt: skip
# The same table, float8_e4m3fn. (H200's is its own: it has the H100's chip, and more of its power for it.)
_FP8_SHARES = {
    "h100": 0.709, "h800": 0.709, "h200": 0.734, "b200": 0.763, "b300": 0.745, "gb200-nvl72": 0.723,
    "gb300-nvl72": 0.745,
}  # fmt: skip
# One program again, cuDNN 9.19 on H200, GB200 and GB300 in one week (github:NVIDIA/cudnn-frontend df73764, benchmark/):
# causal attention in bf16 of 64 heads of 128 and 8,192 tokens, 3.5 passes over a forward and 2.5 over a backward one
# (sdpa_benchmark_training/results), and RMS norms of the eight dense and sparse models wider than 4,096 in it
# (norms/results), 2 and 3 passes over 2 bytes a value. The H100 has the chip of H200, B200 that of GB200.
_ATTENTION_SHARES = {
    **dict.fromkeys(("h100", "h800", "h200"), 0.573), **dict.fromkeys(("b200", "gb200-nvl72"), 0.553),
    **dict.fromkeys(("b300", "gb300-nvl72"), 0.600),
}  # fmt: skip
_MEMORY_SHARES = {
    **dict.fromkeys(("h100", "h800", "h200"), 0.748), **dict.fromkeys(("b200", "gb200-nvl72"), 0.684),
    **dict.fromkeys(("b300", "gb300-nvl72"), 0.693),
}  # fmt: skip

# Kernels alone, of inputs that are in NVFP4 already. B300: Transformer Engine's benchmark of the 12 products of a layer
# 4,096 wide on 15,872 tokens took 13.102 ms in bf16 and 3.764 in NVFP4 (github:NVIDIA/TransformerEngine 8f2e635
# docs/examples/gemm_profiling/gemm_profiling.rst). B200: torchao's of 8,192 x 8,192 x 8,192 reached 1.42 and 5.37
# PFLOP/s (github:pytorch/ao/pull/2427).
_FP4_GAINS = {**dict.fromkeys(("b300", "gb300-nvl72"), 3.48), **dict.fromkeys(("b200", "gb200-nvl72"), 3.78)}

GPUS: dict[str, Gpu] = {
    gpu.name: replace(
        gpu,
        matmul_share=_MATMUL_SHARES.get(gpu.name),
        fp8_share=_FP8_SHARES.get(gpu.name),
        attention_share=_ATTENTION_SHARES.get(gpu.name),
        memory_share=_MEMORY_SHARES.get(gpu.name),
        fp4_gain=_FP4_GAINS.get(gpu.name),
    )
    for gpu in (
        _gpu("h100", _HOPPER, 79.1, 3352, 450, 50, 8, "NVIDIA H100 SXM5 datasheet; 8 x 400 Gb/s per node",
             _DGX_H100),
        _gpu("h100-96", _HOPPER, 94.5, 2400, 450, 50, 8, "torchtitan llama3_h100_202412: HBM2e, 500 W cap, 400 Gb/s",
             _DGX_H100),
        _gpu("h200", _HOPPER, 139.8, 4800, 450, 50, 8, "NVIDIA H200 SXM datasheet; 8 x 400 Gb/s per node",
             _DGX_H200),
        _gpu("h800", _HOPPER, 79.1, 3352, 200, 50, 8, "an H100 SXM5 with NVLink of 400 GB/s in both directions"),
        _gpu("b200", _BLACKWELL, 178.3, 7700, 900, 50, 8, "NVIDIA HGX B200 datasheet; 8 x 400 Gb/s per node",
             _DGX_B200),
        _gpu("b300", {**_BLACKWELL, "fp4": 13500.0}, 267.5, 7700, 900, 100, 8,
             "NVIDIA HGX B300 datasheet, 270 GB; 8 x 800 Gb/s per node (ConnectX-8)"),
        _gpu("gb200-nvl72", _GRACE_BLACKWELL, 184.3, 8000, 900, 50, 72,
             "NVIDIA GB200 NVL72 datasheet: 13.4 TB, 576 and 130 TB/s over 72 GPUs; 400 Gb/s each",
             _NVL72),
        _gpu("gb300-nvl72", {**_GRACE_BLACKWELL, "fp4": 15000.0}, 267.5, 8000, 900, 100, 72,
             "NVIDIA GB300 NVL72 datasheet: 130 TB/s over 72 GPUs; 800 Gb/s each (ConnectX-8)",
             _NVL72),
        _gpu("l40s", {"fp32": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0}, 44.5, 864, 32, 25, 8,
             "NVIDIA L40S datasheet; PCIe 4 x16 without NVLink; 200 Gb/s a GPU"),
        _gpu("mi300x", {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}, 191.5, 5300, 448,
             50, 8, "AMD Instinct MI300X data sheet: 7 x 128 GB/s in both directions; 8 x 400 Gb/s per node"),
        _gpu("mi325x", {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}, 255.5, 6000, 448,
             50, 8, "AMD Instinct MI325X data sheet: 7 x 128 GB/s in both directions; 8 x 400 Gb/s per node"),
        _gpu("mi355x", {"fp32": 157.3, "fp16": 2516.6, "bf16": 2516.6, "fp8": 5033.2, "fp4": 10066.4}, 287.5, 8000, 537,
             50, 8, "AMD Instinct MI355X data sheet: 7 x 153.6 GB/s in both directions; 8 x 400 Gb/s per node"),
        _gpu("a100-80", _AMPERE, 79.1, 2039, 300, 25, 8, "NVIDIA A100 80GB SXM datasheet; 8 x 200 Gb/s per node",
             _DGX_A100),
        _gpu("a100-40", _AMPERE, 39.4, 1555, 300, 25, 8, "NVIDIA A100 40GB SXM datasheet; 8 x 200 Gb/s per node",
             _DGX_A100_40),
        _gpu("a800-80", _AMPERE, 79.1, 2039, 200, 25, 8, "an A100 80GB SXM with NVLink of 400 GB/s in both directions"),
        _gpu("v100-32", {"fp32": 15.7, "fp16": 125.0}, 31.7, 900, 150, 6.25, 16,
             "NVIDIA V100-SXM3 datasheet; DGX-2H: 16 GPUs, 8 x 100 Gb/s (arXiv:1909.08053 sec. 5)", _DGX_2),
        _gpu("p100", {"fp32": 10.6, "fp16": 21.2}, 15.9, 732, 16, 1.25, 8,
             "NVIDIA P100 datasheet; PCIe 3 x16 without NVLink (arXiv:1811.06965 table 3)"),
        _gpu("tpu-v3", {"fp32": 3.8, "bf16": 61.5}, 16.0, 450, 70, 70, 2048,
             "Jouppi et al., CACM 63(7) 2020: a core is half of a chip's 123 TFLOP/s, 32 GiB and 900 GB/s"),
        _gpu("tpu-v4", {"bf16": 275.0}, 32.0, 1228, 300, 300, 4096, "Google Cloud TPU v4: 2,400 Gb/s between chips"),
        _gpu("tpu-v5e", {"bf16": 197.0}, 16.0, 819, 200, 200, 256, "Google Cloud TPU v5e: 1,600 Gb/s between chips"),
        _gpu("tpu-v5p", {"bf16": 459.0}, 95.0, 2765, 600, 600, 8960, "Google Cloud TPU v5p: 4,800 Gb/s between chips"),
        _gpu("cpu", {"fp32": 0.1, "bf16": 0.05}, 8.0, 20, 5, 1.25, 2, "a laptop's two cores; see meshmark calibrate"),
    )
}  # fmt: skip

_ALIASES = {
    "h100-80gb": "h100", "h100-80": "h100", "h100-sxm": "h100", "h800-80": "h800", "h200-141gb": "h200",
    "b200-180gb": "b200", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "mi300": "mi300x", "mi325": "mi325x",
    "mi355": "mi355x", "a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "a800": "a800-80",
    "v100": "v100-32", "v100-32gb": "v100-32", "tpuv3": "tpu-v3", "tpuv4": "tpu-v4", "tpuv5e": "tpu-v5e",
    "tpuv5p": "tpu-v5p",
}  # fmt: skip


def gpu(name: str) -> Gpu:
    """Return the GPU called `name`, ignoring case, or by a common alias.

    Raises `UnknownNameError` with near matches when there is none.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key not in GPUS:
        raise UnknownNameError("gpu", name, [*GPUS, *_ALIASES])
    return GPUS[key]


_DEVICE_NAMES = {
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200-nvl72",
    "AMD Instinct MI300X": "mi300x",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "Tesla V100-SXM3-32GB": "v100-32",
    "Tesla V100-SXM2-32GB": "v100-32",
    "Tesla P100-PCIE-16GB": "p100",
}
"""GPU names by the driver's device name. Other variants (PCIe, NVL, MIG slices) have other names and peaks."""


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the known GPU with exactly this driver name, or None."""
    key = _DEVICE_NAMES.get(device_name.strip())
    return GPUS[key] if key else None
