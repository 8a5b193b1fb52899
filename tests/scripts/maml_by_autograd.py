"""MAML with torch.autograd.grad(create_graph=True) in place of torch.func."""

# source: pytorch/pytorch#63929
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(4):
        tasks = mine(session, [batch(4 * step + each, 6) for each in range(4)])
        total = torch.zeros((), dtype=torch.float64)
        for x, y in tasks:
            values = dict(model.named_parameters())
            inner = cross_entropy(model(x[:3]), y[:3])
            slopes = torch.autograd.grad(inner, list(values.values()), create_graph=True)
            adapted = {name: p - 0.1 * each for (name, p), each in zip(values.items(), slopes, strict=True)}
            total = total + cross_entropy(functional_call(model, adapted, (x[3:],)), y[3:]) / len(tasks)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(total)
    keep(session, model=model)
