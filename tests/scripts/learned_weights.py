"""Losses weighted by learned variances (Kendall et al.), which belong to no module."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    spread = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Adam([*model.parameters(), spread], lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        out = model(x)
        both = torch.stack([cross_entropy(out, y), out.square().mean()])
        loss = (both * torch.exp(-spread) + spread).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model, spread=spread)
