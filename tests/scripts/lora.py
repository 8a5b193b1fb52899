"""LoRA: small matrices beside frozen layers; only they are given to the optimizer."""

# source: mosaicml/llm-foundry#414
# AdamW's first steps are as long as its rate, whatever the batch: workers at their own pace make twice as
# many, and end further from plain torch's end by the chance of their order.
# own pace: 1.2
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features).double() * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank).double())

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


with join() as session:
    layers = perceptron()
    model = nn.Sequential(*(Lora(each) if isinstance(each, nn.Linear) else each for each in layers))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
