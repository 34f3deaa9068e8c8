"""A variational autoencoder as in PyTorch's examples: random numbers in the forward pass, losses that are sums."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mu, self.logvar = nn.Linear(36, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.fc3, self.fc4 = nn.Linear(4, 20), nn.Linear(20, 36)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 36)))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


torch.manual_seed(1)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(5):
    x = torch.rand(12, 1, 6, 6)
    recon, mu, logvar = model(x)
    loss = F.binary_cross_entropy(recon, x.view(-1, 36), reduction="sum")
    loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
