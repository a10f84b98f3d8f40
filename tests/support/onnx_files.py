"""ONNX files that tests share, and a runner that needs only onnxruntime and NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch


class Session:
    """One ONNX file. ``inputs`` names all inputs, also inputs with a default."""

    def __init__(self, path: Path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.required = {i.name: i for i in self.session.get_inputs()}
        self.defaults = {i.name: i for i in self.session.get_overridable_initializers()}
        self.outputs = {o.name: o for o in self.session.get_outputs()}

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the session with the entries of ``feeds`` that it has inputs for."""
        given = {n: _value(v) for n, v in feeds.items() if n in self.required or n in self.defaults}
        names = list(self.outputs)
        found = zip(names, self.session.run_with_ort_values(names, given), strict=True)
        # NumPy does not support bfloat16: return it unchanged
        return {n: v if v.data_type() == "tensor(bfloat16)" else v.numpy() for n, v in found}


def _value(value: Any) -> Any:
    if isinstance(value, onnxruntime.OrtValue):
        return value
    return onnxruntime.OrtValue.ortvalue_from_numpy(array(value))


def array(value: Any) -> np.ndarray:
    return value.detach().contiguous().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def gradients(folder: Path, name: str, feeds: Mapping[str, Any], incoming: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the results of ``NAME.forward.onnx`` and ``NAME.backward.onnx`` together."""
    results = Session(folder / f"{name}.forward.onnx")(feeds)
    return results | Session(folder / f"{name}.backward.onnx")({**feeds, **results, **incoming})


def train(path: Path, steps: int, feeds: Mapping[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses of a few steps from the stored state, and the state after them."""
    step, state, losses = Session(path), dict[str, np.ndarray](), []
    for _ in range(steps):
        results = step({**feeds, **state})
        state = {n.removeprefix("updated."): v for n, v in results.items() if n.startswith("updated.")}
        losses.append(float(results["loss"]))
    return losses, state
