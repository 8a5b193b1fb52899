"""Two steps after one backward."""

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step == 2:
            optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
