"""A traced program: forward and backward in one functional ATen graph, and the meaning of its placeholders and
outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aot_backward_runtime.format.manifest import Ambient, Shared, Tree

from . import fx_graph
from .shapes.symbolic_shapes import Sizes


@dataclass(frozen=True)
class Joint:
    """One traced program. It is immutable once traced, FX graph included. Code that rewrites the graph (partitioning
    sums ties, inserts hooks and runs torch's passes) works on a :meth:`copy`, so one trace can be partitioned,
    differentiated again and inspected in any order.

    ``placeholders``: node name -> ("parameter", name), ("buffer", name), ("input", I) or ("cotangent", J of the flat
    outputs).
    ``outputs``: per flat output its node, ("input", I), ("state", name), or None for a constant.
    ``gradients``: ("parameter", name) or ("input", I) -> node, or None if the true gradient is None.
    """

    graph: GraphModule
    fake_mode: Any
    sizes: Sizes
    placeholders: Mapping[str, tuple[str, Any]]
    outputs: tuple[Any, ...]
    output_requires_grad: tuple[bool, ...]
    forward_values: int  # how many leading outputs of the graph are the forward's
    gradients: Mapping[tuple[str, Any], Any]
    gradient_slots: tuple[Any, ...]  # target of each output after the forward's; None if it is not a gradient
    cotangents: tuple[int, ...]  # the flat outputs that get an incoming gradient
    cotangent_values: tuple[torch.Tensor, ...]  # fake
    inputs: tuple[torch.Tensor, ...]  # fake, flat
    state: Mapping[str, torch.Tensor]  # the program's parameters and buffers; tied ones under each name
    input_names: tuple[str, ...]
    argument_names: tuple[str, ...]
    in_tree: Tree
    out_tree: Tree
    ambient: Ambient
    trace_inputs: Any
    # Gradient hooks, by the parameter's first name
    hooks: Mapping[str, tuple[Callable[..., Any], ...]] = field(default_factory=dict)
    shared: tuple[Shared, ...] = ()

    @property
    def has_backward(self) -> bool:
        return bool(self.cotangents)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """``cotangents``, as indices among the outputs that are tensors."""
        position = {leaf: n for n, leaf in enumerate(i for i, o in enumerate(self.outputs) if o is not None)}
        return tuple(position[leaf] for leaf in self.cotangents)

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.inputs), torch.device("cpu"))

    def copy(self) -> Joint:
        """Return a copy with its own FX graph, to be rewritten. Nodes keep their names; tensors and the shape
        environment are shared."""
        graph, nodes = fx_graph.copy_of(self.graph)

        def mapped(value: Any) -> Any:
            return nodes[value] if isinstance(value, Node) else value

        gradients = {target: mapped(node) for target, node in self.gradients.items()}
        return replace(self, graph=graph, outputs=tuple(map(mapped, self.outputs)), gradients=gradients)
