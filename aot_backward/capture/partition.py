"""From a joint graph to the graphs that are compiled, and the plans that say how the runtime calls them.

``module`` entries: the min-cut rematerialization partitioner cuts the joint graph in two; a third graph, the forward alone, serves calls
that need no gradient. ``grad`` entries: one graph, with the incoming gradient of the loss put in as a constant one.

In every graph the parameters and buffers become ``get_attr`` nodes, which AOTInductor turns into constants that the runtime binds by pointer:
they are never passed. What the backward needs again of a parameter it reads itself; only activations and inputs cross the cut.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Call, Gradient, Plan, TensorSpec

from .. import torch_api
from ..graph import Graph
from .joint_graph import Joint
from .shapes.symbolic_shapes import expression_of
from .user_code import parameter_hooks

aten = torch.ops.aten
_VIEWS = {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.alias.default, aten.detach.default, aten.as_strided.default, aten.diagonal.default, aten.unfold.default,
}  # fmt: skip
"""Operators whose result shares its first argument's memory and costs nothing to make again."""


@dataclass
class Pieces:
    """The graphs of one variant and how they are called."""

    graphs: list[Graph] = field(default_factory=list)
    forward: Plan | None = None
    backward: Plan | None = None
    inference: Plan | None = None
    gradient: Plan | None = None
    step: Plan | None = None
    accumulate: Plan | None = None


def split_module(joint: Joint, name: str, weights: Mapping[str, tuple[str, torch.Tensor]], *, forward_only: bool) -> Pieces:
    """``name``: prefix of the graphs' names. ``weights``: state name -> (weight key, tensor). ``forward_only``: also a graph without gradients."""
    pieces = Pieces()
    joint.graph.graph.set_codegen(torch.fx.CodeGen())
    if not joint.has_backward:
        truncate(joint.graph, results_of(joint.graph)[: joint.forward_values])
        _refuse_sizes_from_data(joint, joint.graph)
        graph = joint_passes(joint.graph, joint)
        pieces.inference = _finish_forward(pieces, Cut(joint, graph, f"{name}.inference", weights), _Crossing())
        return pieces
    sum_ties(joint, weights)
    depends = _dependence(joint)
    with torch.no_grad(), _partition_settings():
        forward, backward = torch_api.partition_fn(
            joint.graph, joint.trace_inputs, num_fwd_outputs=joint.forward_values, static_lifetime_input_indices=[]
        )
    forward.graph.set_codegen(torch.fx.CodeGen())
    backward.graph.set_codegen(torch.fx.CodeGen())
    if forward_only:
        alone = GraphModule(forward, copied(forward.graph))
        truncate(alone, results_of(alone)[: joint.forward_values])
        pieces.inference = _finish_forward(pieces, Cut(joint, alone, f"{name}.inference", weights), _Crossing())

    _refuse_sizes_from_data(joint, forward)
    crossing = _crossing(joint, forward, backward)
    first = Cut(joint, forward, f"{name}.forward", weights)
    pieces.forward = _finish_forward(pieces, first, crossing)
    pieces.backward = _finish_backward(pieces, Cut(joint, backward, f"{name}.backward", weights), crossing, depends, _origins(first, crossing))
    return pieces


def split_grad(joint: Joint, name: str, weights: Mapping[str, tuple[str, torch.Tensor]], wrt: Iterable[tuple[str, Any]]) -> Pieces:
    """One graph that gives the outputs and the gradients of the first of them, which must be a scalar."""
    pieces = Pieces()
    graph = joint.graph
    from_a_scalar(joint, name, weights)
    asked = [(target, joint.gradients.get(target)) for target in wrt]
    truncate(graph, [*results_of(graph)[: joint.forward_values], *(n for _, n in asked)])
    cut = Cut(joint, joint_passes(graph, joint), f"{name}.gradient", weights)
    # passes rewrite nodes: what is what now stands in the output, in the same order
    results = results_of(cut.graph)
    user = current_outputs(joint, cut, results)
    gradients = []
    for (target, _), node in zip(asked, results[joint.forward_values :], strict=True):
        source = cut.result(node, f"gradient of {_called(joint, target)}") if isinstance(node, Node) else ""
        gradients.append(Gradient(_target(target), source))
    pieces.gradient = cut.plan(pieces, outputs=user, gradients=tuple(gradients))
    return pieces


