"""The script of fsdp.py with Atoll: atoll run --workers 2 --set memory.device=128KiB --set memory.chunk=16KiB
examples/coming_from/from_fsdp.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
with atoll.join() as session:
    model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    loader = DataLoader(data, batch_size=8, sampler=session.sampler(data, seed=0))
    for epoch in range(3):
        for inputs, labels in loader:
            inputs, labels = inputs.to(session.device), labels.to(session.device)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = session.reduce(loss.detach())
        if session.is_main:
            print(f"epoch {epoch}: loss {mean.item():.5f}")
    session.save("checkpoint")
