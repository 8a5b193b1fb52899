"""Two losses of one forward, each with a backward of its own."""

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        out = model(x)
        first, second = cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(first + second)
    keep(session, model=model)
