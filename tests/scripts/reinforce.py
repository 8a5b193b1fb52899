"""REINFORCE: each worker plays episodes of its own with the current policy, then all step together."""

import torch
from torch.distributions import Categorical
from torch.optim import Adam
from trial import WORKERS, drawn, join, keep, keep_loss, perceptron

with join() as session:
    policy = perceptron(4, 32, 32, 32, 32, 32, 2)
    optimizer = Adam(policy.parameters(), lr=0.01)
    session.prepare(policy, optimizer)
    for episode in range(4):
        terms = []
        for rank in range(WORKERS) if session.world == 1 else [session.rank]:
            place, dice = (
                torch.zeros(4, dtype=torch.float64),
                torch.Generator().manual_seed(10 * episode + rank),
            )
            for time in range(5):
                choice = Categorical(logits=policy(place[None]))
                action = torch.multinomial(choice.probs.detach()[0], 1, generator=dice)
                place = 0.9 * place + (2 * action.double() - 1) * drawn(time, 4)
                terms.append(-choice.log_prob(action).squeeze() * place.sum())
        loss = torch.stack(terms).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, policy=policy)
