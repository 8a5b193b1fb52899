"""Schedule-free AdamW of the package schedulefree, with its train() and eval()."""

# needs: schedulefree
import schedulefree
from torch.nn.functional import cross_entropy
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=2)
    session.prepare(model, optimizer)
    optimizer.train()
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
        if step == 3:  # an evaluation in between
            optimizer.eval()
            keep_loss(cross_entropy(model(batch(99)[0]), batch(99)[1]))
            optimizer.train()
    optimizer.eval()
    keep(session, model=model)
