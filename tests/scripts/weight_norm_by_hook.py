"""Weight norm of the old kind, by a hook before forward."""

# source: pytorch/pytorch#102981
from torch.nn.functional import cross_entropy
from torch.nn.utils import weight_norm
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    for layer in model[::2]:
        weight_norm(layer)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