def from_a_scalar(joint: Joint, name: str, weights: Mapping[str, tuple[str, torch.Tensor]]) -> Node:
    """Makes of the joint graph one that needs no incoming gradient: the loss is a scalar, and its own gradient is one, the node that is returned."""
    graph = joint.graph
    graph.graph.set_codegen(torch.fx.CodeGen())
    if not joint.has_backward or joint.outputs[0] is None or not joint.output_requires_grad[0]:
        raise ExportError(f"{name}: the loss does not depend on anything that a gradient is asked for (wrt)")
    loss = joint.outputs[0]
    if not isinstance(loss, Node) or tuple(loss.meta["val"].shape) != ():
        raise ExportError(f"{name}: a gradient needs a scalar loss, got shape {tuple(loss.meta['val'].shape)}; reduce it with .sum() or .mean()")
    sum_ties(joint, weights)
    parameter_hooks.put(joint, weights)
    (node,) = [n for n in graph.graph.find_nodes(op="placeholder") if joint.placeholders[n.name][0] == "cotangent"]  # nothing else is differentiated
    value = node.meta["val"]
    with graph.graph.inserting_after(node), joint.fake_mode:
        settings = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        one = graph.graph.call_function(aten.full.default, ([], 1.0), settings)
        one.meta["val"] = aten.full.default([], 1.0, **settings)
    node.replace_all_uses_with(one)
    graph.graph.erase_node(node)
    joint.gradients.update({target: one for target, gradient in joint.gradients.items() if gradient is node})  # of what is added to the loss
    return one


class Cut:
    """One graph on its way to the compiler: collects its results, binds its constants, and says how it is called."""

    def __init__(self, joint: Joint, graph: GraphModule, name: str, weights: Mapping[str, tuple[str, torch.Tensor]]):
        self.joint, self.graph, self.name, self.weights = joint, graph, name, weights
        self.results: list[Node] = []
        self.names: list[str] = []
        self.saved: dict[str, int] = {}  # placeholder name -> index among the saved tensors
        self.origins: dict[str, str] = {}  # of saved tensors that somebody else sees too, by placeholder name: what they are called there
        self.donated: frozenset[int] = frozenset()  # saved tensors that nobody else sees

    def result(self, node: Node, name: str = "") -> str:
        """The node as an output of the compiled graph: ``result:I``; ``state``, inputs and repeats are not computed twice."""
        if node not in self.results:
            self.results.append(node)
            self.names.append(name or node.name)
        return f"result:{self.results.index(node)}"

    def plan(
        self,
        pieces: Pieces,
        *,
        outputs: tuple[str, ...] = (),
        saved: tuple[str, ...] = (),
        watched: tuple[str, ...] = (),
        gradients: tuple[Gradient, ...] = (),
    ) -> Plan:
        """Binds constants, registers the graph, and returns the plan."""
        joint, graph = self.joint, self.graph
        truncate(graph, self.results)
        constants: dict[str, tuple[str, torch.Tensor]] = {}
        operands: list[str] = []
        inputs: list[TensorSpec] = []
        reads: list[str] = []
        writes: list[str] = []
        attributes: dict[str, Node] = {}
        donated: list[tuple[int, int]] = []  # (input of the graph, saved tensor)
        _replace_sizes(graph, joint)
        for node in graph.graph.find_nodes(op="placeholder"):
            kind, index = joint.placeholders.get(node.name, ("saved", None))
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
                # its name says again what the plan says of it: a reader compares the two
                more = ", consumed" if number in self.donated else f" = {self.origins[node.name]}" if node.name in self.origins else ""
                operands.append(f"saved:{number}")
                inputs.append(joint.sizes.spec(f"saved[{number}]{more}", node.meta["val"], False))
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
        lift_constants(graph, constants, device_of(self.joint))
        graph.graph.lint()
        graph.recompile()
        count = sum(1 for n in graph.graph.nodes if n.op == "call_function")
        specs = tuple(joint.sizes.spec(n, node.meta["val"], False) for n, node in zip(self.names, self.results, strict=True))
        if self.results:
            made = Graph(self.name, graph, tuple(inputs), specs, constants, count, _rounds(graph), donated=tuple(i for i, _ in donated))
            pieces.graphs.append(made)
        call = Call(self.name, tuple(operands)) if self.results else None
        consumes = tuple(i for _, i in donated)
        return Plan(call, outputs, saved, watched, tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)), gradients, consumes)


