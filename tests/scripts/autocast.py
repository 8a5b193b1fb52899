"""Autocast to bfloat16 around forward and loss."""

# tolerance: 3e-3
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron(8, 48, 48, 48, 4).float()
    optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-2)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x.float()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
