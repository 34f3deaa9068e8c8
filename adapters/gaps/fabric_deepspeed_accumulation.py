# /// script
# dependencies = ["lightning-fabric==2.6.6", "deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Fabric's DeepSpeedStrategy drops accumulated gradients at ZeRO stages 1 and 2"
# framework = "lightning-fabric"
# symptom = "After two backward passes a step uses the gradient of the last one only."
# cause = """
# Every backward pass counts as the last of a step, because nobody tells the engine:
# engine.set_gradient_accumulation_boundary."""
# processes = 2
# ///
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
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


zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
config = {"train_micro_batch_size_per_gpu": 1, **zero}
fabric = Fabric(accelerator="cpu", devices=2, strategy=OnCPU(config=config), plugins=[TorchElasticEnvironment()])
fabric.launch()
layer = nn.Linear(4, 2, bias=False)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
before = safe_get_full_fp32_param(layer.weight).detach().clone()
for factor in (1.0, 2.0):
    fabric.backward(factor * model(torch.ones(1, 4)).sum())
optimizer.step()
moved = float((before - safe_get_full_fp32_param(layer.weight)).mean())
if abs(moved - 3.0) > 1e-5:
    sys.exit(f"expected: a step by both gradients, 3; got: {moved:g}")
