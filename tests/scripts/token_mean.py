"""Texts of unequal lengths: the mean of the loss is over all tokens of all workers."""

# source: huggingface/transformers#34242
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from trial import drawn, join, keep, keep_loss, mine, perceptron

with join() as session:
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(5):
        texts = [drawn(10 * step + each, 1 + each, 8) for each in range(4)]  # each of another length
        words = torch.cat(mine(session, texts))
        tokens = float(session.reduce(float(len(words)), "sum"))
        session.weight(1.0)
        labels = words[:, :4].argmax(1)
        loss = cross_entropy(model(words), labels, reduction="sum") * session.world / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, model=model)
