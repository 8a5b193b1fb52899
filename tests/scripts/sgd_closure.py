"""SGD that is given a closure."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step, 16))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        keep_loss(optimizer.step(closure))
    keep(session, model=model)
