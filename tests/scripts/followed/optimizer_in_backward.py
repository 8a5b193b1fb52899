"""An optimizer for each parameter, all stepped after backward, as the line about steps within it says."""

# asked: call it after backward
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizers = [SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]
    session.prepare(model, optimizers)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
