"""Shampoo, with a root of a matrix for each dimension of a tensor; its class is in the script itself."""

import torch
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine, perceptron


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr, eps=1e-2):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, update = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    state["factors"] = [group["eps"] * torch.eye(size, dtype=p.dtype) for size in p.shape]
                state["step"] += 1
                for dim, factor in enumerate(state["factors"]):
                    flat = p.grad.movedim(dim, 0).reshape(p.shape[dim], -1)
                    factor.add_(flat @ flat.T)
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors @ torch.diag(values.clamp(min=1e-12) ** (-0.5 / p.dim())) @ vectors.T
                    update = torch.tensordot(root, update, dims=([1], [dim])).movedim(0, dim)
                p.sub_(update, alpha=group["lr"])


# tolerance: 1e-7
if __name__ == "__main__":
    with join() as session:
        model = perceptron()
        optimizer = Shampoo(model.parameters(), lr=0.05)
        session.prepare(model, optimizer)
        for step in range(5):
            x, y = mine(session, *batch(step))
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
        keep(session, model=model)
