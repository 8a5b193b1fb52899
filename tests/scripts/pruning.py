"""Pruning: masks in buffers, made permanent after training."""

from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    for layer in model[::2]:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    session.barrier()
    for layer in model[::2]:
        prune.remove(layer, "weight")
    keep(session, model=model)
