"""Trains with Accelerate:
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/coming_from/with_accelerate.py"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"epoch {epoch}: loss {mean.item():.5f}")
accelerator.save_state("checkpoint")
accelerator.end_training()
