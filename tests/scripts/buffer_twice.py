"""A module with a buffer that is used in two forwards before one backward."""

# source: pytorch/pytorch#22095
import torch
from torch import nn
from trial import drawn, join, keep, keep_loss, mine


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))

    def forward(self, x):
        return (self.inside(x) * self.scale).sum(1)


with join() as session:
    torch.manual_seed(0)
    model = Scaled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    session.prepare(model, optimizer)
    for step in range(5):
        first, second = (mine(session, drawn(2 * step + each, 8, 32)) for each in range(2))
        loss = (model(first) - model(second)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
