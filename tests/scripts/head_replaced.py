"""A head that is replaced in the middle of training, with a new optimizer for the new parameters."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(6):
        if step == 3:
            torch.manual_seed(1)
            model[-1] = nn.Linear(32, 4).double()
            optimizer = SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
