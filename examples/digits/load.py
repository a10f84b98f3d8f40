"""Handwritten digits, second half: trains the network of the package, to over 97 % on images it has not seen, by native code alone.

    python examples/digits/load.py digits.pt2

The same loop then trains the same network in eager PyTorch from the same seed, and the two loss curves are compared. Until the optimizer
is made, no part of Dynamo or Inductor is in the process; ``torch.optim`` itself imports them, so after the training it is their counters
that show that nothing was traced or compiled.
"""

import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import aot_backward_runtime

EPOCHS, BATCH, TRAINING = 8, 64, 1347


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8x8 pixels, shuffled once; three quarters to train on."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order, None] / 16
    labels = torch.from_numpy(digits.target)[order]
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


def train(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The loss of every step. Nothing here knows whether ``net`` is native code."""
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    torch.manual_seed(1)  # of the order of the images, and of dropout
    losses = []
    net.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(BATCH):
            loss = cross_entropy(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    net.eval()
    return (net(images).argmax(1) == labels).float().mean().item()


def nothing_compiled() -> bool:
    """Whether Dynamo, which ``torch.optim`` has imported, has looked at any frame."""
    import torch._dynamo.utils

    return not torch._dynamo.utils.counters["frames"]


def main(path: str) -> None:
    images, labels, test_images, test_labels = data()
    net = aot_backward_runtime.load(path).module()
    net(images[:BATCH]).sum().backward()  # the first gradient
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
    net = aot_backward_runtime.load(path).module()  # afresh: that pass has moved the statistics of BatchNorm

    began = time.perf_counter()
    losses = train(net, images, labels)
    seconds, reached = time.perf_counter() - began, accuracy(net, test_images, test_labels)
    assert nothing_compiled()

    from export import network

    began = time.perf_counter()
    eager = network()
    eager_losses = train(eager, images, labels)
    eager_seconds, eager_reached = time.perf_counter() - began, accuracy(eager, test_images, test_labels)

    per_epoch = len(losses) // EPOCHS
    print("epoch   native     eager      mean loss")
    for epoch in range(EPOCHS):
        ours, theirs = (sum(c[epoch * per_epoch : (epoch + 1) * per_epoch]) / per_epoch for c in (losses, eager_losses))
        print(f"{epoch + 1:5}   {ours:.6f}   {theirs:.6f}")
    apart = max(abs(ours - theirs) for ours, theirs in zip(losses, eager_losses, strict=True))
    print(f"largest difference of the two loss curves, over {len(losses)} steps: {apart:.1e}")
    print(f"training took {seconds:.1f} s with native code, {eager_seconds:.1f} s in eager")
    print(f"test accuracy {reached:.2%} with native code, {eager_reached:.2%} in eager, on {len(test_labels)} images")
    assert reached > 0.97
    assert apart < 0.02  # of rounding, which training amplifies


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["digits.pt2"]))
