"""A teacher that is a deepcopy of the prepared model and follows it slowly."""

# source: pytorch/pytorch#82070
# Adam's first steps are as long as its rate, whatever the batch: workers at their own pace make twice as
# many, and end further from plain torch's end by the chance of their order.
# own pace: 1.2
import copy

import torch
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    teacher = copy.deepcopy(model).requires_grad_(False)
    for step in range(5):
        x, _ = mine(session, *batch(step))
        noise = mine(session, batch(50 + step)[0])
        loss = (model(x + 0.1 * noise) - teacher(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        keep_loss(loss)
    keep(session, model=model, teacher=teacher)
