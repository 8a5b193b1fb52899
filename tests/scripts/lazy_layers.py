"""Lazy layers that take their shapes from a first batch, before prepare."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LazyLinear(48), nn.Tanh(), nn.LazyLinear(64), nn.Tanh(), nn.LazyLinear(4)
    ).double()
    model(batch(0)[0])
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
