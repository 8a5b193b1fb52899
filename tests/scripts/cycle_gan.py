"""CycleGAN: two generators with one optimizer, held in one ModuleList."""

import itertools

from torch import nn
from torch.optim import Adam
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    there, back = perceptron(8, 32, 32, 32, 8), perceptron(8, 32, 32, 32, 8)
    optimizer = Adam(itertools.chain(there.parameters(), back.parameters()), lr=0.01)
    both = nn.ModuleList([there, back])
    session.prepare(both, optimizer)
    for step in range(4):
        x, y = (mine(session, drawn(2 * step + each, 8, 8)) for each in range(2))
        loss = (back(there(x)) - x).abs().mean() + (there(back(y)) - y).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, both=both)
