"""Packed sequences through a GRU."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence
from trial import drawn, join, keep, keep_loss, mine


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32), nn.Linear(32, 4)

    def forward(self, texts):
        return self.head(self.gru(texts)[1][-1])


with join() as session:
    torch.manual_seed(0)
    model = Reader().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        texts = mine(session, [drawn(10 * step + each, 2 + each % 4, 8) for each in range(8)])
        labels = torch.stack([text[0, :4].argmax() for text in texts])
        loss = cross_entropy(model(pack_sequence(texts, enforce_sorted=False)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
