"""A worker with fewer batches than the other: it goes on without a batch of its own."""

# source: Lightning-AI/pytorch-lightning#20404
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    batches = [batch(step, 8 if step < 4 else 1) for step in range(6)]  # of the last two, one row is left
    for whole in batches:
        x, y = mine(session, *whole)
        if len(x):
            session.weight(len(x))
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    keep(session, model=model)
