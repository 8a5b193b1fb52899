"""A contrastive loss over the samples of all workers, with a temperature that is trained and clamped."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import AdamW
from trial import drawn, join, keep, keep_loss, perceptron


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = perceptron(8, 32, 32, 16), perceptron(6, 32, 32, 16)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, images, texts):
        return normalize(self.images(images), dim=1), normalize(self.texts(texts), dim=1)


with join() as session:
    torch.manual_seed(0)
    model = Pair()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        images, texts = model(drawn(2 * step, 8, 8), drawn(2 * step + 1, 8, 6))
        rows = torch.arange(8)[session.rank :: session.world]
        scores = model.scale.exp() * images[rows] @ texts.T
        loss = cross_entropy(scores, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.scale.clamp_(0.0, 2.001)
        keep_loss(loss)
    keep(session, model=model)
