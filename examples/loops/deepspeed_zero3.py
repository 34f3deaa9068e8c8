"""DeepSpeed, ZeRO stage 3. Run it by torchrun."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed()
torch.manual_seed(0)
inputs, targets = torch.randn(10, 16, 12), torch.randn(10, 16, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2, "torch_adam": True}},
    "gradient_clipping": 0.3,
    "zero_optimization": {"stage": 3},
}
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for x, y in zip(inputs, targets, strict=True):
    x, y = x.chunk(dist.get_world_size())[dist.get_rank()], y.chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(engine(inputs[-1]), targets[-1]):.5f}")
dist.destroy_process_group()
