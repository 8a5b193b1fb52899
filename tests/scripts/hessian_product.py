"""A Hessian-vector product by double backward, added to the loss."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(each.square().sum() for each in slopes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
