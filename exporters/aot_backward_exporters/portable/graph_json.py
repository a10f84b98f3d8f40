"""Writes a graph of ATen operators as JSON and reads it back. The JSON suffices to compile or run it without the source
program.

A node is ``[operator, args, kwargs]``; operators are ATen overloads (``aten.mm.default``), control flow
(``higher_order.cond``) and the functions on sizes that torch's traces use (``operator.mul``, ``math.ceil``,
``torch.sym_max``). The reader computes shapes by running the graph on fake inputs; the shapes stored with the nodes are
for people who read the file. ``docs/format.md``, section 6, specifies the format.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import LibrarySpec

from .. import sixteen_bits, torch_api
from ..graph import EAGER_KERNEL, LINE, ROUNDED, Graph, Line
from ..process_state import without_convolution_libraries

_FORMAT_VERSION = 1
"""Version of this JSON format. 1: 2026-11-21, the first."""

_ARITHMETIC = ("add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "not_", "or_", "pos",
               "pow", "rshift", "sub", "truediv", "xor")  # fmt: skip
_FUNCTIONS = {
    "operator": {n: getattr(operator, n) for n in _ARITHMETIC},
    "math": {n: getattr(math, n) for n in ("ceil", "floor", "trunc", "sqrt", "log2")},
    "torch": {
        n: getattr(torch, n) for n in dir(torch) if n.startswith(("sym_", "_sym_")) and callable(getattr(torch, n))
    },
}
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NEVER = {"aten::from_file", "debugprims::load_tensor"}

Spell = Callable[[Any], int | str]
"""Converts a size to its form in the package: a number, or an expression in the package's symbols."""


def graph_to_bytes(graph: Graph, spell: Spell, sizes: Mapping[str, int]) -> bytes:
    """Return ``graph`` as a package stores it. ``spell`` formats the sizes of the nodes; ``sizes``: the value of each
    symbol in the example.

    Raise :class:`ExportError` for a part that has no JSON form."""
    form = {
        "version": _FORMAT_VERSION,
        **graph_to_json(graph.module, {name: key for name, (key, _) in graph.constants.items()}, spell),
        "donated": list(graph.donated),
        "sizes": dict(sizes),
    }
    return json.dumps(form, separators=(",", ":"), ensure_ascii=False).encode()


def form_of(data: bytes, name: str) -> dict[str, Any]:
    """Parse the output of :func:`graph_to_bytes` and check it as far as is possible without running the graph."""
    try:
        form = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"the portable graph {name} is not JSON: {error}") from error
    lists = ("nodes", "names", "looks", "places", "lines")
    if not isinstance(form, dict) or not all(isinstance(form.get(key), list) for key in lists):
        raise PackageError(f"the portable graph {name} is not an object with the lists {', '.join(lists)}")
    if form.get("version") != _FORMAT_VERSION:
        raise PackageError(
            f"the portable graph {name}: expected version {_FORMAT_VERSION}, got {form.get('version')!r}"
        )
    if {len(form[key]) for key in lists[:4]} != {len(form["nodes"])}:
        raise PackageError(
            f"the portable graph {name} has {len(form['nodes'])} nodes, and a different number of names, looks or places"
        )
    return form


