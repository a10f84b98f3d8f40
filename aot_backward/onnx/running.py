"""ONNX graphs in place of native code: what the runtime's modules, gradients and steps call, so that one check serves both."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.onnx import Names, Translated, numpy_of, tensor_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.manifest import LibrarySpec, Manifest
from aot_backward_runtime.package import Package
from aot_backward_runtime.plan import Binding, Library

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes NumPy arrays by the inputs' names, gives those of all outputs."""


def engine() -> str:
    """What runs a graph here: "onnxruntime", or the slow "onnx.reference"."""
    return "onnxruntime" if importlib.util.find_spec("onnxruntime") is not None else "onnx.reference"


def runner(translated: Translated, engine: str) -> Run:
    """:class:`ExportError` where the engine has no kernel for one of the graph's operators, naming it."""
    model = translated.with_fixed()
    outputs = [o.name for o in model.graph.output]
    if engine == "onnx.reference":
        import onnx.reference

        evaluator = onnx.reference.ReferenceEvaluator(model)
        return lambda feeds: dict(zip(outputs, evaluator.run(None, feeds), strict=True))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes of errors share no base
        first = str(error).splitlines()[0]
        raise ExportError(f"{model.graph.name}: onnxruntime {onnxruntime.__version__} cannot run the graph: {first}") from error
    return lambda feeds: dict(zip(outputs, session.run(outputs, feeds), strict=True))


class OnnxLibrary(Library):
    """One ONNX graph where the runtime expects a compiled one. What it updates is written into the tensors that it is bound to."""

    def __init__(self, spec: LibrarySpec, names: Names, translated: Translated, run: Run):
        super().__init__(lambda: Path(), spec, "cpu")
        self._names, self._translated, self._run = names, translated, run
        self._tensors: Mapping[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxLibrary:
        return OnnxLibrary(self.spec, self._names, self._translated, self._run)

    def bind(self, binding: Binding) -> None:
        self._tensors = binding[0]

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        return self.run

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        names, asked = self._names, self._translated.inputs
        tensors = dict(zip(names.inputs, inputs, strict=True))
        tensors |= {name: self._tensors[key] for key, name in names.constants.items() if name in asked}
        if names.vector:
            vector = self._tensors[names.vector]
            tensors |= {n.name: vector[i] for i, n in enumerate(names.numbers) if n.name in asked}
        found = self._run({name: numpy_of(tensor) for name, tensor in tensors.items() if name in asked})
        with torch.no_grad():
            for key, name in self._translated.updated.items():
                self._tensors[key].copy_(tensor_of(found[name], self._tensors[key].dtype))
        made: dict[int, torch.Tensor] = {}
        for name, source in names.outputs:
            kind, _, where = source.partition(":")
            if kind == "result":
                made[int(where)] = tensor_of(found[name], getattr(torch, self.spec.outputs[int(where)].dtype))
        return [made.get(i, torch.empty(())) for i in range(len(self.spec.outputs))]


class OnnxPackage(Package):
    """A package whose libraries are ONNX graphs. ``archive``: what gives the manifest and names the file."""

    def __init__(self, archive: Any, weights: Mapping[str, torch.Tensor], libraries: Mapping[str, Callable[[], Library]]):
        super().__init__(archive, weights, {})
        self._libraries = dict(libraries)

    def _open(self, names: Iterable[str]) -> dict[str, Library]:
        return {name: self._libraries[name]() for name in sorted(set(names))}


class Described:
    """Stands for an archive that was never written: all that a :class:`Package` asks of it."""

    def __init__(self, manifest: Manifest):
        self.manifest, self.path, self.manifest_digest = manifest, Path("the ONNX graph"), ""
