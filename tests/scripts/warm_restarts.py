"""CosineAnnealingWarmRestarts."""

from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        keep_loss(loss)
    keep(session, model=model)
