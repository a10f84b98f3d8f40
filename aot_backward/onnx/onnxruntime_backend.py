"""Run ONNX graphs in place of native code: the runtime's modules, gradients and steps call them, so that both are
checked alike."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.reference
import torch

from aot_backward_exporters.onnx.model import Names, Translated, bits_of, element_type, numpy_of, tensor_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.expressions import evaluate, symbols_of
from aot_backward_runtime.format.manifest import LibrarySpec, Manifest, TensorSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.library import Library

Run = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Takes tensors by the inputs' names, returns tensors of all outputs by name."""


def engine() -> str:
    """Return the engine that runs graphs here: "onnxruntime", or the slow "onnx.reference"."""
    return "onnxruntime" if importlib.util.find_spec("onnxruntime") is not None else "onnx.reference"


def runner(model: onnx.ModelProto, engine: str) -> Run:
    """Return a function that runs the graph. Raise :class:`ExportError` naming an operator that the engine lacks a
    kernel for."""
    outputs = [o.name for o in model.graph.output]
    if engine == "onnx.reference":
        evaluator = onnx.reference.ReferenceEvaluator(model)

        def run(feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = evaluator.run(None, {name: numpy_of(t) for name, t in feeds.items()})
            return {name: tensor_of(value) for name, value in zip(outputs, results, strict=True)}

        return run
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exception classes share only this base
        raise ExportError(
            f"{model.graph.name}: onnxruntime {onnxruntime.__version__} cannot run the graph: {_first_line(error)}"
        ) from error
    value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type

    def run_session(feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ort_inputs = {n: value(bits_of(t), element_type(t.dtype)) for n, t in feeds.items()}
        try:
            results = session.run_with_ort_values(outputs, ort_inputs)
        except Exception as error:
            raise ExportError(
                f"{model.graph.name}: onnxruntime {onnxruntime.__version__} fails in the graph: {_first_line(error)}"
            ) from error
        return {n: _tensor(v) for n, v in zip(outputs, results, strict=True)}

    return run_session


def _tensor(value: Any) -> torch.Tensor:
    if value.data_type() == "tensor(bfloat16)":  # NumPy lacks bfloat16
        buffer = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
        return (
            torch.frombuffer(buffer, dtype=torch.bfloat16).reshape(value.shape())
            if buffer
            else torch.empty(value.shape(), dtype=torch.bfloat16)
        )
    return tensor_of(value.numpy())


def _first_line(error: Exception) -> str:
    """Return the first line of onnxruntime's error, without the location in its own source."""
    return re.sub(r"/\S*onnxruntime/\S+\s", "", str(error).splitlines()[0])


class OnnxLibrary(Library):
    """One ONNX graph in place of a compiled one."""

    def __init__(self, spec: LibrarySpec, names: Names, translated: Translated, run: Run):
        super().__init__(lambda: Path(), spec, torch.device("cpu"))
        self._parts = names, translated, run

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxLibrary:
        return OnnxLibrary(self.spec, *self._parts)

    def _load(self) -> _Runner:
        return _Runner(self.spec, *self._parts)


class _Runner:
    """The equivalent of :class:`aot_backward_runtime.torch_api.Runner` for an ONNX graph. Updated values are written
    into the tensors that the graph is bound to."""

    def __init__(self, spec: LibrarySpec, names: Names, translated: Translated, run: Run):
        self._spec, self._names, self._translated, self._run = spec, names, translated, run
        self._tensors: dict[str, torch.Tensor] = {}
        self.constants = frozenset(c.name for c in spec.constants)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {c.weight: tensors[c.name] for c in self._spec.constants}

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        names, graph_inputs = self._names, self._translated.inputs
        feeds = dict(zip(names.inputs, inputs, strict=True))
        feeds |= {names.constants[key]: tensor for key, tensor in self._tensors.items() if key in names.constants}
        if names.vector:
            feeds |= {n.name: self._tensors[names.vector][i] for i, n in enumerate(names.numbers)}
        results = self._run({name: tensor for name, tensor in feeds.items() if name in graph_inputs})
        with torch.no_grad():
            for key, name in self._translated.updated.items():
                self._tensors[key].copy_(results[name])
        outputs: dict[int, torch.Tensor] = {}
        for name, source in names.outputs:
            kind, _, index = source.partition(":")
            if kind == "result":
                dtype = getattr(torch, self._spec.outputs[int(index)].dtype)
                if results[name].dtype is not dtype:
                    raise ExportError(
                        f"{name} is {results[name].dtype} in the ONNX graph and {dtype} in eager: report this as a bug"
                    )
                outputs[int(index)] = _with_dim_order(results[name], self._spec.outputs[int(index)])
        return [outputs.get(i, torch.empty(())) for i in range(len(self._spec.outputs))]


def _with_dim_order(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return ``tensor`` with its dimensions in memory in the order of ``spec``'s strides: ONNX only has row-major
    tensors."""
    symbols = {name: 10007 + 2 * i for i, name in enumerate(sorted({n for s in spec.stride for n in symbols_of(s)}))}
    strides = [evaluate(s, symbols) for s in spec.stride]
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return tensor.permute(order).contiguous().permute([order.index(d) for d in range(tensor.dim())])


class OnnxPackage(Package):
    """A package with ONNX graphs as libraries. ``archive``: has the manifest, and a name for errors."""

    def __init__(
        self, archive: Any, weights: Mapping[str, torch.Tensor], libraries: Mapping[str, Callable[[], Library]]
    ):
        super().__init__(archive, weights, {})
        self._libraries = dict(libraries)

    def _open(self, names: Iterable[str]) -> dict[str, Library]:
        return {name: self._libraries[name]() for name in sorted(set(names))}


class UnwrittenArchive:
    """The archive attributes that a :class:`Package` reads, for a package that is never written."""

    def __init__(self, manifest: Manifest):
        self.manifest, self.path, self.manifest_digest = manifest, Path("the ONNX graph"), ""
