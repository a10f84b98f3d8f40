"""Trace an optimizer for one parameter of each kind, and repeat its operators for the others.

torch's own optimizers treat the parameters of one group, dtype and kind of state alike. To trace them takes 0.05 s a
parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..fx_graph import call
from .optimizer_spec import OptimizerSpec

aten = torch.ops.aten
_ELEMENTWISE = (aten.alias.default, aten.clone.default, aten.copy.default, torch.ops.prims.convert_element_type.default)
"""Element-wise operators without the tag."""


class Alike:
    """The parameters of an optimizer, and for each the first of its kind. ``spec`` describes those first ones alone."""

    def __init__(
        self, spec: OptimizerSpec, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> None:
        names = spec.trained
        self._first = {name: name for name in names}
        if type(spec.optimizer).__module__.startswith("torch.optim."):
            kinds: dict[Any, str] = {}
            for name, kind in zip(names, _kinds(spec, gradients, parameters), strict=True):
                self._first[name] = kinds.setdefault(kind, name)
        self._names = names
        firsts = tuple(dict.fromkeys(self._first.values()))
        shared = [len(slot.parameters) > 1 for slot in spec.slots]
        self._slots = [
            ((s.key, number), "") if shared[number] else (s.key, s.parameters[0]) for number, s in enumerate(spec.slots)
        ]
        kept = [number for number, slot in enumerate(spec.slots) if not set(firsts).isdisjoint(slot.parameters)]
        self._first_slots = [self._slots[number] for number in kept]
        slots = [
            dataclasses.replace(spec.slots[n], parameters=tuple(p for p in spec.slots[n].parameters if p in firsts))
            for n in kept
        ]
        self.spec = dataclasses.replace(spec, trained=firsts, slots=tuple(slots))

    def firsts(self, values: Sequence[Any]) -> list[Any]:
        """Return those of ``values``, one for each parameter, that belong to the first of its kind."""
        return [value for name, value in zip(self._names, values, strict=True) if self._first[name] == name]

    def for_all(self, module: GraphModule, inputs: Sequence[torch.Tensor], *, averages: bool) -> GraphModule | None:
        """Return the update ``module``, traced for :attr:`spec`, for all parameters; None if it combines the elements
        of a parameter, or several parameters. ``inputs``: the tensors of all (``optimizer_graph.Update``)."""
        values = _values(self._names, self._slots, averages)
        firsts = _values(self.spec.trained, self._first_slots, averages)
        placeholders = dict(zip(firsts, module.graph.find_nodes(op="placeholder"), strict=True))
        owner = {node: own for (_, own), node in placeholders.items() if own}
        for node in (n for n in module.graph.nodes if n.op == "call_function"):
            owners = {owner[n] for n in node.all_input_nodes if n in owner}
            if len(owners) > 1 or (owners and not _is_elementwise(node)):
                return None
            owner |= dict.fromkeys((node,), *owners) if owners else {}
        (output,) = module.graph.find_nodes(op="output")
        results = dict(zip(firsts[len(self.spec.trained) : -1], output.args[0], strict=True))
        if any(results[value] in owner for value in results if not value[1]):
            return None
        graph = Graph()
        copies: dict[tuple[Node, str], Node] = {}
        for number, ((kind, own), tensor) in enumerate(zip(values, inputs, strict=True)):
            new = copies[placeholders[kind, self._first.get(own, "")], own] = graph.placeholder(f"arg{number}_1")
            new.meta["val"] = tensor
        members: dict[str, list[str]] = {}
        for name, first in self._first.items():
            members.setdefault(first, []).append(name)

        def copied(node: Node, own: str) -> Node:
            return copies[node, own if node in owner else ""]

        for node in module.graph.nodes:
            for own in members[owner[node]] if node in owner else [""]:
                if node.op == "get_attr":
                    copies[node, own] = graph.node_copy(node)
                elif node.op == "call_function":
                    args = map_arg(node.args, functools.partial(copied, own=own))
                    copies[node, own] = call(graph, node.target, *args, **node.kwargs)
        graph.output(
            tuple(copied(results[kind, self._first.get(own, "")], own) for kind, own in values[len(self._names) : -1])
        )
        return GraphModule(module, graph)


def _kinds(spec: OptimizerSpec, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return what each parameter has in common with those that are updated alike."""
    group_of = {
        spec.names[id(p)]: number for number, group in enumerate(spec.optimizer.param_groups) for p in group["params"]
    }
    numbers = {
        spec.names[id(p)]: repr({key: value for key, value in state.items() if not isinstance(value, torch.Tensor)})
        for p, state in spec.optimizer.state.items()
        if id(p) in spec.names
    }
    states: dict[str, list[Any]] = {name: [] for name in spec.trained}
    shapes = dict(zip(spec.trained, (p.shape for p in parameters), strict=True))
    for number, slot in enumerate(spec.slots):
        for name in slot.parameters:
            own = (slot.key, slot.value.dtype, slot.value.dim() > 0, slot.value.shape == shapes[name], slot.starts_as)
            states[name].append(own if len(slot.parameters) == 1 else number)
    return [
        repr(
            (
                group_of[name],
                gradient.dtype,
                parameter.dtype,
                parameter.dim() > 0,
                parameter.numel() > 0,
                numbers.get(name),
                states[name],
            )
        )
        for name, gradient, parameter in zip(spec.trained, gradients, parameters, strict=True)
    ]


def _values(names: Sequence[str], slots: Sequence[tuple[Any, str]], averages: bool) -> list[tuple[Any, str]]:
    """Return what each input of an update is, and whose: "" if it belongs to several parameters."""
    of_averages = [*(("average", name) for name in names), ("averages", "")] if averages else []
    return [
        *(("gradient", name) for name in names),
        *(("parameter", name) for name in names),
        *slots,
        *of_averages,
        ("numbers", ""),
    ]


def _is_elementwise(node: Node) -> bool:
    """Return whether ``node`` has one meaning for tensors of every shape, element by element."""
    is_known = node.target in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return (
        is_known
        and not any(isinstance(a, list | tuple) for a in node.args)
        and not any(isinstance(a, Node | list) for a in node.kwargs.values())
    )
