"""A variational autoencoder; its noise comes with the batch."""

import torch
from torch import nn
from trial import drawn, join, keep, keep_loss, mine, perceptron


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = perceptron(16, 48, 16), perceptron(8, 48, 32, 16)

    def forward(self, x, noise):
        mean, spread = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + (0.5 * spread).exp() * noise), mean, spread


with join() as session:
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, noise = mine(session, drawn(2 * step, 8, 16), drawn(2 * step + 1, 8, 8))
        again, mean, spread = model(x, noise)
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        loss = (again - x).square().sum(1).mean() + apart
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
