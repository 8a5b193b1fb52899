"""Hooks of modules: one before forward, one after it, and one in backward."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model[3].register_forward_hook(lambda module, inputs, output: output * 2)
    model[4].register_full_backward_hook(lambda module, slopes, outside: (slopes[0] * 0.5,))
    optimizer = SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
