"""Prepare one graph for the compiler: its parameters and buffers become constants, its inputs and outputs a plan of the
runtime.

Parameters and buffers become ``get_attr`` nodes. AOTInductor turns these into constants, which the runtime binds by
pointer; they are never passed.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aot_backward_exporters.graph import Graph
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Call, Gradient, Plan, TensorSpec

from . import fx_graph
from .joint_graph import Joint
from .shapes.symbolic_shapes import expression_of

aten = torch.ops.aten

Weights = Mapping[str, tuple[str, torch.Tensor]]
"""State name -> (weight key, tensor)."""


class GraphBinder:
    """Collects the results of ``graph``, which it modifies, binds its constants and makes its plan. ``joint``: the
    program that contains the graph."""

    def __init__(self, joint: Joint, graph: GraphModule, name: str, weights: Weights):
        self.joint, self.graph, self.name, self.weights = joint, graph, name, weights
        self.placeholders = dict(joint.placeholders)
        self.results: list[Node] = []
        self.names: list[str] = []
        self.saved: dict[str, int] = {}  # placeholder name -> index among the saved tensors
        self.origins: dict[str, str] = {}  # placeholder name -> name, for saved tensors that are also inputs or outputs
        self.donated: frozenset[int] = frozenset()  # saved tensors that nothing else refers to

    def result(self, node: Node, name: str = "") -> str:
        """Add the node to the outputs of the compiled graph and return ``result:I``; a repeated node is computed
        once."""
        if node not in self.results:
            self.results.append(node)
            self.names.append(name or node.name)
        return f"result:{self.results.index(node)}"

    def outputs(self, results: list[Any]) -> tuple[str, ...]:
        """Return the sources of the program's flat output tensors; ``results`` are the graph's, in the joint graph's
        order."""
        start = self.joint.forward_values - len(self.joint.outputs)
        sources = []
        for i, output in enumerate(self.joint.outputs):
            if isinstance(output, tuple):
                sources.append(f"{'input' if output[0] == 'input' else 'parameter'}:{output[1]}")
            elif output is not None:
                sources.append(self.result(results[start + i], f"output[{i}]"))
        return tuple(sources)

    def plan(
        self,
        graphs: list[Graph],
        *,
        outputs: tuple[str, ...] = (),
        saved: tuple[str, ...] = (),
        watched: tuple[str, ...] = (),
        gradients: tuple[Gradient, ...] = (),
    ) -> Plan:
        """Bind constants, add the graph to ``graphs`` if it computes anything, and return the plan."""
        joint, graph = self.joint, self.graph
        fx_graph.truncate(graph, self.results)
        constants: dict[str, tuple[str, torch.Tensor]] = {}
        operands: list[str] = []
        inputs: list[TensorSpec] = []
        reads: list[str] = []
        writes: list[str] = []
        attributes: dict[str, Node] = {}
        donated: list[tuple[int, int]] = []  # (input of the graph, saved tensor)
        self._replace_sizes()
        for node in graph.graph.find_nodes(op="placeholder"):
            kind, index = self.placeholders.get(node.name, ("saved", None))
            if kind in ("parameter", "buffer") and node.name not in self.saved:
                if node.users:
                    if any(u.target is aten.copy_.default and u.args[0] is node for u in node.users):
                        writes.append(index)
                    reads.append(index)
                    key = self.weights[index][0]
                    if key not in attributes:
                        attributes[key] = _attribute(graph, node, index, self.weights[index], constants)
                    node.replace_all_uses_with(attributes[key])
                graph.graph.erase_node(node)
                continue
            if not node.users and node.name not in self.saved:
                graph.graph.erase_node(node)
                continue
            if node.name in self.saved:
                number = self.saved[node.name]
                if number in self.donated:
                    donated.append((len(operands), number))
                # the name repeats the plan, and a reader compares the two
                suffix = (
                    ", consumed"
                    if number in self.donated
                    else f" = {self.origins[node.name]}"
                    if node.name in self.origins
                    else ""
                )
                operands.append(f"saved:{number}")
                inputs.append(joint.sizes.spec(f"saved[{number}]{suffix}", node.meta["val"], False))
            elif kind == "input":
                operands.append(f"input:{index}")
                inputs.append(joint.sizes.spec(joint.input_names[index], node.meta["val"], False))
            elif kind == "cotangent":
                operands.append(f"cotangent:{joint.cotangents.index(index)}")
                inputs.append(joint.sizes.spec(f"gradient of output[{index}]", node.meta["val"], False))
            elif kind == "size":
                operands.append(f"size:{index}")
                inputs.append(joint.sizes.spec(f"size {index}", node.meta["val"], False))
            else:
                raise ExportError(f"{self.name}: the graph needs {node.name}, which nothing provides")
        lift_constants(graph, constants, joint.device)
        graph.graph.lint()
        graph.recompile()
        count = sum(1 for n in graph.graph.nodes if n.op == "call_function")
        specs = tuple(
            joint.sizes.spec(n, node.meta["val"], False) for n, node in zip(self.names, self.results, strict=True)
        )
        if self.results:
            graphs.append(
                Graph(self.name, graph, tuple(inputs), specs, constants, count, donated=tuple(i for i, _ in donated))
            )
        call = Call(self.name, tuple(operands)) if self.results else None
        consumes = tuple(i for _, i in donated)
        return Plan(
            call,
            outputs,
            saved,
            watched,
            tuple(dict.fromkeys(reads)),
            tuple(dict.fromkeys(writes)),
            gradients,
            consumes,
        )

    def _replace_sizes(self) -> None:
        """Replace size placeholders by sizes of tensor placeholders. If no tensor has the size, an empty one of shape
        (size, 0) carries it."""
        graph, joint = self.graph, self.joint
        for node in graph.graph.find_nodes(op="placeholder"):
            if "val" not in node.meta:  # a non-tensor argument: its value is already in the graph
                graph.graph.erase_node(node)
        placeholders = list(graph.graph.find_nodes(op="placeholder"))
        size_sources: dict[Any, tuple[Node, int]] = {}
        for node in placeholders:
            if isinstance(node.meta["val"], torch.Tensor) and (
                node.users or self.placeholders.get(node.name, ("saved",))[0] == "cotangent"
            ):
                for d, size in enumerate(node.meta["val"].shape):
                    size_sources.setdefault(expression_of(size), (node, d))
        for node in placeholders:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                continue
            if node.users:
                expression = expression_of(value)
                if expression not in size_sources:
                    placeholder = next(iter(graph.graph.find_nodes(op="placeholder")))  # of the remaining placeholders
                    with graph.graph.inserting_before(placeholder), joint.fake_mode:
                        carrier = graph.graph.placeholder(f"carrier_{len(size_sources)}")
                        carrier.meta["val"] = torch.empty((value, 0), device=joint.device)
                    self.placeholders[carrier.name] = ("size", str(joint.sizes.size(value)))
                    size_sources[expression] = (carrier, 0)
                tensor, d = size_sources[expression]
                with graph.graph.inserting_after(list(graph.graph.find_nodes(op="placeholder"))[-1]):
                    size_node = graph.graph.call_function(aten.sym_size.int, (tensor, d))
                size_node.meta["val"] = value
                node.replace_all_uses_with(size_node)
            graph.graph.erase_node(node)


def _attribute(
    graph: GraphModule,
    node: Node,
    name: str,
    weight: tuple[str, torch.Tensor],
    constants: dict[str, tuple[str, torch.Tensor]],
) -> Node:
    attribute = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    if attribute[0].isdigit():  # from nn.Sequential; the compiler would rename it this way, and both names must match
        attribute = f"constant_{attribute}"
    while attribute in constants:
        attribute += "_"
    graph.register_buffer(attribute, weight[1])
    constants[attribute] = weight
    with graph.graph.inserting_after(list(graph.graph.find_nodes(op="placeholder"))[-1]):
        constant = graph.graph.get_attr(attribute)
    constant.meta = dict(node.meta)
    return constant


def lift_constants(graph: GraphModule, constants: dict[str, tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Store and bind tensors that the program made or closed over like weights, but by content: each trace names them
    anew. In a graph for a GPU, move numbers (0-d tensors on the CPU) to the GPU, as eager does."""
    for node in graph.graph.find_nodes(op="get_attr"):
        if node.target not in constants:
            value = operator.attrgetter(node.target)(graph)
            if not isinstance(value, torch.Tensor):
                continue  # a subgraph of a control-flow operator
            if value.dim() == 0 and value.device.type == "cpu" and device.type == "cuda":
                path, _, last = str(node.target).rpartition(".")
                value = value.to(device)
                setattr(graph.get_submodule(path), last, value)
            constants[node.target] = (f"constants.{_digest(value)}", value.detach())


def _digest(tensor: torch.Tensor) -> str:
    cpu_tensor = tensor.detach().cpu().contiguous()
    header = f"{cpu_tensor.dtype} {tuple(cpu_tensor.shape)} {tensor.stride()} {tensor.device.type}".encode()
    return hashlib.sha256(header + cpu_tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:32]
