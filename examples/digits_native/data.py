"""Handwritten digits for ``train.c``: write scikit-learn's 1,797 images as bytes, in a fixed random order.

python examples/digits_native/data.py digits.bin
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["digits.bin"]
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    # 64 pixels from 0 to 16, and the digit
    rows = np.concatenate([digits.images.reshape(-1, 64), digits.target[:, None]], 1)[order]
    Path(path).write_bytes(rows.astype(np.uint8).tobytes())
    print(f"wrote {path}")
