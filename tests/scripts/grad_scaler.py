"""A GradScaler: scaled loss, unscaled gradients, clipping between them."""

# tolerance: 1e-6
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    session.register(scaler=scaler)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
