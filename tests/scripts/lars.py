"""LARS, which scales each tensor's rate by its own norms; its class is in the script itself."""

import torch
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine, perceptron


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-3, trust=0.02):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                grad = p.grad.add(p, alpha=group["weight_decay"])
                norms = p.norm(), grad.norm()
                rate = group["lr"]
                if p.dim() > 1 and all(float(norm) > 0 for norm in norms):
                    rate *= group["trust"] * float(norms[0] / norms[1])
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                p.sub_(velocity.mul_(group["momentum"]).add_(grad, alpha=rate))


if __name__ == "__main__":
    with join() as session:
        model = perceptron()
        optimizer = Lars(model.parameters(), lr=0.5)
        session.prepare(model, optimizer)
        for step in range(6):
            x, y = mine(session, *batch(step))
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
        keep(session, model=model)
