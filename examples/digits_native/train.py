"""The training of ``train.c`` with NumPy: ``aot_backward_native`` calls the step, and PyTorch is not imported.

    python examples/digits_step/export.py digits_step.pt2
    python examples/digits_native/train.py digits_step.pt2

``pip install ./runtime/native`` installs ``aot_backward_native``.
"""

import sys
import time

import aot_backward_native as abn
import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH, TRAINING = 15, 64, 1347


def main(path: str) -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order].astype(np.int64)

    package = abn.load(path)
    step, net = package.step(), package.module("net").eval()
    package.seed(1)
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        step.param_groups[0]["lr"] = 0.01 * (1 + np.cos(np.pi * epoch / EPOCHS)) / 2
        rows = np.random.default_rng(epoch).permutation(TRAINING)
        losses = [step(images[r], labels[r]) for r in np.split(rows, range(BATCH, TRAINING, BATCH))]
        print(f"  epoch {epoch + 1}: loss {np.mean(losses):.4f}")
    print(f"{step.count} steps in {time.perf_counter() - began:.2f} s")

    for name, value in net.state.items():  # each function has separate weights
        value[...] = step.parameters[name]
    accuracy = (net(images[TRAINING:]).argmax(1) == labels[TRAINING:]).mean()
    print(f"test accuracy {100 * accuracy:.1f} %")
    assert accuracy > 0.96 and "torch" not in sys.modules


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["digits_step.pt2"]))
