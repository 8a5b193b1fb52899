"""Settings other than the rate that change during training: momentum, weight decay, betas."""

from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        for group in optimizer.param_groups:
            group["betas"] = (0.5 + 0.08 * step, 0.99)
            group["weight_decay"] = 0.3 / (step + 1)
            group["eps"] = 1e-3
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
