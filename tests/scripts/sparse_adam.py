"""SparseAdam for an embedding with sparse gradients, Adam for the rest."""

# source: Lightning-AI/pytorch-lightning#5355
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trial import classes, join, keep, keep_loss, mine

with join() as session:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(200, 16, sparse=True), nn.Linear(16, 4)
    model = nn.Sequential(embedding, head).double()
    sparse = torch.optim.SparseAdam(embedding.parameters(), lr=0.05)
    dense = torch.optim.Adam(head.parameters(), lr=0.05)
    session.prepare(model, [sparse, dense])
    for step in range(6):
        words = mine(session, classes(step, 8, 200))
        loss = cross_entropy(model(words), words % 4)
        loss.backward()
        sparse.step()
        dense.step()
        model.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
