"""Handwritten digits in a web page: the network trains where the page is open, without a server.

    aot-backward export examples/browser/export.py:entries --format wasm -o examples/browser/digits
    python examples/browser/export.py examples/browser/digits.bin
    python -m http.server --directory examples/browser

The first command writes the training step and the prediction as a WebAssembly module. The second writes the images:
1,797 rows of a label and 8x8 pixels, a byte each. Then open http://localhost:8000.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import aot_backward as ab

SEED, LEARNING_RATE = 3, 2e-3


def network() -> nn.Sequential:
    """Return a network from images (batch, 1, 8, 8) in [0, 1] to the logits (batch, 10) of the ten digits."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def entries() -> dict[str, ab.Step | ab.Function]:
    """In the page the two have weights of their own, as in C: ``page.mjs`` copies them from the step before it
    predicts."""
    net = network()
    images, labels = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))
    batch = {0: torch.export.Dim("batch", min=2, max=1024)}
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    return {
        "train": ab.Step(
            net,
            [ab.Variant((images, labels), dynamic_shapes=(batch, batch))],
            optimizer,
            loss_fn=nn.functional.cross_entropy,
        ),
        "predict": ab.Function(net, [ab.Variant((images[:1],), mode="eval")]),
    }


def write_images(path: Path) -> None:
    from sklearn.datasets import load_digits  # pip install scikit-learn

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.from_numpy(digits.target)[:, None], torch.from_numpy(digits.data)], 1)[order]
    path.write_bytes(rows.to(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    write_images(Path(sys.argv[1]))
