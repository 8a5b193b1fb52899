"""load_state_dict of the model and of the optimizer in the middle of training: back to an earlier step."""

import copy

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        if step == 2:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 4:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
