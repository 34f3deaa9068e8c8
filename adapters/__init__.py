"""The frameworks behind Meshmark's interface: one file or folder each, the only place that imports it.

The registries map a name to "module:Class", resolved when needed; importing this package imports no framework. Of one
framework's choices that are no part of a layout, each is an adapter of its own: `fsdp2` is *as theory says*, with every
choice explicit; `fsdp2-CHOICE` differs from it in what it is called after; `fsdp2-recommended` is *as its authors
recommend*, with their documented defaults (`Adapter.track`).
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
"""The core: what runs where no adapter is named, so the report's."""

ROSTER: dict[str, str] = {
    "ddp-static": "meshmark.adapters.ddp:DDPStatic",
    "ddp-recommended": "meshmark.adapters.ddp:DDPRecommended",
    "ddp-zero1": "meshmark.adapters.zero_redundancy:DDPZero1",
    "tp": "meshmark.adapters.tensor_parallel:TensorParallel",
    "tp-whole-loss": "meshmark.adapters.tensor_parallel:TensorParallelWholeLoss",
    "tp-fsdp2": "meshmark.adapters.tensor_parallel_fsdp2:TensorParallelFSDP2",
    "pipeline-tp": "meshmark.adapters.pipeline_nd:PipelineTensorParallel",
    "pipeline-fsdp2": "meshmark.adapters.pipeline_nd:PipelineFSDP2",
    "pipeline-looped-bfs": "meshmark.adapters.pipeline_orders:LoopedBFS",
    "pipeline-zero-bubble": "meshmark.adapters.pipeline_orders:InterleavedZeroBubble",
    "pipeline-zbv": "meshmark.adapters.pipeline_orders:ZeroBubbleV",
    "pipeline-dualpipev": "meshmark.adapters.pipeline_orders:DualPipeV",
    "fsdp1": "meshmark.adapters.fsdp1:FSDP1",
    "fsdp1-shard-grad-op": "meshmark.adapters.fsdp1:FSDP1ShardGradOp",
    "fsdp1-hybrid": "meshmark.adapters.fsdp1:FSDP1Hybrid",
    "fsdp2-noreshard": "meshmark.adapters.fsdp2:FSDP2NoReshard",
    "fsdp2-reshard2": "meshmark.adapters.fsdp2:FSDP2Reshard2",
    "fsdp2-hsdp": "meshmark.adapters.fsdp2:FSDP2HSDP",
    "fsdp2-offload": "meshmark.adapters.fsdp2:FSDP2Offload",
    "fsdp2-recommended": "meshmark.adapters.fsdp2:FSDP2Recommended",
    "deepspeed-zero0": "meshmark.adapters.deepspeed.replicated:DeepSpeedZero0",
    "deepspeed-offload": "meshmark.adapters.deepspeed.variants:DeepSpeedOffload",
    "deepspeed-offload-params": "meshmark.adapters.deepspeed.variants:DeepSpeedOffloadParams",
    "deepspeed-checkpointing": "meshmark.adapters.deepspeed.checkpointing:DeepSpeedCheckpointing",
    "deepspeed-infinity": "meshmark.adapters.deepspeed.infinity:DeepSpeedInfinity",
    "deepspeed-recommended": "meshmark.adapters.deepspeed.recommended:DeepSpeedRecommended",
    "deepspeed-hpz": "meshmark.adapters.deepspeed.hpz:DeepSpeedHPZ",
    "deepspeed-ulysses": "meshmark.adapters.deepspeed.ulysses:DeepSpeedUlysses",
    "deepspeed-autotp": "meshmark.adapters.deepspeed.autotp:DeepSpeedAutoTP",
    "megatron-gpt": "meshmark.adapters.megatron.gpt_model:MegatronGPT",
    "megatron-gpt-zero1": "meshmark.adapters.megatron.gpt_model:MegatronGPTDistributedOptimizer",
    "deepspeed-pipeline": "meshmark.adapters.deepspeed.pipeline:DeepSpeedPipeline",
    "fairscale-oss-ddp": "meshmark.adapters.fairscale.under_ddp:FairScaleOSSDDP",
    "fairscale-fsdp-unflattened": "meshmark.adapters.fairscale.options:FairScaleFSDPUnflattened",
    "fairscale-fsdp-noreshard": "meshmark.adapters.fairscale.options:FairScaleFSDPNoReshard",
    "fairscale-checkpoint-offload": "meshmark.adapters.fairscale.options:FairScaleCheckpointOffload",
    "ddp-compressed": "meshmark.adapters.ddp_compressed:DDPCompressed",
    "compressed": "meshmark.adapters.compressed:Compressed",
    "fed-avg": "meshmark.adapters.fed_avg:FedAvg",
    "diloco": "meshmark.adapters.diloco:DiLoCo",
    "pipedream": "meshmark.adapters.pipedream:PipeDream",
    "decentralised": "meshmark.adapters.decentralised:Decentralised",
    "fabric-ddp": "meshmark.adapters.fabric:FabricDDP",
    "fabric-ddp-separate": "meshmark.adapters.fabric:FabricDDPSeparate",
    "fabric-fsdp": "meshmark.adapters.fabric:FabricFSDP",
    "fabric-fsdp-separate": "meshmark.adapters.fabric:FabricFSDPSeparate",
    "fabric-deepspeed": "meshmark.adapters.fabric.deepspeed:FabricDeepSpeed",
    "fabric-tp-fsdp2": "meshmark.adapters.fabric.model_parallel:FabricTensorParallelFSDP2",
    "accelerate-deepspeed-file": "meshmark.adapters.accelerate.deepspeed_file:AccelerateDeepSpeedFile",
    "accelerate-hsdp": "meshmark.adapters.accelerate:AccelerateHSDP",
    "accelerate-fsdp1": "meshmark.adapters.accelerate.fsdp1:AccelerateFSDP1",
}
"""What runs where it is named, or by `make roster`."""
