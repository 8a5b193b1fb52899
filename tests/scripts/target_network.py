"""Deep Q-learning: a target network that takes the trained one's state_dict every second step."""

import torch
from torch.nn.functional import smooth_l1_loss
from torch.optim import RMSprop
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    net, target = perceptron(), perceptron()
    optimizer = RMSprop(net.parameters(), lr=0.001)
    session.prepare(net, optimizer)
    for step in range(6):
        state, after = (mine(session, drawn(2 * step + each, 8, 8)) for each in range(2))
        with torch.no_grad():
            best = target(after).max(1).values * 0.9 + state[:, 0]
        action = (state[:, 1] > 0).long()[:, None]
        loss = smooth_l1_loss(net(state).gather(1, action).squeeze(1), best)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step % 2:
            session.barrier()
            target.load_state_dict(net.state_dict())
    keep(session, net=net, target=target)
