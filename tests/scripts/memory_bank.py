"""Momentum contrast: a key encoder that follows slowly, and a bank of keys in a buffer."""

# source: facebookresearch/fairscale#805
import torch
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    query, key = perceptron(8, 48, 48, 16), perceptron(8, 48, 48, 16).requires_grad_(False)
    bank = normalize(drawn(99, 32, 16), dim=1)
    optimizer = SGD(query.parameters(), lr=0.1, momentum=0.9)
    session.prepare(query, optimizer)
    for step in range(5):
        whole = drawn(step, 8, 8)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = normalize(key(whole + 0.01), dim=1)
        found = normalize(query(mine(session, whole)), dim=1)
        near = (found * mine(session, keys)).sum(1, keepdim=True)
        scores = torch.cat([near, found @ bank.T], 1) / 0.2
        loss = cross_entropy(scores, torch.zeros(len(found), dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bank = torch.cat([bank[8:], keys])
        keep_loss(loss)
    keep(session, query=query, key=key, bank=bank)
