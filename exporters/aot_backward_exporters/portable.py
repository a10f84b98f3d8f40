"""A functional ATen graph as JSON, and back: enough to compile it again where its source is absent.

A node is ``[operator, target, args, kwargs]``; targets are ATen overloads (``aten.mm.default``) and the functions on sizes that torch's
traces use (``operator.mul``, ``math.ceil``, ``torch.sym_max``). Shapes are not written: they come of running the graph on fake inputs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from aot_backward import torch_api
from aot_backward_runtime.errors import ExportError, PackageError

_MODULES = {"operator": operator, "_operator": operator, "math": math, "torch": torch}
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def graph_to_json(module: GraphModule) -> dict[str, Any]:
    """``module``: placeholders, operators, constants, and one output of a flat tuple of tensors. :class:`ExportError` names what has no form."""
    numbers: dict[Node, int] = {}
    nodes: list[Any] = []
    constants: dict[str, Any] = {}
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            nodes.append(["placeholder"])
        elif node.op == "get_attr":
            value = operator.attrgetter(node.target)(module)
            if not isinstance(value, torch.Tensor) or value.numel() > 1024:
                raise ExportError(f"the graph holds {node.target}, a {type(value).__name__} that cannot be written")
            constants[str(len(nodes))] = {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist(), "shape": list(value.shape)}
            nodes.append(["constant"])
        elif node.op == "call_function":
            nodes.append([_name(node.target), _write(node.args, numbers), _write(node.kwargs, numbers)])
        elif node.op == "output":
            nodes.append(["output", _write(node.args[0], numbers)])
        else:
            raise ExportError(f"the graph holds a {node.op} node, which cannot be written")
    return {"nodes": nodes, "constants": constants}


def graph_from_json(form: Mapping[str, Any], inputs: Sequence[torch.Tensor], fake_mode: Any) -> GraphModule:
    """The graph, its shapes from running it on ``inputs`` (fake, one for each placeholder). :class:`PackageError` where it is no graph."""
    root = torch.nn.Module()
    graph = Graph()
    made: list[Node] = []
    rest = iter(inputs)
    try:
        with fake_mode, torch.no_grad():
            for n, (kind, *parts) in enumerate(form["nodes"]):
                if kind == "placeholder":
                    node = graph.placeholder(f"arg{n}")
                    node.meta["val"] = next(rest)
                elif kind == "constant":
                    known = form["constants"][str(n)]
                    with torch_api.unset_fake_temporarily():
                        value = torch.tensor(known["values"], dtype=getattr(torch, known["dtype"])).reshape(known["shape"])
                    root.register_buffer(f"constant{n}", value)
                    node = graph.get_attr(f"constant{n}")
                    node.meta["val"] = fake_mode.from_tensor(value)
                elif kind == "output":
                    node = graph.output(tuple(_read(parts[0], made)))
                else:
                    target, args, kwargs = _target(kind), tuple(_read(parts[0], made)), _read(parts[1], made)
                    node = graph.call_function(target, args, kwargs)
                    values = torch.fx.map_arg((args, kwargs), lambda m: m.meta["val"])
                    node.meta["val"] = target(*values[0], **values[1])
                made.append(node)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
        raise PackageError(f"this is no graph: {type(error).__name__}: {error}") from error
    module = GraphModule(root, graph)
    graph.lint()
    return module


def _name(target: Any) -> str:
    if isinstance(target, torch_api.OpOverload):
        return f"{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in _MODULES and getattr(_MODULES[module], name, None) is target:
        return f"{'operator' if module == '_operator' else module}:{name}"
    raise ExportError(f"the graph calls {target}, which cannot be written")


def _target(name: str) -> Any:
    module, colon, function = name.partition(":")
    if colon:
        if module not in _MODULES or (module == "torch" and not function.startswith("sym_")):
            raise PackageError(f"the graph calls {name}, which is not allowed")
        return getattr(_MODULES[module], function)
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


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


def _read(form: Any, made: Sequence[Node]) -> Any:
    if isinstance(form, list):
        return [_read(v, made) for v in form]
    if not isinstance(form, dict):
        return form
    ((kind, value),) = form.items()
    if kind == "node":
        return made[value]
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    if kind == "device":
        return torch.device(value)
    if kind == "map":
        return {k: _read(v, made) for k, v in value.items()}
    found = getattr(torch, value)
    if type(found) not in _KINDS:
        raise PackageError(f"the graph holds the {kind} {value!r}")
    return found
