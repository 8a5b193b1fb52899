"""torch.compile after prepare, with backend aot_eager."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    torch._dynamo.reset()
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
