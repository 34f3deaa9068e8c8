# /// script
# dependencies = ["lightning-fabric==2.6.6", "deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A step of Fabric's DeepSpeedStrategy passes DeepSpeed's engine by"
# framework = "lightning-fabric"
# symptom = """
# engine.global_steps stays 0, so what the engine does in a step (schedules, counters, checkpoints by step) never
# happens."""
# cause = """
# Fabric calls the optimizer's own step: the engine is not recognised as Optimizable, because it has no
# param_groups."""
# upstream = "https://github.com/Lightning-AI/pytorch-lightning/issues/14994"
# processes = 2
# ///
import sys

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


zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
config = {"train_micro_batch_size_per_gpu": 1, **zero}
fabric = Fabric(accelerator="cpu", devices=2, strategy=OnCPU(config=config), plugins=[TorchElasticEnvironment()])
fabric.launch()
layer = nn.Linear(4, 2, bias=False)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
for factor in (1.0, 2.0):
    fabric.backward(factor * model(torch.ones(1, 4)).sum())
optimizer.step()
steps = fabric.strategy.model.global_steps
if steps != 1:
    sys.exit(f"expected: 1 step of the engine; got: {steps}")
