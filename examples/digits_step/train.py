"""Handwritten digits with a compiled training step, second half: train, stop half-way, resume from a file, and end in
the same bits.

    python examples/digits_step/train.py digits_step.pt2

Nothing here is traced or compiled: Dynamo and Inductor are never imported.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import aot_backward_runtime

EPOCHS, BATCH, TRAINING = 15, 64, 1347


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 1,797 images of 8x8 pixels in a fixed random order: three quarters for training, the others for tests."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order, None] / 16
    labels = torch.from_numpy(digits.target)[order]
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


def train(package, images: torch.Tensor, labels: torch.Tensor, file: Path, until: int, resume: bool = False) -> None:
    """Train up to epoch ``until``, from the start or from ``file``. Save everything that the next epoch needs to
    ``file``."""
    step = package.step().train()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step, EPOCHS)
    torch.manual_seed(1)  # for the order of the images and for dropout
    first = 0
    if resume:
        saved = step.resume(file)  # the weights, AdamW's state, the learning rate, the random state
        first = saved["epoch"]
        schedule.load_state_dict(saved["schedule"])
    for epoch in range(first, until):
        losses = [step(images[rows], labels[rows]) for rows in torch.randperm(len(images)).split(BATCH)]
        schedule.step()
        print(
            f"  epoch {epoch + 1}: loss {torch.stack(losses).mean():.4f}, learning rate {schedule.get_last_lr()[0]:.6f}"
        )
    step.save(file, {"epoch": until, "schedule": schedule.state_dict()})


@torch.no_grad()
def accuracy(package, images: torch.Tensor, labels: torch.Tensor) -> float:
    return (package.module("net").eval()(images).argmax(1) == labels).float().mean().item()


def main(path: str) -> None:
    images, labels, test_images, test_labels = data()
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole.safetensors", Path(folder) / "parts.safetensors"

        package = aot_backward_runtime.load(path)
        began = time.perf_counter()
        train(package, images, labels, whole, EPOCHS)
        took = time.perf_counter() - began
        print(
            f"{package.step().count} steps in {took:.2f} s; test accuracy {100 * accuracy(package, test_images, test_labels):.1f} %"
        )

        print("again, stopped after 6 epochs, and resumed from a file by another copy of the package:")
        train(aot_backward_runtime.load(path), images, labels, parts, 6)
        resumed = aot_backward_runtime.load(path)
        train(resumed, images, labels, parts, EPOCHS, resume=True)

        same = all(torch.equal(p, resumed.step().parameters[name]) for name, p in package.step().parameters.items())
        print(f"the same weights, bit for bit: {same}; the same file: {whole.read_bytes() == parts.read_bytes()}")
        assert same and whole.read_bytes() == parts.read_bytes()
        assert accuracy(resumed, test_images, test_labels) > 0.96
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["digits_step.pt2"]))
