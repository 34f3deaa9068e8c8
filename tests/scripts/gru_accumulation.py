"""A GRU over sentences of unequal length: DDP with no_sync, tokens counted over ranks and micro-batches, Adam."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, VOCAB, ACCUMULATION = 0, 50, 2


class Sentences(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, 13, (256,), generator=generator)
        self.rows = [torch.randint(1, VOCAB, (int(n),), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24, padding_idx=PAD)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        return self.out(self.drop(self.rnn(self.embedding(tokens))[0]))


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = Sentences()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) < ACCUMULATION:
                continue
            tokens = torch.tensor(float(sum((b[:, 1:] != PAD).sum() for b in batches)))
            dist.all_reduce(tokens)
            optimizer.zero_grad()
            for number, micro in enumerate(batches):
                last = number == len(batches) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(micro[:, :-1])
                    loss = F.cross_entropy(
                        logits.flatten(0, 1), micro[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
                    )
                    loss = loss * world / tokens
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            batches = []
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
