"""A critic with BatchNorm that sees real and false samples in two forwards before one backward."""

# source: pytorch/pytorch#175024
import torch
from torch import nn
from trial import drawn, join, keep, keep_loss, shares

with join() as session:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)).double()
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    session.prepare(critic, optimizer)
    for step in range(5):
        real, fake = (shares(session, drawn(2 * step + each, 16, 8) + each) for each in range(2))
        both = zip(real, fake, strict=True)
        loss = torch.stack([critic(false).mean() - critic(true).mean() for true, false in both]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, critic=critic)