def graph_of(
    name: str,
    form: Mapping[str, Any],
    spec: LibrarySpec,
    inputs: Sequence[torch.Tensor],
    fake_mode: Any,
    weights: Mapping[str, torch.Tensor],
    sizes: Mapping[str, Any],
) -> Graph:
    """Return the graph that library ``name`` was compiled from.

    ``form``: from :func:`form_of`. ``inputs``: fake tensors as ``spec.inputs`` describes them. ``sizes``: each symbol
    of the package as a size of ``inputs``. Raise :class:`PackageError` if the form is not a graph, or if its inputs,
    outputs or constants differ from the library's."""
    try:
        module = graph_from_json(form, inputs, fake_mode, weights, sizes)
    except PackageError as error:
        raise PackageError(f"the portable graph {name} cannot be read: {error}") from error
    names = {
        str(n.target): form["nodes"][i][1]
        for i, n in enumerate(module.graph.nodes)
        if n.op == "get_attr" and form["nodes"][i][0] == "weight"
    }
    count = len(list(module.graph.find_nodes(op="placeholder")))
    results = next((n.args[0] for n in module.graph.find_nodes(op="output")), None)
    if not isinstance(results, tuple):
        raise PackageError(f"the portable graph {name} has no list of outputs")
    if count != len(spec.inputs) or len(results) != len(spec.outputs):
        raise PackageError(
            f"the portable graph {name} has {count} inputs and {len(results)} outputs; its library has {len(spec.inputs)} and {len(spec.outputs)}"
        )
    if {c.weight for c in spec.constants} != set(names.values()):
        mismatches = sorted({c.weight for c in spec.constants} ^ set(names.values()))
        raise PackageError(f"the portable graph {name} and its library do not read the same weights: {mismatches[0]}")
    for result, output in zip(results, spec.outputs, strict=True):
        value = result.meta["val"] if isinstance(result, Node) else None
        expected = f"torch.{output.dtype}", len(output.shape)
        if not isinstance(value, torch.Tensor) or (str(value.dtype), value.dim()) != expected:
            raise PackageError(
                f"the portable graph {name} and its library disagree on the dtype or the dimensions of {output.name}"
            )
    donated = form.get("donated", [])
    if not isinstance(donated, list) or not all(type(i) is int and 0 <= i < count for i in donated):
        raise PackageError(f"the portable graph {name} donates inputs that it does not have")
    return Graph(
        name=name,
        module=module,
        inputs=spec.inputs,
        outputs=spec.outputs,
        constants={target: (key, weights[key]) for target, key in names.items()},
        nodes=spec.nodes,
        donated=tuple(donated),
    )


def graph_to_json(module: GraphModule, weights: Mapping[str, str], spell: Spell) -> dict[str, Any]:
    """Return ``module`` as JSON. It has placeholders, operators, constants, and one output: a flat tuple of tensors.

    ``weights``: attribute -> weight key, for constants stored outside the graph. Raise :class:`ExportError` for a part
    that has no JSON form."""
    numbers: dict[Node, int] = {}
    nodes: list[Any] = []
    constants: dict[str, Any] = {}
    names, metadata, places = list[str](), list[Any](), list[int]()
    lines: dict[Line, int] = {}
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            nodes.append(["placeholder"])
        elif node.op == "get_attr":
            nodes.append(_constant(module, node, weights, constants, len(nodes), spell))
        elif node.op == "call_function":
            nodes.append([_name(node.target), _write(node.args, numbers), _write(node.kwargs, numbers)])
        elif node.op == "output":
            nodes.append(["output", _write(node.args[0], numbers)])
        else:
            raise ExportError(f"the graph holds a {node.op} node, which cannot be written")
        names.append(node.name)
        metadata.append(_metadata(node.meta.get("val"), spell))
        line = node.meta.get(LINE)
        places.append(-1 if line is None else lines.setdefault(line, len(lines)))
    return {
        "nodes": nodes,
        "constants": constants,
        "names": names,
        "looks": metadata,
        "places": places,
        "kernels": [n for n, node in enumerate(module.graph.nodes) if node.meta.get(EAGER_KERNEL)],
        "rounded": [n for n, node in enumerate(module.graph.nodes) if node.meta.get(ROUNDED)],
        "lines": [list(astuple(line)) for line in lines],
    }


