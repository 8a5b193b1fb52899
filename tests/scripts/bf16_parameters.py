"""Parameters in bfloat16, without an autocast."""

# tolerance: 2e-2
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron(8, 64, 64, 64, 4).to(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.5)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x.to(torch.bfloat16)).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
