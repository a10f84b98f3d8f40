"""Handwritten digits, first half: writes a small convolutional network and its gradients into one package.

    python examples/digits/export.py digits.pt2
    python examples/digits/load.py digits.pt2

The network has what makes training differ from a plain function: BatchNorm, whose statistics the forward pass updates, and dropout,
which must draw eager's masks from eager's seed. Two variants go into the package, for ``train()`` and ``eval()``; the batch size is left
open in both. ``aot-backward export examples/digits/export.py:entries -o digits.pt2`` does the same from the command line.
"""

import sys

import torch
from torch import nn

import aot_backward as ab

SEED = 3


def network() -> nn.Sequential:
    """From images (batch, 1, 8, 8) in [0, 1] to the logits (batch, 10) of the ten digits."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def entries() -> dict[str, ab.Module]:
    images = torch.rand(8, 1, 8, 8)
    shapes = ({0: torch.export.Dim("batch", min=2, max=1024)},)
    return {"net": ab.Module(network(), [ab.Variant((images,), dynamic_shapes=shapes, mode=mode) for mode in ("train", "eval")])}


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["digits.pt2"]
    ab.export(path, entries(), progress=lambda what, done, total: print(f"  {what} {done}/{total}", flush=True))
    print(f"wrote {path}")
