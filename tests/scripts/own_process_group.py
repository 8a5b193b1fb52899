"""A process group of the script's own, beside the session, for a metric."""

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    if session.world > 1:
        dist.init_process_group("gloo", rank=session.rank, world_size=session.world)
    for step in range(3):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if session.world > 1:
            dist.all_reduce(mean)
            mean /= session.world
        keep_loss(mean)
    if session.world > 1:
        dist.destroy_process_group()
    keep(session, model=model)
