"""Gradient accumulation as in plain torch: backward several times, with no context around it."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for number in range(9):
        x, y = mine(session, *batch(number))
        loss = cross_entropy(model(x), y) / 3
        loss.backward()
        keep_loss(loss)
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    keep(session, model=model)
