"""A hook on a parameter that scales its gradient."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    model[0].weight.register_hook(lambda slope: slope * 0.1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    model[2].weight.register_hook(lambda slope: slope * 0.5)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
