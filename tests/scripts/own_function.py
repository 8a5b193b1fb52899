"""An autograd function of the script's own, with a straight-through gradient."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(context, slope):
        return slope


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = perceptron(8, 48, 48), perceptron(48, 16, 4)

    def forward(self, x):
        return self.last(Rounded.apply(torch.tanh(self.first(x))))


with join() as session:
    model = Quantised()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
