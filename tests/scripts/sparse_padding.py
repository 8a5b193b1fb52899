"""A sparse embedding where one worker's batch has padding alone."""

# source: pytorch/pytorch#87497
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    table, head = nn.Embedding(100, 16, padding_idx=0, sparse=True), nn.Linear(16, 4)
    model = nn.Sequential(table, head).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.prepare(model, optimizer)
    for step in range(4):
        words = mine(session, torch.tensor([0, 1 + step, 0, 7, 0, 9]))  # every other one is padding
        loss = cross_entropy(model(words), words % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
