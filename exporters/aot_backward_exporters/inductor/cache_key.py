"""A graph as canonical JSON: equal for two captures of one computation, different for any two that could compile
differently.

Names of nodes and of symbols are replaced by their order of appearance; values of tensors do not count. Entries that
cannot affect the code are excluded by name (``_NOT_COMPILED``). A value without a canonical form gets a random one, so
that its graph is compiled every time.
"""

from __future__ import annotations

import functools
import types
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .. import torch_api
from ..graph import Graph

# The origin of a node. ``tensor_meta`` and ``unbacked_bindings`` repeat information from ``val``.
_NOT_COMPILED = {
    "aot_backward_line", "autograd_backward", "desc", "from_node", "fwd_nn_module_stack", "fwd_source_fn_stack", "is_gradient_acc",
    "mutation_region_id",
    "nn_module_stack", "output_stack_traces", "seq_nr", "source_fn_stack", "stack_trace", "tensor_meta", "torch_fn", "unbacked_bindings",
}  # fmt: skip


@dataclass(frozen=True)
class Canonical:
    """A canonical graph. ``form`` is JSON. ``symbols``: each symbol of the capture that occurs -> its name in
    ``form``."""

    form: dict[str, Any]
    symbols: dict[sympy.Symbol, sympy.Symbol]


def canonical_graph(graph: Graph, shape_env: Any) -> Canonical:
    """Return everything about ``graph`` that its native code may depend on."""
    writer = _Writer(graph.constants)
    nodes = writer.graph(graph.module)
    symbols = writer.symbols(shape_env)
    return Canonical({"nodes": nodes, "symbols": symbols}, writer.symbol_names)


class _Writer:
    def __init__(self, constants: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        self.symbol_names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._constants = constants
        self._weights: list[str] = []
        self._nodes: dict[Node, int] = {}
        self._expressions: dict[Any, str] = {}  # most nodes repeat a few

    def graph(self, module: GraphModule) -> list[Any]:
        out = []
        for node in module.graph.nodes:
            self._nodes[node] = len(self._nodes)
            target = self._attribute(module, str(node.target)) if node.op == "get_attr" else self.value(node.target)
            target = None if node.op == "placeholder" else target
            meta = {k: self.value(v) for k, v in node.meta.items() if k not in _NOT_COMPILED}
            out.append([node.op, target, self.value(node.args), self.value(node.kwargs), meta])
        return out

    def symbols(self, shape_env: Any) -> list[Any]:
        """Return ranges of the symbols seen, their values at capture (which affect tiling), and the guards on them."""
        if not self.symbol_names:
            return []
        guards = [g.expr for g in shape_env.guards if not g.expr.free_symbols.isdisjoint(self.symbol_names)]
        expressions = [self._expression(g) for g in guards]
        out: list[Any] = []
        for symbol, new in self.symbol_names.items():
            values = shape_env.var_to_range[symbol]
            hint = shape_env.replace(symbol).xreplace(shape_env.backed_var_to_val)
            out.append([str(new), str(values.lower), str(values.upper), str(hint)])
        return [out, expressions]

    def value(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return ["float", value.hex()]
            case complex():
                return ["complex", value.real.hex(), value.imag.hex()]
            case Node():
                return ["node", self._nodes[value]]
            case torch.Tensor():
                return self._tensor(value)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return [type(value).__name__, self._expression(value.node.expr)]
            case sympy.Basic():
                return ["sympy", self._expression(value)]
            case torch_api.OperatorBase():
                return ["operator", str(value)]
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return [type(value).__name__, str(value)]
            case slice():
                return ["slice", *(self.value(v) for v in (value.start, value.stop, value.step))]
            case tuple() | list():
                return [type(value).__name__, *(self.value(v) for v in value)]
            case Mapping():
                return ["mapping", *([self.value(k), self.value(v)] for k, v in value.items())]
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType):  # operator.getitem, math.ceil
            return ["function", value.__module__, value.__name__]
        return ["unknown", uuid.uuid4().hex]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        layout = [str(tensor.dtype), str(tensor.device), str(tensor.layout), tensor.is_conj(), tensor.is_neg()]
        stride = [self.value(s) for s in tensor.stride()] if tensor.layout == torch.strided else []
        return ["tensor", *layout, [self.value(s) for s in tensor.shape], stride]

    def _attribute(self, module: GraphModule, name: str) -> list[Any]:
        """Return a constant's name, layout, and the index of its weight: the library holds a weight with two names
        once."""
        value = functools.reduce(getattr, name.split("."), module)
        if isinstance(value, GraphModule):
            return ["graph", name, self.graph(value)]
        weight = self._constants[name][0] if name in self._constants else f"not a weight: {name}"
        if weight not in self._weights:
            self._weights.append(weight)
        return ["constant", name, self._weights.index(weight), self.value(value)]

    def _expression(self, expression: Any) -> str:
        if expression not in self._expressions:
            for symbol in sorted(expression.free_symbols - self.symbol_names.keys(), key=str):
                self.symbol_names[symbol] = sympy.Symbol(f"d{len(self.symbol_names)}", integer=symbol.is_integer)
            self._expressions[expression] = sympy.srepr(expression.xreplace(self.symbol_names))
        return self._expressions[expression]
