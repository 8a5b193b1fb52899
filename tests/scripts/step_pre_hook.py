"""Hooks of the optimizer: gradients are clipped and the rate is set just before each step."""

from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

steps = 0


def clip(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        clip_grad_value_(group["params"], 0.02)


def set_rate(optimizer, args, kwargs):
    global steps
    steps += 1
    for group in optimizer.param_groups:
        group["lr"] = 0.3 / steps


with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(set_rate)
    session.prepare(model, optimizer)
    optimizer.register_step_pre_hook(clip)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
