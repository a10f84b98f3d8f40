"""What both halves share, without torch: 1,797 images of handwritten digits, and the order in which they are trained on."""

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH, TRAINING, RATE = 15, 64, 1347, 1e-2


def images_and_labels() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shuffled once; three quarters to train on, one to test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


def batches() -> Iterator[tuple[float, np.ndarray]]:
    """The learning rate and the rows of each step: a cosine from RATE down to 0, epoch by epoch."""
    random = np.random.default_rng(1)
    for epoch in range(EPOCHS):
        order = random.permutation(TRAINING)
        for start in range(0, TRAINING, BATCH):
            yield RATE * (1 + np.cos(np.pi * epoch / EPOCHS)) / 2, order[start : start + BATCH]
