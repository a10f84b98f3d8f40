"""Handwritten digits trained by onnxruntime, second half: train without torch.

python examples/onnx_training/train.py digits.onnx
"""

import sys
import time

import numpy as np
import onnxruntime
from data import BATCH, TRAINING, batches, images_and_labels


def opened(path: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # no warning for weights that an input may replace: this is intended here
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main(path: str) -> None:
    stem = path.removesuffix(".onnx")
    step, net = opened(f"{stem}.step.onnx"), opened(f"{stem}.net.inference.onnx")
    images, labels, test_images, test_labels = images_and_labels()

    outputs = [o.name for o in step.get_outputs()]  # loss, updated.0.weight, updated.optimizer.exp_avg.0.weight, …
    state: dict[str, np.ndarray] = {}  # empty at first: inputs that are not passed have the exported values
    losses = []
    began = time.perf_counter()
    for rate, rows in batches():
        inputs = {"input": images[rows], "target": labels[rows], "optimizer.0.lr": np.array(rate)}
        results = dict(zip(outputs, step.run(outputs, inputs | state), strict=True))
        state = {name.removeprefix("updated."): value for name, value in results.items() if name.startswith("updated.")}
        losses.append(float(results["loss"]))
    took = time.perf_counter() - began

    weights = {i.name: state[i.name] for i in net.get_overridable_initializers()}  # the inputs that have a default
    (logits,) = net.run(["output"], {"input": test_images} | weights)
    accuracy = (logits.argmax(1) == test_labels).mean()
    epoch = -(-TRAINING // BATCH)
    print(
        f"{len(losses)} steps in {took:.2f} s; loss {np.mean(losses[:epoch]):.4f} in the first epoch, {np.mean(losses[-epoch:]):.4f} in the last"
    )
    print(f"onnxruntime: test accuracy {100 * accuracy:.1f} %")
    assert accuracy > 0.95
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["digits.onnx"]))
