"""A linear warm-up and a cosine after it, by SequentialLR."""

from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    scheduler = SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=4)],
        milestones=[2],
    )
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        keep_loss(loss)
    keep(session, model=model)
