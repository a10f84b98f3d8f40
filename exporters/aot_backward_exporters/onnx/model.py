"""One captured graph as an ONNX model: named inputs and outputs, weights as defaults of inputs, named dynamic
dimensions.

PyTorch's own translations (torchlib) write the nodes, for opset 18: the oldest that they support. Operators without a
translation are decomposed (:mod:`.lowering`), translated here (:mod:`.translations`), or refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Size, TensorSpec

from .. import torch_api
from ..graph import LINE, VERSION, Graph
from . import translations
from .lowering import Lowered, located, lower

OPSET = 18
IR_VERSION = 8
"""The oldest opset that torchlib supports, and the oldest IR version for it."""


@dataclass(frozen=True)
class NumberInput:
    """An element of an optimizer's vector of numbers as a separate input."""

    name: str
    value: float


@dataclass(frozen=True)
class Names:
    """The names of the graph's inputs and outputs.

    ``inputs``: one for each of the graph's. ``constants``: weight key -> name; other constants are not inputs.
    ``outputs``: name and source: ``result:I``, ``input:I`` or ``constant:KEY``. ``vector``: the weight key of an
    optimizer's vector of numbers, with ``numbers`` its elements. ``symbols``: "s0" -> "batch".
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, str]
    outputs: tuple[tuple[str, str], ...]
    vector: str = ""
    numbers: tuple[NumberInput, ...] = ()
    symbols: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Translated:
    """A model without the values of its weights. ``defaults``: of its inputs; ``fixed``: values of tensors that no
    caller may set, by name.

    ``updated``: weight key -> name of the output that has its new value. ``keys``: name of a default or a fixed tensor
    -> weight key.
    """

    model: onnx.ModelProto
    defaults: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]
    updated: dict[str, str]
    keys: dict[str, str]

    @functools.cached_property
    def inputs(self) -> frozenset[str]:
        return frozenset(i.name for i in self.model.graph.input)

    def with_fixed(self) -> onnx.ModelProto:
        """Return the model with the values of ``fixed``: it runs if all other inputs are passed."""
        out = onnx.ModelProto()
        out.CopyFrom(self.model)
        out.graph.initializer.extend(onnx.numpy_helper.from_array(numpy_of(t), name) for name, t in self.fixed.items())
        return out


def translate(graph: Graph, names: Names, about: Mapping[str, str]) -> Translated:
    """Translate ``graph``. ``about``: further entries of ``metadata_props``. Raise :class:`ExportError` with the name
    of an untranslatable part."""
    with _quiet():
        return _translate(graph, names, about)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the translators' logs about a missing torchvision, nodes without a module, and values that are not
    folded."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _translate(graph: Graph, names: Names, about: Mapping[str, str]) -> Translated:
    registry = _registry()
    order = {key: i for i, key in enumerate(names.constants)}
    sorted_constants = sorted(
        graph.constants.items(), key=lambda item: (order.get(item[1][0], len(order)), item[1][0], item[0])
    )
    # In the module's order, also for a graph that was read from a package
    graph = dataclasses.replace(graph, constants=dict(sorted_constants))
    vector = next((a for a, (key, _) in graph.constants.items() if names.vector and key == names.vector), "")
    lowered = lower(graph, registry.is_registered, vector)
    model = _nodes(graph, lowered, registry)
    weights = [graph.constants[a] for a in lowered.constants]
    fixed_names = {
        key: f"constant.{i}" for i, key in enumerate(key for key, _ in weights if key not in names.constants)
    }
    constants = [names.constants.get(key) or fixed_names[key] for key, _ in weights]
    updated_names = {
        graph.constants[a][0]: f"updated.{names.constants[graph.constants[a][0]]}" for a in lowered.updated
    }
    numbers = [names.numbers[i] for i in lowered.numbers]
    values = {name: tensor.detach() for name, (_, tensor) in zip(constants, weights, strict=True)}
    values |= {n.name: torch.tensor(n.value, dtype=torch.float64) for n in numbers}
    inputs = {names.inputs[i]: graph.inputs[i] for i in lowered.inputs} | {n: _spec(t) for n, t in values.items()}
    outputs = [o for o in names.outputs if not o[1].startswith("first:") or o[0].removeprefix("updated.") in inputs]
    outputs += [(name, f"result:{len(graph.outputs) + i}") for i, name in enumerate(updated_names.values())]
    _name_inputs_and_outputs(model, list(inputs), outputs, names)
    output_specs = [*graph.outputs, *(_spec(values[names.constants[key]]) for key in updated_names)]
    _describe(model, inputs, outputs, output_specs, names)
    model_inputs = [v for v in model.graph.inputs if v.name not in fixed_names.values()]
    fixed_inputs = [v for v in model.graph.inputs if v.name in fixed_names.values()]
    model.graph.inputs.clear()
    model.graph.inputs.extend(model_inputs)
    proto = ir.to_proto(model)
    proto.graph.value_info.extend(ir.to_proto(value) for value in fixed_inputs)
    proto.ir_version, proto.producer_name, proto.producer_version = IR_VERSION, "aot-backward", VERSION
    proto.doc_string = f"{graph.name}, captured by aot-backward {VERSION} from PyTorch {torch.__version__}"
    for key, text in {
        **about,
        "torch": torch.__version__,
        "opset": f"{OPSET}: the oldest that PyTorch's translations are written for",
    }.items():
        proto.metadata_props.add(key=key, value=text)
    keys = {name: key for name, (key, _) in zip(constants, weights, strict=True)}
    return Translated(
        proto,
        {n: t for n, t in values.items() if n not in fixed_names.values()},
        {n: t for n, t in values.items() if n in fixed_names.values()},
        updated_names,
        keys,
    )


def numpy_of(tensor: torch.Tensor) -> Any:
    """Return a row-major array, as ONNX has no strides; bfloat16 as ``ml_dtypes.bfloat16``."""
    data = tensor.detach().cpu().contiguous()
    if data.dtype is torch.bfloat16:
        import ml_dtypes

        return data.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return data.numpy()


def bits_of(tensor: torch.Tensor) -> Any:
    """Return the same as :func:`numpy_of`, but bfloat16 as its bits."""
    data = tensor.detach().cpu().contiguous()
    return data.view(torch.int16).numpy().view(numpy.uint16) if data.dtype is torch.bfloat16 else data.numpy()


def tensor_of(array: Any) -> torch.Tensor:
    shape, array = numpy.shape(array), numpy.ascontiguousarray(array)  # ascontiguousarray turns a scalar into a row
    tensor = (
        torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
        if array.dtype.name == "bfloat16"
        else torch.from_numpy(array)
    )
    return tensor.reshape(shape)


@functools.cache
def _registry() -> Any:
    return translations.registry()


def _nodes(graph: Graph, lowered: Lowered, registry: Any) -> Any:
    model = ir.Model(ir.Graph([], [], nodes=[], name=graph.name, opset_imports={"": OPSET}), ir_version=IR_VERSION)
    try:
        torch_api._translate_fx_graph(
            lowered.module.graph,
            model,
            graph_like=model.graph,
            owned_graphs={},
            lower="at_conversion",
            registry=registry,
        )
    except Exception as error:  # torchlib raises whatever its functions raise
        raise located(graph, _refused(lowered, error)) from error
    torch_api.add_opset_imports(model)
    onnxscript.optimizer.inline(model)
    # Without its fusion rules, which take most of the time
    onnxscript.optimizer.fold_constants(model, output_size_limit=1024)
    CommonSubexpressionEliminationPass()(model)
    onnxscript.optimizer.remove_unused_nodes(model)
    _document(model, graph)
    return model


def _refused(lowered: Lowered, error: Exception) -> ExportError:
    message = str(error)
    node = next((n for n in lowered.module.graph.nodes if n.op == "call_function" and f"%{n.name} " in message), None)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause).splitlines() or [type(cause).__name__])[0]
    target = node.target if node is not None else "the graph"
    return ExportError.of(
        target,
        f"{target} as it is called here has no ONNX translation ({type(cause).__name__}: {reason}): leave this part to eager",
    )


def _name_inputs_and_outputs(
    model: Any, inputs: Sequence[str], outputs: Sequence[tuple[str, str]], names: Names
) -> None:
    used_names = {*inputs, *(n for n, _ in outputs)}
    for value in _values(model):
        while value.name in used_names:
            value.name = f"{value.name}_"
    for value, name in zip(model.graph.inputs, inputs, strict=True):
        value.name = name
    results, by_name = list(model.graph.outputs), {v.name: v for v in model.graph.inputs}
    model.graph.outputs.clear()
    named_ids: set[int] = set()
    for name, source in outputs:
        kind, _, reference = source.partition(":")
        if kind == "first":
            finite = next((v for v in model.graph.outputs if v.name == reference), None)
            model.graph.outputs.append(_not_first(model, name, by_name[name.removeprefix("updated.")], finite))
            continue
        value = (
            results[int(reference)]
            if kind == "result"
            else by_name[names.inputs[int(reference)] if kind == "input" else names.constants[reference]]
        )
        if value.is_graph_input() or value.is_initializer() or id(value) in named_ids:
            node = ir.node("Identity", [value], name=f"node_{name}")
            model.graph.append(node)
            value = node.outputs[0]
        named_ids.add(id(value))
        value.name = name
        model.graph.outputs.append(value)


def _not_first(model: Any, name: str, first: Any, finite: Any) -> Any:
    """Return ``first`` after an update: 0, or unchanged if the gradients were not finite, since there was no update."""
    zero = ir.node("Constant", [], {"value": ir.tensor(numpy.zeros((), numpy.float64))}, name=f"node_{name}.zero")
    model.graph.append(zero)
    value = zero.outputs[0]
    if finite is not None:
        value.name = f"{name}.zero"
        where_node = ir.node("Where", [finite, value, first], name=f"node_{name}")
        model.graph.append(where_node)
        value = where_node.outputs[0]
    value.name = name
    return value


def _describe(
    model: Any,
    inputs: Mapping[str, TensorSpec],
    outputs: Sequence[tuple[str, str]],
    results: Sequence[TensorSpec],
    names: Names,
) -> None:
    """Set types and shapes of inputs and outputs from the capture; shape inference finds the others."""
    for value in _values(model):
        value.shape = None
        value.metadata_props.clear()
        value.type = None
    for value in model.graph.inputs:
        _type(value, inputs[value.name], names)
    for value, (_, source) in zip(model.graph.outputs, outputs, strict=True):
        kind, _, reference = source.partition(":")
        if kind == "first":
            _type(value, TensorSpec("", "float64", "cpu", (), ()), names)
            continue
        spec = (
            results[int(reference)]
            if kind == "result"
            else inputs[names.inputs[int(reference)] if kind == "input" else names.constants[reference]]
        )
        _type(value, spec, names)


def _type(value: Any, spec: TensorSpec, names: Names) -> None:
    value.type = ir.TensorType(_element_type(spec.dtype))
    value.shape = ir.Shape([labelled(size, names.symbols) for size in spec.shape])


_TYPES = {"float32": "FLOAT", "float64": "DOUBLE"}


def labelled(size: Size, symbols: Mapping[str, str]) -> Size:
    """Return ``(2 * s0)`` as ``2 * batch``."""
    if isinstance(size, int):
        return size
    text = re.sub(r"\b[a-z]\w*\b", lambda m: symbols.get(m[0], m[0]), size)
    return text[1:-1] if text.startswith("(") and text.endswith(")") and text.count("(") == 1 else text


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec("", str(tensor.dtype).removeprefix("torch."), "cpu", tuple(tensor.shape), tensor.stride())


def _document(model: Any, graph: Graph) -> None:
    """Write into each node the operator of the captured graph that it belongs to, and the line of user code if it is
    known."""
    originals = {node.name: node for node in graph.module.graph.nodes}
    for node in model.graph:
        history = (node.meta["node"].meta.get("from_node") or []) if "node" in node.meta else []
        node.metadata_props.clear()
        source = next((originals[h.name] for h in history if h.name in originals), None)
        if source is None:
            continue
        line = source.meta.get(LINE)
        location = [f"in {line.module}"] if line is not None and line.module else []
        location += [f"{line.file}:{line.number}: {line.text}"] if line is not None and line.file else []
        node.doc_string = ", ".join([str(source.target), *location])


def _values(model: Any) -> Iterator[Any]:
    yield from model.graph.inputs
    yield from list(model.graph.initializers.values())
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        yield from node.outputs


def element_type(dtype: torch.dtype) -> int:
    """Return ONNX's number for the dtype."""
    return int(_element_type(str(dtype).removeprefix("torch.")))


def _element_type(name: str) -> Any:
    member = _TYPES.get(name, name.upper())
    if member not in ir.DataType.__members__:
        raise ExportError(f"a tensor is {name}, and ONNX has no such dtype: convert the tensor first")
    return ir.DataType[member]
