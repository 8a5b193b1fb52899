"""An EmbeddingBag with sparse gradients and bags of unequal sizes."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import classes, join, keep, keep_loss

with join() as session:
    torch.manual_seed(0)
    bags, head = nn.EmbeddingBag(200, 16, mode="mean", sparse=True), nn.Linear(16, 4)
    model = nn.ModuleList([bags, head]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.prepare(model, optimizer)
    for step in range(6):
        texts = [classes(10 * step + each, 2 + each, 200) for each in range(4)][session.rank :: session.world]
        starts = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
        labels = torch.stack([text.sum() % 4 for text in texts])
        loss = cross_entropy(head(bags(torch.cat(texts), starts)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
