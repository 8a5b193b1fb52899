"""A small transformer with a causal mask, trained on characters."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import classes, join, keep, keep_loss, mine


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(40, 16), nn.Parameter(torch.zeros(12, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 40)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=torch.float64)
        return self.out(self.layers(self.words(words) + self.places, mask=mask, is_causal=True))


with join() as session:
    torch.manual_seed(0)
    model = Language().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        words = mine(session, classes(step, 4 * 13, 40).view(4, 13))
        loss = cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
