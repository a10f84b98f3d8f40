"""Handwritten digits, first half: export a small convolutional network and its whole training step into one package.

    python examples/digits/export.py digits.pt2
    python examples/digits/load.py digits.pt2

The network contains two layers that make training differ from a plain function. BatchNorm updates its statistics in the
forward. Dropout must draw the same masks as eager from the same seed. The package has two entries that share their
weights. ``net`` has a variant for ``train()`` and one for ``eval()``. ``step`` runs forward, backward and Adam's update
in one native call. The batch size is dynamic in both.
``aot-backward export examples/digits/export.py:entries -o digits.pt2`` writes the same package.
"""

import sys

import torch
from torch import nn

import aot_backward as ab

SEED, LEARNING_RATE = 3, 2e-3


def network() -> nn.Sequential:
    """Return a network from images (batch, 1, 8, 8) in [0, 1] to the logits (batch, 10) of the ten digits."""
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


def entries() -> dict[str, ab.Module | ab.Step]:
    net = network()
    images, labels = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))
    batch = {0: torch.export.Dim("batch", min=2, max=1024)}
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    train = ab.Variant((images, labels), dynamic_shapes=(batch, batch))
    return {
        "net": ab.Module(
            net, [ab.Variant((images,), dynamic_shapes=(batch,), mode=mode) for mode in ("train", "eval")]
        ),
        "step": ab.Step(net, [train], optimizer, loss_fn=nn.functional.cross_entropy),
    }


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["digits.pt2"]
    ab.export(path, entries(), progress=lambda what, done, total: print(f"  {what} {done}/{total}", flush=True))
    print(f"wrote {path}")
