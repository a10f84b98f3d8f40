"""Handwritten digits, second half: trains the network of the package on them, beside eager PyTorch, and says how long each took.

    python examples/digits/load.py digits.pt2

The same network is trained by eager PyTorch, by the loaded module with the same loss function and optimizer around it, and by the loaded
training step, from the same weights, on the same batches and with the same dropout masks: so the loss curves and the accuracy can be compared, too.

How time is measured: all train in this process, with one thread (several wait for each other longer than they compute, on a network of this size
and a machine that has other work), in turns of an epoch; an epoch's time is divided by its steps, the first epoch of each is not counted (in it
``torch.optim`` imports Dynamo and Inductor, and memory is allocated), and what is shown is the median of the others.

Until ``torch.optim`` imports them, no part of Dynamo or Inductor is in the process; after that it is Dynamo's counters that show that nothing
was traced or compiled.
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
    """1,797 images of 8x8 pixels, shuffled once; three quarters to train on."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order, None] / 16
    labels = torch.from_numpy(digits.target)[order]
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


@dataclass
class Training:
    """One way of training: ``step`` trains the weights of ``net`` on a batch and returns its loss."""

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
    """The usual loop. Nothing here knows whether ``net`` is native code."""
    optimizer = torch.optim.Adam(net.train().parameters(), lr=LEARNING_RATE, **options)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(net, step)


def trainings(path: str) -> dict[str, Training]:
    """The package is loaded for each, since entries of one loaded package share their weights."""
    whole = aot_backward_runtime.load(path)
    return {
        "eager": by_autograd(network()),
        "eager, Adam(fused=True)": by_autograd(network(), fused=True),
        "loaded module": by_autograd(aot_backward_runtime.load(path).module()),
        "loaded training step": Training(whole.module(), whole.step().train()),
    }


def neither_traced_nor_compiled(path: str, images: Tensor, labels: Tensor) -> None:
    """A gradient and a step without a part of Dynamo or Inductor in the process."""
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
            torch.manual_seed(epoch)  # of the order of the images, and of dropout
            way.epoch(images, labels)

    from torch._dynamo.utils import counters

    assert not counters["frames"]  # torch.optim has imported Dynamo, which has looked at no frame

    eager = ways["eager"]
    usual = statistics.median(eager.seconds[1:])
    print(f"{len(eager.losses)} steps each, of {BATCH} images, with one thread; median of {EPOCHS - 1} epochs, in turns, after a first one\n")
    print(f"{'':24}  ms a step  eager's time / its  test accuracy  largest difference of a loss from eager's")
    for name, way in ways.items():
        median, reached = statistics.median(way.seconds[1:]), way.accuracy(test_images, test_labels)
        apart = max(abs(its - eagers) for its, eagers in zip(way.losses, eager.losses, strict=True))
        print(f"{name:24}  {1e3 * median:9.2f}  {usual / median:18.2f}  {reached:13.2%}  {apart:.1e}")
        assert reached > 0.97
        assert apart < 0.02  # of rounding, which training amplifies


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["digits.pt2"]))
