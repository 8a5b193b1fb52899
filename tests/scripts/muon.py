"""torch.optim.Muon on a model of matrices alone."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32, bias=False), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(32, 32, bias=False), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(32, 4, bias=False)).double()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
