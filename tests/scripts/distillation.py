"""Distillation: a frozen teacher that is not prepared, and a student that is."""

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.optim import AdamW
from trial import batch, join, keep, keep_loss, mine, perceptron

with join() as session:
    teacher, student = perceptron(8, 64, 4).eval().requires_grad_(False), perceptron()
    optimizer = AdamW(student.parameters(), lr=0.01)
    session.prepare(student, optimizer)
    for step in range(5):
        x, y = mine(session, *batch(step))
        with torch.no_grad():
            right = log_softmax(teacher(x) / 2, 1)
        out = student(x)
        apart = kl_div(log_softmax(out / 2, 1), right, reduction="batchmean", log_target=True)
        loss = cross_entropy(out, y) + 4 * apart
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep_loss(loss)
    keep(session, student=student)
