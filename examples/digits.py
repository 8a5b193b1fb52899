"""Handwritten digits in seconds: scikit-learn's 8 x 8 images and a small network.

python examples/digits.py
atoll run --workers 2 examples/digits.py --epochs 20
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="images in a worker's step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    images, digits = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(digits)[order]
    training, test = TensorDataset(images[:1500], digits[:1500]), (images[1500:], digits[1500:])

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    with atoll.join() as session:
        model.to(session.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        session.prepare(model, optimizer)
        torch.manual_seed(args.seed + session.rank)  # random layers and augmentation: each worker's own
        sampler = session.sampler(training, seed=args.seed)
        loader = DataLoader(training, args.batch, sampler=sampler)
        session.expect(args.epochs * len(loader))
        for _ in range(args.epochs):
            for x, y in loader:
                loss = F.cross_entropy(model(x.to(session.device)), y.to(session.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                session.log(loss=loss)

        mine = slice(session.rank, None, session.world)  # each worker tests its share
        with torch.no_grad():
            guesses = model(test[0][mine].to(session.device)).argmax(1).cpu()
        right = session.reduce(float((guesses == test[1][mine]).sum()), op="sum")
        if session.is_main:
            accuracy = right / len(test[1])
            print(f"test accuracy {accuracy:.1%} on {len(test[1])} images, after {session.iteration} steps")


if __name__ == "__main__":
    main()
