"""The frameworks behind Meshmark's interface: one file or folder each, the only place that imports it.

The registry maps a name to "module:Class", resolved when needed; importing this package imports no framework.
"""

ADAPTERS: dict[str, str] = {
    "single": "adapters.single:Single",
    "ddp": "adapters.ddp:DDP",
    "fsdp2": "adapters.fsdp2:FSDP2",
    "deepspeed": "adapters.deepspeed:DeepSpeed",
    "megatron": "adapters.megatron:Megatron",
    "gpipe": "adapters.gpipe:GPipe",
    "accelerate": "adapters.accelerate:Accelerate",
    "accelerate-fsdp2": "adapters.accelerate:AccelerateFSDP2",
    "accelerate-deepspeed": "adapters.accelerate:AccelerateDeepSpeed",
    "fairscale-oss": "adapters.fairscale:FairScaleOSS",
    "fairscale-fsdp": "adapters.fairscale:FairScaleFSDP",
}
