"""An optimizer of the script's own whose step clips gradients, and then calls that of SGD."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron


class Clipped(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            clip_grad_norm_(group["params"], 0.1)
        return super().step(closure)


if __name__ == "__main__":
    with join() as session:
        model = perceptron()
        optimizer = Clipped(model.parameters(), lr=0.1, momentum=0.9)
        session.prepare(model, optimizer)
        for step in range(6):
            x, y = mine(session, *batch(step))
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep_loss(loss)
        keep(session, model=model)
