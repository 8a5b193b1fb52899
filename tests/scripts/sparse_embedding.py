"""An embedding with sparse gradients, stepped by SGD."""

# source: pytorch/pytorch#111422
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import classes, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200, 16, sparse=True), nn.Linear(16, 64), nn.Linear(64, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.prepare(model, optimizer)
    for step in range(6):
        words = mine(session, classes(step, 8, 200))
        loss = cross_entropy(model(words), words % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
