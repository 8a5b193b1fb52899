"""Halves of a model train in turn: each is frozen while the other one steps."""

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    session.prepare(model, optimizer)
    for step in range(6):
        for place, p in enumerate(model.parameters()):
            p.requires_grad_((place < 6) == (step % 2 == 0))
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
