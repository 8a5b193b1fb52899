"""A GAN: two models in one nn.ModuleList, with a list of optimizers, as the line about two models says."""

# asked: put both into one nn.ModuleList
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim import Adam
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    generator, critic = perceptron(4, 32, 32, 32, 32, 8), perceptron(8, 32, 32, 32, 32, 1)
    of_generator, of_critic = Adam(generator.parameters(), lr=0.01), Adam(critic.parameters(), lr=0.01)
    session.prepare(nn.ModuleList([generator, critic]), [of_generator, of_critic])
    for step in range(4):
        real, noise = mine(session, drawn(2 * step, 8, 8) + 1), mine(session, drawn(2 * step + 1, 8, 4))
        yes, no = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        of_critic.zero_grad()
        loss = bce(critic(real), yes) + bce(critic(generator(noise).detach()), no)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        cheat = bce(critic(generator(noise)), yes)
        cheat.backward()
        of_generator.step()
        keep_loss(loss + cheat)
    keep(session, generator=generator, critic=critic)
