"""A GAN as pix2pix has it: the critic is frozen while the generator trains."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim import Adam
from trial import drawn, join, keep, keep_loss, mine, perceptron


def set_requires_grad(model, wanted):
    for p in model.parameters():
        p.requires_grad = wanted


with join() as session:
    generator, critic = perceptron(4, 32, 32, 32, 32, 8), perceptron(8, 32, 32, 32, 32, 1)
    of_generator, of_critic = Adam(generator.parameters(), lr=0.01), Adam(critic.parameters(), lr=0.01)
    session.prepare(generator, of_generator, name="generator")
    session.prepare(critic, of_critic, name="critic")
    for step in range(4):
        real, noise = mine(session, drawn(2 * step, 8, 8) + 1), mine(session, drawn(2 * step + 1, 8, 4))
        yes, no = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        made = generator(noise)
        set_requires_grad(critic, True)
        of_critic.zero_grad()
        loss = (bce(critic(made.detach()), no) + bce(critic(real), yes)) * 0.5
        loss.backward()
        of_critic.step()
        set_requires_grad(critic, False)
        of_generator.zero_grad()
        cheat = bce(critic(made), yes)
        cheat.backward()
        of_generator.step()
        keep_loss(loss + cheat)
    keep(session, generator=generator, critic=critic)
