"""Frameworks in the planner: the recipe that each trains with, and the layouts that it supports."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshmark.errors import InputError, UnknownNameError
from meshmark.models.transformer import Family
from meshmark.plan.stacks import is_modern
from meshmark.spec.hardware import Gpu
from meshmark.spec.layout import AXES, Axis, Layout, Recompute
from meshmark.theory.recipe import NARROW, RECIPES, TrainingRecipe, narrowed


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of a framework besides the layout."""

    experts: int = 1
    """Ranks that a layer's experts are divided over."""
    recompute_layers: bool = False
    """A number of layers for full recomputation."""
    recompute_modules: bool = False
    """Modules for selective recomputation."""
    offload_layers: bool = False
    """Activations in host memory."""
    lora: bool = False
    quantized: bool = False
    """Frozen weights in 4 bits, beside LoRA's adapters."""
    precision: str = ""
    """Products narrower than 16 bits, one of `NARROW`, or an empty string."""


_ALL_NARROW = tuple(NARROW)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Properties of a framework that a search uses."""

    name: str
    recipe: str
    older: str | None = None
    """Recipe of the generation that trained GPTs on GPUs before Hopper, if it differs."""
    axes: tuple[Axis, ...]
    """Axes along which degrees above one are supported."""
    zero_stages: tuple[int, ...]
    experts: bool = True
    """Whether it has expert parallelism."""
    counts_recomputed: bool = False
    """Whether it recomputes some layers alone, by Megatron's methods uniform and block."""
    is_megatron_core: bool = False
    """Whether it has Megatron-Core's recomputation of modules, offloaded activations, and Megatron-Bridge's LoRA."""
    wraps_modules: bool = False
    """Whether it trains any module as it is, such as PEFT's with LoRA, also beside bitsandbytes' quantized weights, and
    Transformer Engine's or torchao's with narrow products."""
    names_saved: bool = False
    """Whether it keeps tensors by name, which leaves modules to be repeated (MaxText's and Pax's policies)."""
    tpu: bool = False
    """Whether it trains on TPUs."""
    narrow: tuple[str, ...] = ()
    """Precisions narrower than 16 bits in which it trains."""
    interleaves: bool = True
    """Whether its pipelines have several chunks of layers a stage."""
    adapter: str | None = None
    """Meshmark's adapter for it. None if there is none, so that nothing can be run."""

    def recipe_on(self, there: Gpu | None, family: Family) -> TrainingRecipe:
        """Return the recipe for a family's models on a GPU. Without a GPU, it is today's generation.

        Models with rotary positions and a gate are newer than the frameworks that trained the papers' GPTs. Raises
        `InputError` for a TPU if the framework does not train on TPUs.
        """
        if there is not None and there.is_tpu and not self.tpu:
            able = ", ".join(each.name for each in FRAMEWORKS.values() if each.tpu)
            raise InputError(f"framework {self.name} does not train on {there.name}: name one of {able}")
        older = there is not None and not is_modern(there) and family is Family.GPT
        return RECIPES[self.older if self.older and older else self.recipe]

    def describe(self, using: TrainingRecipe) -> str:
        """Describe in one line: bytes per parameter before sharding, and what is searched."""
        stages = ", ".join(map(str, self.zero_stages))
        return f"recipe {using.name}, {using.states.total:g} bytes a parameter; {', '.join(self.axes)}; ZeRO {stages}"

    def beyond(self, layout: Layout, asked: Asked = Asked()) -> str | None:  # noqa: B008
        """Return which parts of a layout, and of what is asked beside it, the framework is not known to support, in
        words, or None if it supports all.
        """
        missing = [f"{axis} above 1" for axis in AXES if getattr(layout, axis) > 1 and axis not in self.axes]
        # Of one data-parallel rank nothing is shared out, whatever the stage.
        if layout.zero_stage not in self.zero_stages and layout.dp * layout.cp > 1:
            missing.append(f"ZeRO stage {layout.zero_stage}")
        if layout.virtual_stages > 1 and not self.interleaves:
            missing.append("virtual_stages above 1")
        if asked.experts > 1 and not self.experts:
            missing.append("ep above 1")
        if asked.precision and asked.precision not in self.narrow:
            missing.append(f"products in {asked.precision}")
        if asked.recompute_layers and not self.counts_recomputed:
            missing.append("recompute_num_layers")
        if asked.recompute_modules and not (self.is_megatron_core or self.names_saved):
            missing.append("recompute_modules")
        if asked.offload_layers and not self.is_megatron_core:
            missing.append("offload_layers")
        if asked.lora and not (self.is_megatron_core or self.wraps_modules):
            missing.append("LoRA")
        if asked.quantized and not self.wraps_modules:
            missing.append("quantized frozen weights")
        # TransformerConfig's own checks of `cpu_offloading`.
        if asked.offload_layers and self.is_megatron_core:
            if layout.pp > 1:
                missing.append("offload_layers in a pipeline")
            if layout.recompute is not Recompute.NONE:
                missing.append("offload_layers beside recomputation")
        if not missing:
            return None
        has = f"{', '.join(self.axes)} and ZeRO {', '.join(map(str, self.zero_stages))}"
        return f"framework {self.name}, which has {has}, does not train with {' and '.join(missing)}"


FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        # FP8 and interleaved 1F1B are on its roadmap (README.md of github:huggingface/nanotron).
        Framework(name="nanotron", recipe="nanotron", axes=("dp", "tp", "pp"), zero_stages=(0, 1), interleaves=False),
        Framework(
            name="megatron",
            recipe="megatron-core",
            older="megatron",
            axes=("dp", "tp", "pp", "cp"),
            zero_stages=(0, 1),
            counts_recomputed=True,
            is_megatron_core=True,
            narrow=_ALL_NARROW,
            adapter="megatron",
        ),
        *(
            Framework(
                name=name,
                recipe="megatron-core",
                axes=("dp", "tp", "pp", "cp"),
                zero_stages=(0, 1),
                counts_recomputed=True,
                is_megatron_core=True,
                narrow=_ALL_NARROW,
                adapter="megatron",
            )
            for name in ("megatron-core", "nemo")
        ),
        Framework(
            name="megatron-fsdp",
            recipe="megatron-core",
            axes=("dp", "tp", "cp"),
            zero_stages=(3,),
            counts_recomputed=True,
            is_megatron_core=True,
            narrow=_ALL_NARROW,
        ),
        Framework(
            name="megatron-2021",
            recipe="megatron",
            axes=("dp", "tp", "pp"),
            zero_stages=(0, 1),
            experts=False,
            counts_recomputed=True,
        ),
        # DeepSpeed's pipelines run 1F1B alone (`TrainSchedule`).
        Framework(
            name="megatron-deepspeed",
            recipe="megatron-deepspeed",
            axes=("dp", "tp", "pp"),
            zero_stages=(0, 1),
            interleaves=False,
        ),
        Framework(
            name="deepspeed",
            recipe="deepspeed-bf16",
            older="zero",
            axes=("dp",),
            zero_stages=(0, 1, 2, 3),
            wraps_modules=True,
            narrow=_ALL_NARROW,
            adapter="deepspeed",
        ),
        # `use_fp8` of its plugins.
        Framework(
            name="colossalai",
            recipe="deepspeed-bf16",
            axes=("dp", "tp", "pp"),
            zero_stages=(0, 1, 2, 3),
            narrow=("fp8",),
        ),
        Framework(name="internevo", recipe="internevo", axes=("dp", "tp", "pp"), zero_stages=(0, 1)),
        # `quantization=fp8` and `te_mxfp8` of its base.yml.
        Framework(
            name="maxtext",
            recipe="xla",
            axes=("dp", "tp", "pp", "cp"),
            zero_stages=(0, 3),
            names_saved=True,
            narrow=("fp8", "mxfp8"),
            tpu=True,
        ),
        Framework(
            name="pax",
            recipe="xla",
            axes=("dp", "tp", "pp"),
            zero_stages=(0, 3),
            names_saved=True,
            narrow=("fp8",),
            tpu=True,
        ),
        *(
            Framework(
                name=name,
                recipe=using,
                axes=("dp",),
                zero_stages=(stage,),
                experts=False,
                wraps_modules=True,
                narrow=_ALL_NARROW,
                adapter=None if name == "fsdp1" else name,
            )
            for name, using, stage in (("ddp", "ddp", 0), ("fsdp2", "fsdp2-foreach", 3), ("fsdp1", "fsdp1-bf16", 3))
        ),
        Framework(name="llama3", recipe="llama3", axes=("dp", "tp", "pp", "cp"), zero_stages=(2,)),
        # torchtitan/components/quantization has float8, MXFP8 and NVFP4.
        Framework(
            name="torchtitan",
            recipe="fsdp2",
            axes=("dp", "tp", "pp", "cp"),
            zero_stages=(0, 3),
            narrow=_ALL_NARROW,
        ),
        # Its `amp_fp8`.
        Framework(name="composer", recipe="fsdp-fused-loss", axes=("dp",), zero_stages=(3,), narrow=("fp8",)),
    )
}


def framework(name: str) -> Framework:
    """Return the framework called `name`. Raises `UnknownNameError` if the planner does not know it."""
    if name not in FRAMEWORKS:
        raise UnknownNameError("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]


def default_framework(there: Gpu | None = None) -> Framework:
    """Return the framework whose recipe and rates are used if none is named."""
    return framework("maxtext" if there is not None and there.is_tpu else "megatron-core")


def recipe_of(name: str, there: Gpu | None = None, family: Family = Family.GPT) -> TrainingRecipe:
    """Return the recipe of the framework called `name` on a GPU."""
    return framework(name).recipe_on(there, family)


def narrowed_on(there: Gpu, using: TrainingRecipe, precision: str) -> TrainingRecipe:
    """Return the recipe with products in `precision`, one of `NARROW`, on a GPU.

    Weights that are sharded for products in 4 bits are gathered as in 16: `bf16_with_nvfp4_mixed` of Megatron-Bridge
    turns `fp8_param_gather` off. Raises `InputError` if the GPU has no such products. Scales by block (MX) came with
    fp4: a GPU of 8 bits without it, such as H100, has fp8 alone.
    """
    there.peak(NARROW[precision].arithmetic)
    if precision == "mxfp8" and "fp4" not in there.peak_flops:
        raise InputError(
            f"{there.name} computes in {', '.join(there.peak_flops)}, not in mxfp8, whose block scales came with fp4: "
            "name --precision fp8, or a GPU that has it, such as b200"
        )
    if precision == "nvfp4" and there.is_amd:
        raise InputError(f"{there.name} has no products in nvfp4, which is NVIDIA's: name fp8 or mxfp8")
    found = narrowed(using, precision)
    return replace(found, wire=using.wire) if precision == "nvfp4" else found
