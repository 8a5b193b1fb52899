"""A batch whose loss is not finite on one worker: all workers leave it out."""

import math

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = batch(step)
        if step == 3:
            x[1] = math.nan
        x, y = mine(session, x, y)
        loss = cross_entropy(model(x), y)
        if not math.isfinite(session.reduce(float(loss.detach()))):
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
