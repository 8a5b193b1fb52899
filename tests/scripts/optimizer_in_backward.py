"""An optimizer for each parameter, stepped by a hook as soon as its gradient is there."""

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizers = {p: SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_at_once(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    session.prepare(model, list(optimizers.values()))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_at_once)
    for step in range(5):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        keep_loss(loss)
    keep(session, model=model)
