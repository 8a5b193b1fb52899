"""Backward in two halves, by hand: through the head to the features, and from there through the trunk."""

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        features = model[:6](x)
        cut = features.detach().requires_grad_()
        loss = cross_entropy(model[6:](cut), y)
        loss.backward()
        features.backward(cut.grad)
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