def _finish_forward(pieces: Pieces, cut: Cut, crossing: _Crossing) -> Plan:
    outputs = current_outputs(cut.joint, cut, results_of(cut.graph))

    def source(node: Node) -> str:
        if node.op != "placeholder":
            return cut.result(node, f"saved[{crossing.nodes.index(node)}]" if node in crossing.nodes else "")
        kind, index = cut.joint.placeholders[node.name]
        return f"{'input' if kind == 'input' else 'parameter'}:{index}"

    saved = tuple(source(n) for n in crossing.nodes)
    watched = tuple(dict.fromkeys(source(n) for n in crossing.watched))
    return cut.plan(pieces, outputs=outputs, saved=saved, watched=tuple(w for w in watched if w not in saved))


def _origins(forward: Cut, crossing: _Crossing) -> dict[str, str]:
    """What saved tensors are called that are inputs, or outputs too: whoever reads the package can tell them from each other by that."""
    out = {}
    for number, node in enumerate(crossing.nodes):
        if node.op == "placeholder":
            kind, index = forward.joint.placeholders[node.name]
            name = forward.joint.input_names[index] if kind == "input" else ""
        else:
            name = forward.names[forward.results.index(node)]
        if name and name != f"saved[{number}]":
            out[node.name] = name
    return out


def _finish_backward(pieces: Pieces, cut: Cut, crossing: _Crossing, depends: dict[tuple[str, Any], tuple[int, ...]], origins: dict[str, str]) -> Plan:
    joint = cut.joint
    cut.origins = origins
    cut.saved = {node.name: i for i, node in enumerate(crossing.nodes)}
    cut.donated = frozenset(crossing.donated)
    gradients = []
    alone = _not_sharing(cut, [n for t, n in zip(joint.gradient_slots, results_of(cut.graph), strict=True) if t in joint.gradients])
    for target, node in zip(joint.gradient_slots, results_of(cut.graph), strict=True):
        if target in joint.gradients:
            node = alone.get(node, node)
            # its name says again on what it depends: a reader compares the two
            called = f"gradient of {_called(joint, target)} from {', '.join(map(str, depends[target]))}"
            source = cut.result(node, called) if isinstance(node, Node) else ""
            gradients.append(Gradient(_target(target), source, depends[target]))
    return cut.plan(pieces, gradients=tuple(gradients))


def _not_sharing(cut: Cut, gradients: list[Any]) -> dict[Node, Node]:
    """Copies of gradients that are views of another one, or of what was passed in: autograd adds into what it is given."""
    nodes = [n for n in dict.fromkeys(gradients) if isinstance(n, Node)]
    taken = {n for n in nodes if root_of(n) is n}
    out = {}
    for node in nodes:
        root = root_of(node)
        if root is not node and (root in taken or root.op != "call_function"):
            out[node] = _clone(cut.graph, node, cut.joint)
        taken.add(root)
    return out


def current_outputs(joint: Joint, cut: Cut, results: list[Any]) -> tuple[str, ...]:
    """The flat output tensors of the program as sources; ``results`` are the graph's, in the joint graph's order."""
    first = joint.forward_values - len(joint.outputs)
    sources = []
    for i, output in enumerate(joint.outputs):
        if output is None:
            continue
        if isinstance(output, tuple):
            sources.append(f"{'input' if output[0] == 'input' else 'parameter'}:{output[1]}")
        else:
            sources.append(cut.result(results[first + i], f"output[{i}]"))
    return tuple(sources)