def graph_from_json(
    form: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    fake_mode: Any,
    weights: Mapping[str, torch.Tensor],
    sizes: Mapping[str, Any],
) -> GraphModule:
    """Rebuild the graph; run it on ``inputs`` (fake, one per placeholder) for its shapes. Raise :class:`PackageError`
    if ``form`` is invalid."""
    try:
        # without the Python dispatcher, composite C++ operators (such as Fourier transforms) would silently fix a
        # dynamic size
        with fake_mode, torch.no_grad(), without_convolution_libraries(), torch_api.enable_python_dispatcher():
            return _graph(form, inputs, fake_mode, weights, sizes)
    except PackageError:
        raise
    except Exception as error:  # an operator may raise anything if its arguments do not fit
        raise PackageError(
            f"it is not a valid graph: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _graph(
    form: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    fake_mode: Any,
    weights: Mapping[str, torch.Tensor],
    sizes: Mapping[str, Any],
) -> GraphModule:
    root = torch.nn.Module()
    graph = FxGraph()
    nodes: list[Node] = []
    remaining = iter(inputs)
    names, places = form.get("names"), form.get("places")
    lines = [Line(*line) for line in form.get("lines", ())]
    kernels = frozenset(form.get("kernels", ()))
    rounded_nodes = frozenset(form["rounded"]) if "rounded" in form else None  # older files lack it: round everything
    for n, (kind, *parts) in enumerate(form["nodes"]):
        name = _identifier(names[n]) if names else f"v{n}"
        if kind == "placeholder":
            node = graph.placeholder(name)
            node.meta["val"] = next(remaining)
        elif kind in ("constant", "weight"):
            if kind == "constant":
                constant = form["constants"][str(n)]
                with torch_api.unset_fake_temporarily():
                    value = torch.tensor(constant["values"], dtype=getattr(torch, constant["dtype"])).reshape(
                        constant["shape"]
                    )
            elif parts[0] in weights:
                value = weights[parts[0]]
            else:
                raise PackageError(f"it reads the weight {parts[0]!r}, which the package does not have")
            root.register_buffer(f"{kind}{n}", value)
            node = graph.get_attr(f"{kind}{n}")
            node.meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
        elif kind == "graph":
            child = _graph(
                parts[0], [_fake(metadata, inputs, sizes) for metadata in parts[0]["inputs"]], fake_mode, weights, sizes
            )
            root.add_module(f"graph{n}", child)
            node = graph.get_attr(f"graph{n}")
            node.meta["val"] = child
        elif kind == "output":
            results = _read(parts[0], nodes)
            # A body may return a single value
            node = graph.output(tuple(results) if isinstance(results, list) else results)
        else:
            target = _target(kind)
            args = tuple(_read(parts[0], nodes))
            kwargs = {_identifier(k): v for k, v in _read(parts[1], nodes).items()}
            node = graph.create_node("call_function", target, args, kwargs, name=name)
            values = torch.fx.map_arg((args, kwargs), lambda m: m.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
            # Data-dependent sizes
            if bindings := torch_api.compute_unbacked_bindings(fake_mode.shape_env, node.meta["val"]):
                node.meta["unbacked_bindings"] = bindings
        if n in kernels:
            node.meta[EAGER_KERNEL] = True
        if sixteen_bits.is_in_16_bits(node) and (rounded_nodes is None or n in rounded_nodes):
            node.meta[ROUNDED] = True
        if places and 0 <= places[n] < len(lines):
            node.meta[LINE] = lines[places[n]]
        nodes.append(node)
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(node.meta["val"], GraphModule):
            del node.meta["val"]
    graph.lint()
    return GraphModule(root, graph)


def _constant(
    module: GraphModule, node: Node, weights: Mapping[str, str], constants: dict[str, Any], n: int, spell: Spell
) -> list[Any]:
    target = str(node.target)
    if target in weights:
        return ["weight", weights[target]]
    value = operator.attrgetter(target)(module)
    if isinstance(value, GraphModule):
        form = graph_to_json(value, {}, spell)
        form["inputs"] = [
            _metadata(p.meta.get("val"), spell, body=True) for p in value.graph.find_nodes(op="placeholder")
        ]
        return ["graph", form]
    if not isinstance(value, torch.Tensor) or value.numel() > 1024:
        raise ExportError(f"the graph holds {target}, a {type(value).__name__} that cannot be written")
    constants[str(n)] = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "values": value.tolist(),
        "shape": list(value.shape),
    }
    return ["constant"]


