"""The script of ddp.py with Atoll: atoll run --workers 2 examples/coming_from/from_ddp.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
with atoll.join() as session:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    loader = DataLoader(data, batch_size=4, sampler=session.sampler(data, seed=0))
    for epoch in range(3):
        for number, (inputs, labels) in enumerate(loader):
            inputs, labels = inputs.to(session.device), labels.to(session.device)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if number % 2 == 0:
                with session.no_sync():
                    (loss / 2).backward()
                continue
            (loss / 2).backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = session.reduce(loss.detach())
        if session.is_main:
            print(f"epoch {epoch}: loss {mean.item():.5f}")
    session.save("checkpoint")