def _dependence(joint: Joint) -> dict[tuple[str, Any], tuple[int, ...]]:
    """For each gradient the incoming gradients that reach it, by their number among the cotangents."""
    reach: dict[Node, frozenset[int]] = {}
    for node in joint.graph.graph.nodes:
        kind, index = joint.placeholders.get(node.name, ("", None)) if node.op == "placeholder" else ("", None)
        own = frozenset([joint.cotangents.index(index)]) if kind == "cotangent" else frozenset()
        reach[node] = own.union(*(reach[a] for a in node.all_input_nodes))
    results = results_of(joint.graph)[joint.forward_values :]
    nodes = zip(joint.gradient_slots, results, strict=True)
    return {t: tuple(sorted(reach[n])) if isinstance(n, Node) else () for t, n in nodes if t in joint.gradients}


def sum_ties(joint: Joint, weights: Mapping[str, tuple[str, torch.Tensor]]) -> None:
    """A tied parameter's gradients are added in the graph, and stand under its first name."""
    graph = joint.graph
    output = next(iter(graph.graph.find_nodes(op="output")))
    results = list(output.args[0])
    first: dict[str, int] = {}
    for position, target in enumerate(joint.gradient_slots, start=joint.forward_values):
        if target is None or target[0] != "parameter" or target not in joint.gradients:
            continue
        key = weights[target[1]][0]
        if key not in first:
            first[key] = position
            continue
        home, extra = results[first[key]], results[position]
        owner = joint.gradient_slots[first[key] - joint.forward_values]
        results[position] = None
        del joint.gradients[target]
        if isinstance(home, Node) and isinstance(extra, Node):
            with graph.graph.inserting_before(output), joint.fake_mode:
                total = graph.graph.call_function(aten.add.Tensor, (home, extra))
                total.meta["val"] = aten.add.Tensor(home.meta["val"], extra.meta["val"])
            results[first[key]] = total
        elif isinstance(extra, Node):
            results[first[key]] = extra
        joint.gradients[owner] = results[first[key]]
    output.args = (results,)


@dataclass
class _Crossing:
    """What goes from the forward to the backward: nodes of the forward, and whose memory they share."""

    nodes: list[Node] = field(default_factory=list)
    watched: list[Node] = field(default_factory=list)
    donated: list[int] = field(default_factory=list)  # by place in ``nodes``: whose memory is of nobody else


def _crossing(joint: Joint, forward: GraphModule, backward: GraphModule) -> _Crossing:
    """What the backward needs of the forward, after parameters, their views and sizes have been taken out of the cut."""
    written = _written(forward)
    saved = {n.name: n for n in results_of(forward)[joint.forward_values :] if isinstance(n, Node) and isinstance(n.meta["val"], torch.Tensor)}
    reachable: dict[Node, Node] = {}  # memory that the caller gets hold of -> the output through which
    for node in results_of(forward)[: joint.forward_values]:
        if isinstance(node, Node) and isinstance(node.meta["val"], torch.Tensor):
            reachable.setdefault(root_of(node), node)

    def state(node: Node) -> bool:
        return node.op == "placeholder" and joint.placeholders[node.name][0] in ("parameter", "buffer")

    for placeholder in backward.graph.find_nodes(op="placeholder"):
        source = saved.get(placeholder.name)
        if source is not None and source.op != "placeholder" and state(root_of(source)) and root_of(source).name not in written:
            _rebuild(source, placeholder, backward)
        elif source is not None and _overlaps(source) and _rebuild(source, placeholder, backward):
            saved.setdefault(root_of(source).name, root_of(source))
    out = _Crossing()
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        source = saved.get(placeholder.name)
        if source is None or not placeholder.users:
            continue
        root = root_of(source)
        if (state(root) and root.name in written) or _overlaps(source):  # the forward overwrites it, or Inductor would give it other strides
            source = _clone(forward, source, joint)
            placeholder.name = source.name
            placeholder.meta["val"] = source.meta["val"]
        elif state(source):
            continue
        elif root is not source and root.op == "placeholder":
            out.watched.append(root)
        elif root in reachable and reachable[root] is not source:
            out.watched.append(reachable[root])
        out.nodes.append(source)
    roots = [root_of(n) for n in (*out.nodes, *out.watched)]
    for i, node in enumerate(out.nodes):
        if node.op == "call_function" and roots[i] is node and roots.count(node) == 1 and node not in reachable and _is_fresh(node):
            out.donated.append(i)
    return out


