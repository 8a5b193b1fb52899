"""SyncBatchNorm on a CPU: statistics are those of the whole batch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step, 16))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
