"""Two sparse embeddings, one of which a batch does not use."""

# source: pytorch/pytorch#80496
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import classes, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    tables = nn.ModuleList([nn.Embedding(100, 16, sparse=True) for _ in range(2)])
    head = nn.Linear(16, 4)
    model = nn.ModuleList([tables, head]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.prepare(model, optimizer)
    for step in range(6):
        words = mine(session, classes(step, 8, 100))
        loss = cross_entropy(head(tables[step % 2](words)), words % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