def _metadata(value: Any, spell: Spell, *, body: bool = False) -> Any:
    """Return dtype, sizes and strides of a tensor, a list for several values, and None for anything else. ``body``:
    ``value`` is an input of a control-flow body, which the reader runs again."""
    if isinstance(value, (list, tuple)) and not body:
        return [_metadata(v, spell) for v in value]
    if not isinstance(value, torch.Tensor):
        if body:
            raise ExportError(
                "the body of a control-flow operator takes an input that is not a tensor, and cannot be written"
            )
        return None
    words = [s if isinstance(s, int) else spell(s) for s in (*value.shape, *value.stride())]
    return [str(value.dtype).removeprefix("torch."), words[: value.dim()], words[value.dim() :]]


def _fake(metadata: Sequence[Any], inputs: Sequence[torch.Tensor], sizes: Mapping[str, Any]) -> torch.Tensor:
    dtype, *layout = metadata
    shape, stride = ([evaluate(s, sizes) for s in values] for values in layout)
    device = inputs[0].device if inputs else torch.device("cpu")
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)


def _name(target: Any) -> str:
    if isinstance(target, torch_api.OpOverload):
        return f"{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    name = getattr(target, "__name__", "")
    if isinstance(target, torch_api.HigherOrderOperator):
        return f"higher_order.{name}"
    for module, functions in _FUNCTIONS.items():
        if functions.get(name) is target:
            return f"{module}:{name}"
    raise ExportError(f"the graph calls {target}, which cannot be written")


def _identifier(name: Any) -> str:
    """Check and return ``name``: torch.fx writes it into the Python code that it generates and compiles."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise PackageError(f"{name!r} is not a valid name for a node or an argument")
    return name


def _target(name: Any) -> Any:
    if not isinstance(name, str):
        raise PackageError(f"it calls {name!r}, which is not a name")
    module, colon, function = name.partition(":")
    if colon:
        if function not in _FUNCTIONS.get(module, ()):
            raise PackageError(f"it calls {name}, which is not allowed")
        return _FUNCTIONS[module][function]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        target = getattr(getattr(torch.ops, namespace), packet)
        target = getattr(target, overload) if overload else target
    except AttributeError as error:
        raise PackageError(
            f"it calls {name!r}, which is not registered in this process; import the library that registers it"
        ) from error
    # torch.ops also has plain functions (load_library, import_module), and their attributes lead to other objects
    if (
        not isinstance(target, (torch_api.OpOverload, torch_api.HigherOrderOperator))
        or _name(target) != name
        or _has_side_effects(target)
    ):
        raise PackageError(f"it calls {name!r}, which is not allowed")
    return target


def _has_side_effects(target: Any) -> bool:
    """Return whether the operator touches files, even on fake tensors, or exists only in TorchScript (``aten.save``,
    ``prim.Print``)."""
    if isinstance(target, torch_api.HigherOrderOperator):
        return False
    return target._schema.name in _NEVER or not torch_api._dispatch_has_kernel(target.name())


def _write(value: Any, numbers: Mapping[Node, int]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Node):
        return {"node": numbers[value]}
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, _KINDS):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [_write(v, numbers) for v in value]
    if isinstance(value, Mapping):
        return {"map": {str(k): _write(v, numbers) for k, v in value.items()}}
    raise ExportError(f"the graph holds a {type(value).__name__}, which cannot be written")


def _read(form: Any, nodes: Sequence[Node]) -> Any:
    if isinstance(form, list):
        return [_read(v, nodes) for v in form]
    if not isinstance(form, dict):
        return form
    ((kind, value),) = form.items()
    if kind == "node":
        if not 0 <= value < len(nodes):
            raise PackageError(f"node {len(nodes)} reads node {value}, which comes later")
        return nodes[value]
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    if kind == "device":
        return torch.device(value)
    if kind == "map":
        return {k: _read(v, nodes) for k, v in value.items()}
    attribute = getattr(torch, value)
    if type(attribute) not in _KINDS:
        raise PackageError(f"the graph holds the unsupported {kind} {value!r}")
    return attribute
