"""A parameter without elements, as a prompt of no tokens is, in a param group of its own."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.prompt = perceptron(), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x):
        return self.net(x) + self.prompt.sum()


with join() as session:
    model = Prompted()
    rest = list(model.net.parameters())
    optimizer = AdamW([{"params": rest}, {"params": [model.prompt], "weight_decay": 0.0}], lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
