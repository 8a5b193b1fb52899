"""torch.export of the model after training: the program gives what the model gives."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    session.barrier()
    x, _ = batch(9)
    program = torch.export.export(model.eval(), (x,)).module()
    with torch.no_grad():
        keep(session, model=model, program=program(x), own=model(x))
