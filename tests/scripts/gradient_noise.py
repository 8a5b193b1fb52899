"""Noise that is added to gradients before the step."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        for place, p in enumerate(model.parameters()):
            p.grad.add_(drawn(100 * step + place, *p.shape), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
