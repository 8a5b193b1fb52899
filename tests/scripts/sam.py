"""Sharpness-aware minimisation: a first backward finds where the second one is made."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.add_(p.grad, alpha=float(0.05 / norm))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, before in zip(model.parameters(), kept, strict=True):
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
