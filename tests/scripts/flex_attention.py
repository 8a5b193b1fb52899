"""FlexAttention with a score of the script's own, in frozen layers: torch has no backward of it on a CPU."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from trial import drawn, join, keep, keep_loss, mine


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.slopes = torch.tensor([0.5, 0.25])
        self.inside.requires_grad_(False)

    def forward(self, x):
        rows, length, _ = x.shape
        query, key, value = self.inside(x).view(rows, length, 2, 48).transpose(1, 2).chunk(3, -1)

        def nearer(score, _row, head, one, other):
            return score - self.slopes[head] * (one - other).abs()

        found = flex_attention(query, key, value, score_mod=nearer)
        return self.out(found.transpose(1, 2).flatten(2))


# tolerance: 1e-6
with join() as session:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(3):
        x = mine(session, drawn(step, 4, 8, 32)).float()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
