"""Handwritten digits trained by onnxruntime, first half: export forward, backward and AdamW as one ONNX graph.

    python examples/onnx_training/export.py digits.onnx
    python examples/onnx_training/train.py digits.onnx

``digits.step.onnx`` is the training step, ``digits.net.inference.onnx`` the network. The batch size is dynamic in both.
``aot-backward export examples/onnx_training/export.py:entries -o digits.onnx --format onnx`` writes the same files.
This script also trains in eager, so that you can compare the accuracy.
"""

import sys

import torch
from data import RATE, batches, images_and_labels
from torch import nn

import aot_backward as ab


def network() -> nn.Sequential:
    """Return a network from images (batch, 1, 8, 8) in [0, 1] to the logits (batch, 10). No dropout: ONNX cannot draw
    eager's masks."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def entries() -> dict[str, ab.Step | ab.Module]:
    net = network()
    images, labels = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))
    batch = {0: torch.export.Dim("batch", min=2, max=1024)}
    train = ab.Variant((images, labels), dynamic_shapes=(batch, batch))
    evaluate = ab.Variant((images,), dynamic_shapes=(batch,), mode="eval")
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    return {
        "step": ab.Step(net, [train], optimizer, loss_fn=nn.functional.cross_entropy),
        "net": ab.Module(net, [evaluate]),
    }


def eager() -> float:
    """Return the accuracy that eager reaches with the same batches."""
    images, labels, test_images, test_labels = map(torch.from_numpy, images_and_labels())
    net = network().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    for rate, rows in batches():
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return (net.eval()(test_images).argmax(1) == test_labels).float().mean().item()


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["digits.onnx"]
    for file in ab.export_onnx(path, entries()):
        print(f"wrote {file.path}: {file.nodes} nodes; compared by {file.compared}")
    print(f"eager: test accuracy {100 * eager():.1f} %")
