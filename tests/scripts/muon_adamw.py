"""Two optimizers for one model: Muon for matrices, AdamW for everything else."""

# source: KellerJordan/modded-nanogpt#99
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    muon = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    adamw = AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)
    session.prepare(model, [muon, adamw])
    for step in range(6):
        x, y = mine(session, *batch(step))
        loss = cross_entropy(model(x), y)
        loss.backward()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
