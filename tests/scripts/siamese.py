"""A siamese network: one model, called twice for each loss."""

# Adam's first steps are as long as its rate, whatever the batch: workers at their own pace make twice as
# many, and end further from plain torch's end by the chance of their order.
# own pace: 1.5
from torch.nn.functional import cosine_embedding_loss
from torch.optim import Adam
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = Adam(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        first, second = (mine(session, drawn(2 * step + each, 8, 8)) for each in range(2))
        alike = 2 * (first[:, 0] * second[:, 0] > 0).double() - 1
        loss = cosine_embedding_loss(model(first), model(second), alike)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