def _refuse_sizes_from_data(joint: Joint, forward: GraphModule) -> None:
    """What leaves the forward, to the caller or to the backward, has a size that the inputs' sizes tell."""
    for i, node in enumerate(results_of(forward)):
        value = node.meta["val"] if isinstance(node, Node) else None
        if not isinstance(value, torch.Tensor | torch.SymFloat | torch.SymInt) or not (symbols := torch_api.free_unbacked_symbols(value)):
            continue
        made = (n for n in forward.graph.nodes if symbols & torch_api.free_unbacked_symbols(n.meta.get("val")))
        source = next(made, node)
        if source.target is operator.getitem:
            source = source.args[0]
        result = "a result whose size depends" if isinstance(value, torch.Tensor) else "a number that depends"
        where = "cannot be an output of a package" if i < joint.forward_values else "cannot go from a forward to its backward"
        raise ExportError.of(
            source.target,
            f"{source.target} gives {result} on the values of a tensor, which {where}: use torch.where or a mask, or a loss in a Grad entry",
        )


def _is_fresh(node: Node) -> bool:
    """Whether the operator always makes new memory."""
    maker = node.args[0] if node.target is operator.getitem else node
    target = maker.target  # type: ignore[union-attr]
    if not isinstance(target, torch_api.OpOverload) or target._schema.is_mutable:
        return False
    return target not in _MAYBE_VIEWS and all(r.alias_info is None for r in target._schema.returns)


_MAYBE_VIEWS = {aten.reshape.default, aten.contiguous.default, aten._to_copy.default, aten.to.dtype}


def _rounds(graph: GraphModule) -> bool:
    """Whether a value is cast to 16 bits and back, which is how a program rounds; the compiler would leave both casts out."""

    def bits(node: Node) -> int:
        casts = node.target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
        dtype = node.meta["val"].dtype if casts else None
        return torch.finfo(dtype).bits if dtype is not None and dtype.is_floating_point else 0

    return any(bits(n) == 16 and any(bits(u) > 16 for u in n.users) for n in graph.graph.nodes)


def _overlaps(node: Node) -> bool:
    """Whether elements share memory, as in sliding windows."""
    if torch_api.is_non_overlapping_and_dense(node.meta["val"]):
        return False
    while node.op == "call_function" and node.target in _VIEWS:
        if node.target in (aten.unfold.default, aten.expand.default, aten.as_strided.default):
            return True
        node = node.args[0]  # type: ignore[assignment]
    return False


def _rebuild(source: Node, placeholder: Node, backward: GraphModule) -> bool:
    """Makes a view in the backward, of a parameter or of what is saved already, instead of carrying it across; False where it cannot."""
    chain = []
    node, root = source, root_of(source)
    while node is not root:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    existing = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    last = list(existing.values())[-1]
    base = existing.get(node.name)
    if base is None:
        with backward.graph.inserting_before(next(iter(existing.values()))):
            base = backward.graph.placeholder(node.name)
        base.meta = dict(node.meta)
    anchor = last
    for step in reversed(chain):
        if any(isinstance(a, Node) for a in _flat(step.args[1:])):
            return False  # depends on a symbolic size: leave it in the cut
    for step in reversed(chain):
        with backward.graph.inserting_after(anchor):
            made = backward.graph.create_node("call_function", step.target, (base, *step.args[1:]), dict(step.kwargs))
        made.meta = dict(step.meta)
        base = anchor = made
    if chain:
        placeholder.replace_all_uses_with(base)
    return True


