"""Each layer is clipped to a norm of its own, by torch's newer functions and by torch._foreach_mul_."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        for layer in model:
            if parameters := list(layer.parameters()):
                norm = get_total_norm([p.grad for p in parameters])
                clip_grads_with_norm_(parameters, 0.05, norm)
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        keep_loss(loss)
    keep(session, model=model)
