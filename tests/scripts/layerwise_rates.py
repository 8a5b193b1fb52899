"""A learning rate of its own for every layer, as in fine-tuning."""

from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    layers = [layer for layer in model if hasattr(layer, "weight")]
    groups = [
        {"params": layer.parameters(), "lr": 0.01 * 0.8**depth}
        for depth, layer in enumerate(reversed(layers))
    ]
    optimizer = AdamW(groups)
    session.prepare(model, optimizer)
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
