"""An embedding whose weight is the last layer's too."""

# source: NVIDIA/Megatron-LM#1447
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import classes, join, keep, keep_loss, mine


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inside, self.out = (
            nn.Embedding(90, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 90, bias=False),
        )
        self.out.weight = self.words.weight

    def forward(self, words):
        return self.out(torch.tanh(self.inside(self.words(words))))


with join() as session:
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        words = mine(session, classes(step, 8, 90))
        loss = cross_entropy(model(words), (words + 1) % 90)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    assert model.out.weight is model.words.weight
    keep(session, model=model)
