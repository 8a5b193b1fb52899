"""A penalty on the gradient's own norm, by backward(create_graph=True) and a second backward."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
        optimizer.zero_grad()
        (loss + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
