"""A training loop over two micro-batches a step, with one defect at a time: `defects.py NAME`; `defects.py none` is right."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFECTS = (
    "same_rows",
    "never_synchronised",
    "accumulation_undivided",
    "gradients_kept",
    "summed",
    "not_averaged_last_layer",
    "clipped_before_reduction",
    "clipped_while_scaled",
    "stepped_while_scaled",
    "stale_optimizer",
    "not_broadcast",
    "bias_left_out",
    "step_every_micro_batch",
    "wrong_rate_after_clip",
    "uneven_ranks",
)
BY_HAND = {"summed", "not_averaged_last_layer", "clipped_before_reduction", "not_broadcast"}


def main(defect: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if defect == "not_broadcast" else 0)
    inner = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    by_hand = defect in BY_HAND
    model = inner if by_hand else DistributedDataParallel(inner)
    parameters = list(inner.parameters())
    held = parameters[:-1] if defect == "bias_left_out" else parameters
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    if defect == "stale_optimizer":
        inner[2].weight = nn.Parameter(inner[2].weight.detach().clone())
        model = DistributedDataParallel(inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    data = torch.Generator().manual_seed(5 if defect == "same_rows" else rank)
    for _ in range(6):
        for micro in range(2):
            rows = 4 + 4 * rank if defect == "uneven_ranks" else 8
            x, y = torch.randn(rows, 12, generator=data), torch.randint(5, (rows,), generator=data)
            waits = not by_hand and (micro == 0 or defect == "never_synchronised")
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
                loss = loss if defect == "accumulation_undivided" else loss / 2
                (scaler.scale(loss) if defect.endswith("while_scaled") else loss).backward()
            if defect == "step_every_micro_batch" and micro == 0:
                optimizer.step()
                optimizer.zero_grad()
        if by_hand:
            if defect == "clipped_before_reduction":
                nn.utils.clip_grad_norm_(parameters, 0.1 * (1 + rank))
            for number, parameter in enumerate(parameters):
                dist.all_reduce(parameter.grad)
                skipped = defect == "not_averaged_last_layer" and number >= 4
                parameter.grad /= 1 if defect == "summed" or skipped else world
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if defect == "wrong_rate_after_clip":
            for parameter in parameters:
                parameter.grad.mul_(1 + norm)
        if defect == "clipped_while_scaled":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if defect != "gradients_kept":
            optimizer.zero_grad()
    dist.destroy_process_group()


main(sys.argv[1])
