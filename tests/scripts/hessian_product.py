"""A Hessian-vector product by double backward, added to the loss."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    directions = [drawn(place, *p.shape) for place, p in enumerate(model.parameters())]
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum((slope * way).sum() for slope, way in zip(slopes, directions, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
