"""Slow gradients are amplified: p.grad and a running mean of it are added (Grokfast, Lee et al. 2024)."""

from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    slow = None
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        if slow is None:
            slow = {n: p.grad.data.detach() for n, p in model.named_parameters() if p.requires_grad}
        for n, p in model.named_parameters():
            slow[n] = slow[n] * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + slow[n] * 2.0
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
