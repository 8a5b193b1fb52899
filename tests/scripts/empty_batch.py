"""A batch that is empty on one worker passes through the model all the same."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(5):
        rows = 1 if step == 3 else 8
        x, y = mine(session, *batch(step, rows))
        session.weight(1.0)
        loss = cross_entropy(model(x), y, reduction="sum") * session.world / rows
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    keep(session, model=model)
