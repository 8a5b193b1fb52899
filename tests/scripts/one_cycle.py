"""OneCycleLR, which changes rates and momenta."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        keep_loss(loss)
    keep(session, model=model)
