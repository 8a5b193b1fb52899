"""Two losses, of which each trains a part of the model: loss.backward(inputs=...)."""

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    trunk, head = list(model[:-1].parameters()), list(model[-1].parameters())
    for step in range(5):
        x, y = mine(session, *batch(step))
        out = model(x)
        loss = cross_entropy(out, y)
        loss.backward(inputs=head, retain_graph=True)
        (loss + 0.1 * out.square().mean()).backward(inputs=trunk)
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
