"""LAMB, which scales each tensor's step by its own norms; its class is in the script itself."""

import torch
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine, perceptron


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                square = state.setdefault("square", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - first)
                square.lerp_(p.grad**2, 1 - second)
                update = mean / (square.sqrt() + group["eps"])
                trust = p.norm() / update.norm()
                p.sub_(update, alpha=float(group["lr"] * trust) if float(trust) > 0 else group["lr"])


if __name__ == "__main__":
    with join() as session:
        model = perceptron()
        optimizer = Lamb(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(6):
            x, y = mine(session, *batch(step))
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
        keep(session, model=model)
