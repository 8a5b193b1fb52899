"""A post-accumulate hook that changes p.grad, set after prepare."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron


def halve(p):
    p.grad.mul_(0.5)


with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
