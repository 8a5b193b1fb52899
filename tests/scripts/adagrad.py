"""Adagrad with a falling rate."""

# Adagrad's first steps are as long as its rate, whatever the batch: workers at their own pace make twice as
# many, and end further from plain torch's end by the chance of their order.
# own pace: 1.5
from torch.nn.functional import cross_entropy
from torch.optim import Adagrad
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adagrad(model.parameters(), lr=0.05, lr_decay=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
