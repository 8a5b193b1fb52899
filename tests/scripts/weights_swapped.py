"""Averaged weights that are swapped in by p.data for an evaluation, and out again."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.barrier()
        for slow, p in zip(average, model.parameters(), strict=True):
            slow.lerp_(p.detach(), 0.2)
        kept = [p.data for p in model.parameters()]
        for p, slow in zip(model.parameters(), average, strict=True):
            p.data = slow
        with torch.no_grad():
            keep_loss(cross_entropy(model(batch(100)[0]), batch(100)[1]))
        for p, own in zip(model.parameters(), kept, strict=True):
            p.data = own
    keep(session, model=model)
