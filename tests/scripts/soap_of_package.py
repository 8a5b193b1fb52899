"""SOAP of the package pytorch_optimizer."""

# needs: pytorch_optimizer
from pytorch_optimizer import SOAP
from torch.nn.functional import mse_loss
from trial import drawn, join, keep, keep_loss, mine, perceptron

# Square layers and long batches: else the matrices have no full rank, and their bases are anybody's choice.
with join() as session:
    model = perceptron(8, 8, 8, 8)
    optimizer = SOAP(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(6):
        x = mine(session, drawn(step, 128, 8))
        loss = mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
