"""add_param_group in the middle of training: a thawed body gets a rate of its own."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    body, head = model[:8], model[8:]
    body.requires_grad_(False)
    optimizer = SGD(head.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    for step in range(6):
        if step == 3:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.01})
            session.prepare(model, optimizer)
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
