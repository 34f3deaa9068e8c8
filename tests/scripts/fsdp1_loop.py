"""FSDP1 with flat parameters, a transformer encoder layer at a time."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 33, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FSDP(Classifier(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(50 + dist.get_rank())
    for step in range(6):
        tokens, labels = torch.randint(40, (8, 9)), torch.randint(3, (8,))
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        model.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
