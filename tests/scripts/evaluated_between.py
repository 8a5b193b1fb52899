"""An evaluation after every second step: eval mode, no gradients, a metric of all workers."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        model.train()
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step % 2:
            model.eval()
            session.barrier()
            with torch.inference_mode():
                x, y = mine(session, *batch(100))
                right = (model(x).argmax(1) == y).double().mean()
            keep_loss(session.reduce(right.clone()))
    keep(session, model=model)
