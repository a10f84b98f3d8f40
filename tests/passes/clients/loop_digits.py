"""A plain loop over handwritten digits: momentum, ``zero_grad``, dropout, BatchNorm, and a smaller last batch."""

from __future__ import annotations

import torch
from modes import main
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

IMAGES, BATCH = 600, 64
EPOCH = -(-IMAGES // BATCH)


def network() -> nn.Sequential:
    """Return a net from images (batch, 1, 8, 8) in [0, 1] to the logits (batch, 10) of the ten digits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 10)),
    )


def train(steps: int) -> tuple[list[float], list[list[int]]]:
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:IMAGES, None] / 16
    labels = torch.from_numpy(digits.target)[:IMAGES]
    torch.manual_seed(3)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses: list[float] = []
    shapes: list[list[int]] = []
    while True:
        for rows in torch.randperm(IMAGES).split(BATCH):
            if len(losses) == steps:
                return losses, shapes
            optimizer.zero_grad()
            loss = cross_entropy(net(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            shapes.append(list(images[rows].shape))


if __name__ == "__main__":
    main(train, recorded=EPOCH)
