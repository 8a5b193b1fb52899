"""The 8-bit Adam of torchao: the state of a large parameter is a tensor of the class OptimState8bit."""

# needs: torchao
# tolerance: 5e-3
from torch.nn.functional import cross_entropy
from torchao.optim import Adam8bit
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron(8, 80, 80, 80, 4).float()
    optimizer = Adam8bit(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x.float()), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
