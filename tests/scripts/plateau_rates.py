"""ReduceLROnPlateau, by the loss of all workers."""

# source: lucidrains/DALLE-pytorch#268
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(session.reduce(float(loss.detach())))
        keep_loss(loss)
    keep(session, model=model)
