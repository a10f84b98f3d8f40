"""Handwritten digits with a compiled training step, first half: export forward, backward, clipping and AdamW as one
native call.

    python examples/digits_step/export.py digits_step.pt2
    python examples/digits_step/train.py digits_step.pt2

The package has two entries that share their weights: ``step`` trains them, ``net`` evaluates the network. The batch
size is dynamic in both. ``aot-backward export examples/digits_step/export.py:entries -o digits_step.pt2`` writes the
same package.
"""

import sys

import torch
from torch import nn

import aot_backward as ab


def network() -> nn.Sequential:
    """Return a network from images (batch, 1, 8, 8) in [0, 1] to the logits (batch, 10) of the ten digits."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 4 * 4, 10),
    )


def entries() -> dict[str, ab.Step | ab.Module]:
    net = network()
    images, labels = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))
    batch = {0: torch.export.Dim("batch", min=2, max=1024)}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train = ab.Variant((images, labels), dynamic_shapes=(batch, batch))
    evaluate = ab.Variant((images,), dynamic_shapes=(batch,), mode="eval")
    return {
        "step": ab.Step(net, [train], optimizer, loss_fn=nn.functional.cross_entropy, clip_norm=5.0),
        "net": ab.Module(net, [evaluate]),
    }


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["digits_step.pt2"]
    ab.export(path, entries(), progress=lambda what, done, total: print(f"  {what} {done}/{total}", flush=True))
    print(f"wrote {path}")
