"""Adam first, then SGD: a new optimizer in the middle (SWATS)."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step == 2:
            optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
            session.prepare(model, optimizer)
    keep(session, model=model)
