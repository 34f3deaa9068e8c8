"""The frameworks behind Meshmark's interface: one file or folder each, the only place that imports it.

The registry maps a name to "module:Class", resolved when needed; importing this package imports no framework.
"""

ADAPTERS: dict[str, str] = {
    "single": "meshmark.adapter.single:Single",
    "ddp": "meshmark.adapters.ddp:DDP",
    "post-local-sgd": "meshmark.adapters.post_local_sgd:PostLocalSGD",
    "fsdp2": "meshmark.adapters.fsdp2:FSDP2",
    "deepspeed": "meshmark.adapters.deepspeed:DeepSpeed",
    "megatron": "meshmark.adapters.megatron:Megatron",
    "gpipe": "meshmark.adapters.pipeline:GPipe",
    "pipeline": "meshmark.adapters.pipeline:Pipeline",
    "accelerate": "meshmark.adapters.accelerate:Accelerate",
    "accelerate-fsdp2": "meshmark.adapters.accelerate:AccelerateFSDP2",
    "accelerate-deepspeed": "meshmark.adapters.accelerate:AccelerateDeepSpeed",
    "fairscale-oss": "meshmark.adapters.fairscale:FairScaleOSS",
    "fairscale-fsdp": "meshmark.adapters.fairscale:FairScaleFSDP",
}
