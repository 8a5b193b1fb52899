"""BatchNorm: each worker's batch is normalised by its own statistics."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, shares

with join() as session:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.BatchNorm1d(64)]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = batch(step, 16)
        parts = zip(shares(session, x), shares(session, y), strict=True)
        loss = torch.stack([cross_entropy(model(some), labels) for some, labels in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
