"""Lion, an optimizer whose class is in the script itself."""

import torch
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine, perceptron


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(group["lr"] * (average * first + p.grad * (1 - first)).sign())
                average.mul_(second).add_(p.grad, alpha=1 - second)


if __name__ == "__main__":
    with join() as session:
        model = perceptron()
        optimizer = Lion(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(6):
            x, y = mine(session, *batch(step))
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
        keep(session, model=model)
