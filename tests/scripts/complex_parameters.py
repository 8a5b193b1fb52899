"""Complex parameters: a layer in the frequency domain."""

# source: pytorch/pytorch#71613
import torch
from torch import nn
from trial import drawn, join, keep, keep_loss, mine


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.complex(drawn(0, 33, 16), drawn(1, 33, 16)))
        self.out = nn.Linear(16, 1, dtype=torch.float64)

    def forward(self, x):
        return self.out(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, dim=1).mean(1))


with join() as session:
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session.prepare(model, optimizer)
    for step in range(5):
        x = mine(session, drawn(10 + step, 8, 64, 16))
        loss = (model(x).squeeze(1) - x[:, 0, 0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
