"""Autocast, accumulation and clipping in one loop."""

# tolerance: 3e-3
import contextlib

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron(8, 48, 48, 48, 4).float()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for number in range(6):
        x, y = mine(session, *batch(number))
        steps = number % 2 == 1
        with contextlib.nullcontext() if steps else session.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x.float()).float(), y) / 2
            loss.backward()
        keep_loss(loss)
        if steps:
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    keep(session, model=model)
