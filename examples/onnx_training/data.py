"""Data of both halves, without torch: 1,797 images of handwritten digits and their order in the training."""

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH, TRAINING, RATE = 15, 64, 1347, 1e-2


def images_and_labels() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images and labels in a fixed random order: three quarters for training, the others for tests."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    return images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:]


def batches() -> Iterator[tuple[float, np.ndarray]]:
    """Yield the learning rate and the rows of each step. The rate is a cosine that falls from RATE towards 0, epoch by
    epoch."""
    random = np.random.default_rng(1)
    for epoch in range(EPOCHS):
        order = random.permutation(TRAINING)
        for start in range(0, TRAINING, BATCH):
            yield RATE * (1 + np.cos(np.pi * epoch / EPOCHS)) / 2, order[start : start + BATCH]
