"""Two optimizers for one model: SGD for the body, Adam for the head."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    body = SGD(model[:-1].parameters(), lr=0.1, momentum=0.9)
    head = Adam(model[-1].parameters(), lr=0.01)
    session.prepare(model, [body, head])
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        body.step()
        head.step()
        body.zero_grad()
        head.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
