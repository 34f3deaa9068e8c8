"""No wrapper: parameters are broadcast and gradients averaged by hand; regression with SGD and momentum."""

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.BatchNorm1d(40), nn.Linear(40, 2))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    criterion = nn.MSELoss()
    for step in range(8):
        x = torch.randn(16, 6)
        y = torch.stack([x.sum(1), x.prod(1)], 1)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
    dist.destroy_process_group()


main()
