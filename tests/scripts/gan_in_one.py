"""A GAN as one module with two optimizers, each of which leaves the other's half without gradients."""

# source: Lightning-AI/pytorch-lightning#20866
from torch import nn
from torch.optim import Adam
from trial import drawn, join, keep, keep_loss, mine, perceptron


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = perceptron(4, 32, 32, 32, 8), perceptron(8, 32, 32, 32, 1)

    def forward(self, noise):
        return self.critic(self.generator(noise))


with join() as session:
    model = Gan()
    of_generator = Adam(model.generator.parameters(), lr=0.01)
    of_critic = Adam(model.critic.parameters(), lr=0.01)
    session.prepare(model, [of_generator, of_critic])
    for step in range(4):
        real, noise = mine(session, drawn(2 * step, 8, 8) + 1), mine(session, drawn(2 * step + 1, 8, 4))
        model.critic.requires_grad_(False)
        cheat = -model(noise).mean()
        cheat.backward()
        of_generator.step()
        of_generator.zero_grad()
        model.critic.requires_grad_(True)
        loss = (model.critic(real) - 1).square().mean() + model.critic(
            model.generator(noise).detach()
        ).square().mean()
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()
        keep_loss(loss + cheat)
    keep(session, model=model)
