"""Weight decay as in scripts of torch 0.4: p.grad.data.add_(p.data)."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.data.add_(p.data, alpha=0.1)
        optimizer.step()
        keep_loss(loss)
    keep(session, model=model)
