"""torch.save of a whole prepared model, and of its state_dict, in the middle of training."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step == 2:
            session.barrier()
            torch.save(model, f"whole{session.rank}.pt")
            torch.save(model.state_dict(), f"state{session.rank}.pt")
    whole = torch.load(f"whole{session.rank}.pt", weights_only=False)
    state = perceptron()
    state.load_state_dict(torch.load(f"state{session.rank}.pt"))
    keep(session, model=model, whole=whole, state=state)
