"""A gradient penalty: the loss has the gradient by the inputs in it."""

import torch
from torch.optim import Adam
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    critic = perceptron(8, 32, 32, 32, 32, 1)
    optimizer = Adam(critic.parameters(), lr=0.01)
    session.prepare(critic, optimizer)
    for step in range(5):
        real, fake, mix = (mine(session, drawn(3 * step + each, 8, 8)) for each in range(3))
        between = (real + mix.sigmoid() * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, critic=critic)
