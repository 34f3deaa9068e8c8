"""`meshmark check` inside the workers of Ray Train: a loop as its guide has it, under two CPU workers.

python examples/ray/checked.py
"""

from __future__ import annotations

from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshmark.check.function import observed


def loop(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)))
    tokens = torch.randint(50, (64, 9), generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = prepare_data_loader(DataLoader(rows, batch_size=4, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["clip_norm"])
        optimizer.step()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        observed(loop),  # in the place of `loop`
        train_loop_config={"clip_norm": 1.0},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
