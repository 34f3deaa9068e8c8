# /// script
# dependencies = ["lightning-fabric==2.6.6", "deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Fabric's DeepSpeedStrategy cannot load whole weights at ZeRO stage 3, with load_full_weights either"
# framework = "lightning-fabric"
# symptom = "RuntimeError: size mismatch for weight, whose shape in the model is torch.Size([0])."
# cause = """
# load_checkpoint gives the file to the module's own load_state_dict. _restore_zero_state, which gathers shards to
# load into, is called by nothing."""
# processes = 2
# ///
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.


class OnCPU(DeepSpeedStrategy):
    """Fabric's strategy without its three requests to CUDA."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True

    def _initialize_engine(self, model: nn.Module, optimizer: object = None, scheduler: object = None) -> tuple:
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config, dist_init_required=False
        )
        return engine, optimizer, None


zero = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
strategy = OnCPU(config={"train_micro_batch_size_per_gpu": 1, **zero}, load_full_weights=True)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
fabric.launch()
layer = nn.Linear(4, 2, bias=False)
whole = layer.state_dict()["weight"].clone()
path = fabric.broadcast(str(Path(tempfile.mkdtemp()) / "weights.pt"))
if fabric.global_rank == 0:
    torch.save({"model": {"module.weight": whole}}, path)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
fabric.barrier()
try:
    fabric.load(path, {"model": model})
except RuntimeError as error:
    sys.exit(f"expected: weights that are loaded; got: {str(error).splitlines()[-1].strip()}")
