"""Handwritten digits, second half: train the network with the package and in eager PyTorch, and compare their times.

    python examples/digits/load.py digits.pt2

The script trains the same network in eager, with the loaded module in the same training loop, and with the loaded
training step. All start from the same weights and use the same batches and dropout masks, so you can also compare their
losses and accuracies.

Times: all trainings run in this process on one thread and take turns, one epoch each. With several threads a network of
this size waits longer than it computes. The first epoch is not counted: ``torch.optim`` imports Dynamo and Inductor in
it, and memory is allocated. The table shows the time of a step, as the median over the other epochs.

Neither Dynamo nor Inductor is imported until ``torch.optim`` imports them. After that, Dynamo's counters show that it
has traced nothing.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from export import LEARNING_RATE, network
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import aot_backward_runtime

EPOCHS, BATCH, TRAINING = 5, 16, 1347


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,797 images of 8x8 pixels in a fixed random order: three quarters for training, the others for tests."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order, None] / 16
    labels = torch.from_numpy(digits.target)[order]
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


@dataclass
class Training:
    """A way to train: ``step`` trains the weights of ``net`` on a batch and returns its loss."""

    net: nn.Module
    step: Callable[[Tensor, Tensor], Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of a step, by epochs

    def epoch(self, images: Tensor, labels: Tensor) -> None:
        batches = torch.randperm(len(images)).split(BATCH)
        began = time.perf_counter()
        self.losses += [self.step(images[rows], labels[rows]).item() for rows in batches]
        self.seconds.append((time.perf_counter() - began) / len(batches))

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.net.eval()
        return (self.net(images).argmax(1) == labels).float().mean().item()


def by_autograd(net: nn.Module, **options: bool) -> Training:
    """Return the usual training loop. It is the same for eager and for native code."""
    optimizer = torch.optim.Adam(net.train().parameters(), lr=LEARNING_RATE, **options)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(net, step)


def trainings(path: str) -> dict[str, Training]:
    """Return the trainings. Each loads the package again, because the entries of one loaded package share their
    weights."""
    whole = aot_backward_runtime.load(path)
    return {
        "eager": by_autograd(network()),
        "eager, Adam(fused=True)": by_autograd(network(), fused=True),
        "loaded module": by_autograd(aot_backward_runtime.load(path).module()),
        "loaded training step": Training(whole.module(), whole.step().train()),
    }


def neither_traced_nor_compiled(path: str, images: Tensor, labels: Tensor) -> None:
    """Compute a gradient and a step before Dynamo and Inductor are imported."""
    package = aot_backward_runtime.load(path)
    cross_entropy(package.module()(images), labels).backward()
    package.step()(images, labels)
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()


def main(path: str) -> None:
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = data()
    neither_traced_nor_compiled(path, images[:BATCH], labels[:BATCH])

    ways = trainings(path)
    for epoch in range(EPOCHS):
        for way in ways.values():
            torch.manual_seed(epoch)  # for the order of the images and for dropout
            way.epoch(images, labels)

    from torch._dynamo.utils import counters

    assert not counters["frames"]  # torch.optim has imported Dynamo, but nothing was traced

    eager = ways["eager"]
    usual = statistics.median(eager.seconds[1:])
    print(
        f"{len(eager.losses)} steps each, of {BATCH} images, with one thread; median of {EPOCHS - 1} epochs, in turns, after a first one\n"
    )
    print(f"{'':24}  ms a step  eager's time / its  test accuracy  largest difference of a loss from eager's")
    for name, way in ways.items():
        median, reached = statistics.median(way.seconds[1:]), way.accuracy(test_images, test_labels)
        apart = max(abs(its - eagers) for its, eagers in zip(way.losses, eager.losses, strict=True))
        print(f"{name:24}  {1e3 * median:9.2f}  {usual / median:18.2f}  {reached:13.2%}  {apart:.1e}")
        assert reached > 0.97
        assert apart < 0.02  # training amplifies rounding


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["digits.pt2"]))
