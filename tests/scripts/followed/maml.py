"""MAML on copies of the parameters, as the line about transforms of parameters says."""

# asked: transform copies
import torch
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)

    def task_loss(values, x, y):
        return cross_entropy(functional_call(model, values, (x,)), y)

    for step in range(4):
        tasks = mine(session, [batch(4 * step + each, 6) for each in range(4)])
        values = {name: p.clone() for name, p in model.named_parameters()}
        total = torch.zeros((), dtype=torch.float64)
        for x, y in tasks:
            slopes = grad(task_loss)(values, x[:3], y[:3])
            adapted = {name: value - 0.1 * slopes[name] for name, value in values.items()}
            total = total + task_loss(adapted, x[3:], y[3:]) / len(tasks)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(total)
    keep(session, model=model)
