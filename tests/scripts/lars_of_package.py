"""LARS of the package pytorch_optimizer."""

# needs: pytorch_optimizer
# A step of LARS is as long as the parameter, whatever the batch: workers at their own pace, which make twice
# as many, go more than twice as far with momentum.
# own pace: 2
from pytorch_optimizer import LARS
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = LARS(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
