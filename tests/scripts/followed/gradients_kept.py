"""zero_grad(set_to_none=False), and gradients that are read before the step, as the line about them says."""

# asked: read it before optimizer.step()
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        keep_loss(loss)
        keep_loss(sum(p.grad.norm() for p in model.parameters()))
        optimizer.step()
    keep(session, model=model)
