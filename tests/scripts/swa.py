"""Stochastic weight averaging by torch.optim.swa_utils, with its own schedule and update_bn."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from trial import batch, join, keep, keep_loss, shares

with join() as session:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for step in range(6):
        x, y = batch(step, 16)
        parts = zip(shares(session, x), shares(session, y), strict=True)
        loss = torch.stack([cross_entropy(model(some), labels) for some, labels in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step >= 2:
            average.update_parameters(model)
            scheduler.step()
    update_bn([batch(step, 16)[0] for step in range(3)], average)
    keep(session, model=model, average=average, mean=average.module[1].running_mean)