def _replace_sizes(graph: GraphModule, joint: Joint) -> None:
    """Size placeholders become sizes of tensor placeholders; where no tensor shows the size, an empty one of shape (size, 0) carries it."""
    for node in graph.graph.find_nodes(op="placeholder"):
        if "val" not in node.meta:  # an argument that is no tensor: its value is in the graph already
            graph.graph.erase_node(node)
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    shown: dict[Any, tuple[Node, int]] = {}
    for node in placeholders:
        if isinstance(node.meta["val"], torch.Tensor) and (node.users or joint.placeholders.get(node.name, ("saved",))[0] in ("cotangent",)):
            for d, size in enumerate(node.meta["val"].shape):
                shown.setdefault(expression_of(size), (node, d))
    for node in placeholders:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            continue
        if node.users:
            expression = expression_of(value)
            if expression not in shown:
                first = next(iter(graph.graph.find_nodes(op="placeholder")))  # of those that are left
                with graph.graph.inserting_before(first), joint.fake_mode:
                    carrier = graph.graph.placeholder(f"carrier_{len(shown)}")
                    carrier.meta["val"] = torch.empty((value, 0), device=device_of(joint))
                joint.placeholders[carrier.name] = ("size", str(joint.sizes.size(value)))
                shown[expression] = (carrier, 0)
            tensor, d = shown[expression]
            with graph.graph.inserting_after(list(graph.graph.find_nodes(op="placeholder"))[-1]):
                made = graph.graph.call_function(aten.sym_size.int, (tensor, d))
            made.meta["val"] = value
            node.replace_all_uses_with(made)
        graph.graph.erase_node(node)


def _attribute(graph: GraphModule, node: Node, name: str, weight: tuple[str, torch.Tensor], constants: dict[str, tuple[str, torch.Tensor]]) -> Node:
    attribute = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    if attribute[0].isdigit():  # of nn.Sequential; the compiler would rename it so, and the library's name must be the graph's
        attribute = f"constant_{attribute}"
    while attribute in constants:
        attribute += "_"
    graph.register_buffer(attribute, weight[1])
    constants[attribute] = weight
    with graph.graph.inserting_after(list(graph.graph.find_nodes(op="placeholder"))[-1]):
        made = graph.graph.get_attr(attribute)
    made.meta = dict(node.meta)
    return made


def lift_constants(graph: GraphModule, constants: dict[str, tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Tensors that the program made or closed over are stored like weights, and bound like them, by content: each trace names them anew. Where the
    graph is for a GPU, numbers (0-d tensors on the CPU) go there, as eager takes them along."""
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
    plain = tensor.detach().cpu().contiguous()
    about = f"{plain.dtype} {tuple(plain.shape)} {tensor.stride()} {tensor.device.type}".encode()
    return hashlib.sha256(about + plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def device_of(joint: Joint) -> torch.device:
    return next((t.device for t in joint.inputs), torch.device("cpu"))


def joint_passes(graph: GraphModule, joint: Joint) -> GraphModule:
    with torch.no_grad(), _partition_settings():
        out = torch_api._recursive_joint_graph_passes(graph, input_device=device_of(joint))
    return out if out is not None else graph


def _partition_settings() -> Any:
    """``shape_padding``: on a GPU it makes matrices larger where that is faster, asks the sizes for it, which would be guards, and the clock."""
    return torch_api.inductor_config.patch(fallback_random=True, layout_optimization=False, shape_padding=False)


def _written(graph: GraphModule) -> set[str]:
    return {n.args[0].name for n in graph.graph.find_nodes(op="call_function", target=aten.copy_.default) if n.args[0].op == "placeholder"}


def _clone(graph: GraphModule, source: Node, joint: Joint) -> Node:
    anchor = source if source.op != "placeholder" else list(graph.graph.find_nodes(op="placeholder"))[-1]
    with graph.graph.inserting_after(anchor), joint.fake_mode:
        copy = graph.graph.call_function(aten.clone.default, (source,))
        copy.meta["val"] = aten.clone.default(source.meta["val"])
    return copy


def root_of(node: Node) -> Node:
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    out = torch.fx.Graph()
    results = out.graph_copy(graph, val_map={})
    out.output(results)
    return out


def results_of(graph: GraphModule) -> list[Any]:
    return list(next(iter(graph.graph.find_nodes(op="output"))).args[0])


def truncate(graph: GraphModule, results: Iterable[Any]) -> None:
    output = next(iter(graph.graph.find_nodes(op="output")))
    output.args = (tuple(results),)
    output.meta = {}
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for a in args:
        if isinstance(a, (list, tuple)):
            yield from _flat(a)
        else:
            yield a


def _target(target: tuple[str, Any]) -> str:
    return f"{target[0]}:{target[1]}"


def _called(joint: Joint, target: tuple[str, Any]) -> str:
    return target[1] if target[0] == "parameter" else joint.input_names[target[1]]
