"""The frameworks behind Meshmark's interface: one file each, the only place that imports it.

The registry maps a name to "module:Class", resolved when needed; importing this package imports no framework.
"""

ADAPTERS: dict[str, str] = {
    "single": "adapters.single:Single",
    "ddp": "adapters.ddp:DDP",
    "fsdp2": "adapters.fsdp2:FSDP2",
    "gpipe": "adapters.gpipe:GPipe",
}
