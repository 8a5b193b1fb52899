"""SOAP: Adam in the eigenbasis of Shampoo's matrices; its class is in the script itself."""

import torch
from torch.nn.functional import mse_loss
from trial import drawn, join, keep, keep_loss, mine, perceptron


class Soap(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, every=2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                    state["left"] = torch.zeros(len(p), len(p), dtype=p.dtype)
                    state["basis"] = torch.eye(len(p), dtype=p.dtype)
                if p.dim() > 1:
                    state["left"].lerp_(p.grad @ p.grad.T, 1 - second)
                    if state["step"] % group["every"] == 0:
                        state["basis"] = torch.linalg.eigh(state["left"])[1]
                basis = state["basis"]
                state["step"] += 1
                state["square"].lerp_((basis.T @ p.grad) ** 2, 1 - second)
                state["mean"].lerp_(p.grad, 1 - first)
                mean = basis.T @ state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                p.sub_(basis @ (mean / (square.sqrt() + group["eps"])), alpha=group["lr"])


# Square layers and long batches: else the matrices have no full rank, and their bases are anybody's choice.
if __name__ == "__main__":
    with join() as session:
        model = perceptron(8, 8, 8, 8)
        optimizer = Soap(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(5):
            x = mine(session, drawn(step, 128, 8))
            loss = mse_loss(model(x), x.sin())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
        keep(session, model=model)
