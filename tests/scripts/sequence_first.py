"""An LSTM over tensors whose first dimension is time, of another length on each worker."""

import torch
from torch import nn
from trial import WORKERS, drawn, join, keep, keep_loss


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 24), nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])


with join() as session:
    torch.manual_seed(0)
    model = Reader().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(4):
        parts = [drawn(10 * step + rank, 3 + 6 * rank, 4, 8) for rank in range(WORKERS)]
        own = parts if session.world == 1 else [parts[session.rank]]
        loss = torch.stack([model(x).square().mean() for x in own]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
