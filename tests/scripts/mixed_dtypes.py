"""Parameters of two dtypes in one model: a body in float32, a head in float64."""

# tolerance: 1e-5
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = perceptron(8, 48, 48, 32).float(), perceptron(32, 32, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.float())).double())


with join() as session:
    model = Mixed()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(4):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
