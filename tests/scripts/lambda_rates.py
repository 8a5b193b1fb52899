"""LambdaLR with a function for each param group."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[1:].parameters()}], lr=0.1)
    session.prepare(model, optimizer)
    scheduler = LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        keep_loss(loss)
    keep(session, model=model)
