"""One process: a small convolutional net with batch norm, accumulation over micro-batches, Adam, evaluation between."""

import torch
import torch.nn.functional as F
from torch import nn

ACCUMULATION = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1)
        )
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    model.train()
    return loss.item()


torch.manual_seed(3)
images, labels = torch.randn(400, 1, 8, 8), torch.randint(4, (400,))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
print("before", evaluate(model, images[:50], labels[:50]))
micro_batches = torch.randperm(400).split(10)
for number, rows in enumerate(micro_batches, 1):
    loss = F.cross_entropy(model(images[rows]), labels[rows]) / ACCUMULATION
    loss.backward()
    if number % ACCUMULATION == 0:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)
        optimizer.step()
        optimizer.zero_grad()
        print(number, evaluate(model, images[:50], labels[:50]))
