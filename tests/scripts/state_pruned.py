"""ReLoRA's way to begin anew: after each merge most of the optimizer's state is set to zero in place."""

from torch.nn.functional import cross_entropy
from torch.optim import Adam
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01, eps=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step % 2:
            for p in model.parameters():
                state = optimizer.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    moment = state[name]
                    moment[moment.abs() < moment.abs().mean()] = 0
    keep(session, model=model)
