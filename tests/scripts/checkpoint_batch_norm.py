"""BatchNorm inside a checkpoint, which runs it twice."""

# source: pytorch/pytorch#66504
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from trial import batch, join, keep, keep_loss, perceptron, shares


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inside, self.last = perceptron(8, 32), self.normed(), perceptron(32, 32, 4)

    def normed(self):
        return nn.Sequential(perceptron(32, 32), nn.BatchNorm1d(32), perceptron(32, 32)).double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = checkpoint(self.inside, x, use_reentrant=False)
        return self.last(torch.tanh(x))


with join() as session:
    model = Deep()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        parts = zip(*(shares(session, each) for each in batch(step, 16)), strict=True)
        loss = torch.stack([cross_entropy(model(x), y) for x, y in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
