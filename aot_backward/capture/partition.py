"""Split a joint graph into the graphs that are compiled, and the plans by which the runtime calls them.

``module`` entries: one of torch's partitioners (:data:`PARTITIONERS`) divides the joint graph in two; a third graph,
the forward alone, serves calls that need no gradient. ``grad`` entries: one graph, in which the incoming gradient of
the loss is a constant 1.

The backward reads parameters itself; only activations and inputs are saved. The joint graph is not modified:
:func:`split_module` and :func:`with_scalar_loss` begin with a copy, and the functions below them rewrite that copy's FX
graph.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import Graph
from aot_backward_exporters.process_state import matrix_products_for_any_size
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Gradient, Plan

from . import fx_graph
from .bind_graph import GraphBinder, Weights
from .fx_graph import results_of, root_of, truncate
from .joint_graph import Joint
from .user_code import parameter_hooks

aten = torch.ops.aten

PARTITIONERS: tuple[str, str] = ("default", "min_cut")
"""torch's partitioners: ``default`` saves the tensors that autograd saves, ``min_cut`` saves as few bytes as possible
and recomputes the rest."""


def partitioners(device: str) -> tuple[str, str]:
    """Return :data:`PARTITIONERS`, first the one that is nearly always faster: on a GPU recomputing a tensor costs less
    than reading it."""
    return PARTITIONERS if device == "cpu" else (PARTITIONERS[1], PARTITIONERS[0])


@dataclass
class Partitions:
    """The graphs of one variant and the plans that call them."""

    graphs: list[Graph] = field(default_factory=list)
    forward: Plan | None = None
    backward: Plan | None = None
    inference: Plan | None = None
    gradient: Plan | None = None
    step: Plan | None = None
    accumulate: Plan | None = None


def split_module(
    joint: Joint, name: str, weights: Weights, *, forward_only: bool, partitioner: str | None = None
) -> Partitions:
    """Split ``joint`` into forward and backward. ``name``: prefix of the graphs' names. ``forward_only``: also make a
    graph without gradients. ``partitioner``: one of :data:`PARTITIONERS`; default: the first of
    :func:`partitioners`."""
    partitions = Partitions()
    partitioner = partitioner or partitioners(joint.device.type)[0]
    joint = joint.copy()
    if not joint.has_backward:
        truncate(joint.graph, results_of(joint.graph)[: joint.forward_values])
        _refuse_sizes_from_data(joint, joint.graph)
        inference_graph = joint_passes(joint.graph, joint.device)
        partitions.inference = _finish_forward(
            partitions, GraphBinder(joint, inference_graph, f"{name}.inference", weights), _Saved()
        )
        return partitions
    joint = _with_ties_summed(joint, weights)
    dependence = _dependence(joint)
    saving = torch_api.inductor_config.patch(
        custom_partitioner_fn=_saving_as_autograd() if partitioner == "default" else None
    )
    with torch.no_grad(), _partition_settings(), saving:
        forward, backward = torch_api.partition_fn(
            joint.graph, joint.trace_inputs, num_fwd_outputs=joint.forward_values, static_lifetime_input_indices=[]
        )
    forward.graph.set_codegen(torch.fx.CodeGen())
    backward.graph.set_codegen(torch.fx.CodeGen())
    _erase_unused_repetitions(forward, backward)
    if forward_only:
        inference_graph, _ = fx_graph.copy_of(forward)
        truncate(inference_graph, results_of(inference_graph)[: joint.forward_values])
        partitions.inference = _finish_forward(
            partitions, GraphBinder(joint, inference_graph, f"{name}.inference", weights), _Saved()
        )

    _refuse_sizes_from_data(joint, forward)
    saved = _saved_tensors(joint, forward, backward)
    first = GraphBinder(joint, forward, f"{name}.forward", weights)
    second = GraphBinder(joint, backward, f"{name}.backward", weights)
    partitions.forward = _finish_forward(partitions, first, saved)
    second.origins = _origins(first, saved)
    partitions.backward = _finish_backward(partitions, second, saved, dependence)
    return partitions


def split_grad(joint: Joint, name: str, weights: Weights, wrt: Iterable[tuple[str, Any]]) -> Partitions:
    """Make one graph that returns the outputs and the gradients of the first one, which must be a scalar."""
    partitions = Partitions()
    joint, _ = with_scalar_loss(joint, name, weights)
    graph = joint.graph
    target_nodes = [(target, joint.gradients.get(target)) for target in wrt]
    truncate(graph, [*results_of(graph)[: joint.forward_values], *(n for _, n in target_nodes)])
    binder = GraphBinder(joint, joint_passes(graph, joint.device), f"{name}.gradient", weights)
    # passes rewrite nodes, but keep the order of the outputs
    results = results_of(binder.graph)
    outputs = binder.outputs(results)
    gradients = []
    for (target, _), node in zip(target_nodes, results[joint.forward_values :], strict=True):
        source = binder.result(node, f"gradient of {_name_of(joint, target)}") if isinstance(node, Node) else ""
        gradients.append(Gradient(_written(target), source))
    partitions.gradient = binder.plan(partitions.graphs, outputs=outputs, gradients=tuple(gradients))
    return partitions


def with_scalar_loss(joint: Joint, name: str, weights: Weights) -> tuple[Joint, str]:
    """Return a copy without an incoming gradient, and the name of the node that replaces it, a constant 1. The loss
    must be a scalar. Gradients of tied parameters are summed, and parameter hooks inserted."""
    if not joint.has_backward or joint.outputs[0] is None or not joint.output_requires_grad[0]:
        raise ExportError(
            f"{name}: the loss does not depend on any tensor that gets a gradient (wrt of a Grad, trained parameters of a Step)"
        )
    joint = joint.copy()
    loss = joint.outputs[0]
    if not isinstance(loss, Node) or tuple(loss.meta["val"].shape) != ():
        raise ExportError(
            f"{name}: a gradient needs a scalar loss, got shape {tuple(loss.meta['val'].shape)}; reduce it with .sum() or .mean()"
        )
    joint = parameter_hooks.with_hooks(_with_ties_summed(joint, weights), weights)
    graph = joint.graph
    # Only the loss is differentiated
    (node,) = [n for n in graph.graph.find_nodes(op="placeholder") if joint.placeholders[n.name][0] == "cotangent"]
    value = node.meta["val"]
    with graph.graph.inserting_after(node), joint.fake_mode:
        settings = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        grad_output = graph.graph.call_function(aten.full.default, ([], 1.0), settings)
        grad_output.meta["val"] = aten.full.default([], 1.0, **settings)
    node.replace_all_uses_with(grad_output)
    graph.graph.erase_node(node)
    # if a parameter is added to the loss, its gradient is the loss's own
    return replace(
        joint, gradients={t: grad_output if gradient is node else gradient for t, gradient in joint.gradients.items()}
    ), grad_output.name


def _saving_as_autograd() -> Any:
    """Return the Inductor setting that selects the default partitioner."""

    class Default(torch_api.CustomPartitionerFn):
        def __call__(
            self, module: GraphModule, inputs: Any, *, compiler: str, **options: Any
        ) -> tuple[GraphModule, GraphModule]:
            forward, backward = torch_api.default_partition(module, inputs, **options)
            return forward, backward

        def uuid(self) -> str:
            return "default"

    return Default()


def _erase_unused_repetitions(forward: GraphModule, backward: GraphModule) -> None:
    """Erase unused nodes of the backward that repeat the forward. The default partitioner keeps operators that may draw
    random numbers, such as attention, in both."""
    names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    for node in reversed(list(backward.graph.nodes)):
        if node.op == "call_function" and node.name in names and not node.users:
            backward.graph.erase_node(node)


def _finish_forward(partitions: Partitions, binder: GraphBinder, saved: _Saved) -> Plan:
    outputs = binder.outputs(results_of(binder.graph))

    def source(node: Node) -> str:
        if node.op != "placeholder":
            return binder.result(node, f"saved[{saved.nodes.index(node)}]" if node in saved.nodes else "")
        kind, index = binder.placeholders[node.name]
        return f"{'input' if kind == 'input' else 'parameter'}:{index}"

    sources = tuple(source(n) for n in saved.nodes)
    watched = tuple(dict.fromkeys(source(n) for n in saved.watched))
    return binder.plan(
        partitions.graphs, outputs=outputs, saved=sources, watched=tuple(w for w in watched if w not in sources)
    )


def _origins(forward: GraphBinder, saved: _Saved) -> dict[str, str]:
    """Name the saved tensors that are also inputs or outputs; a reader of the package tells them apart by these
    names."""
    out = {}
    for number, node in enumerate(saved.nodes):
        if node.op == "placeholder":
            kind, index = forward.placeholders[node.name]
            name = forward.joint.input_names[index] if kind == "input" else ""
        else:
            name = forward.names[forward.results.index(node)]
        if name and name != f"saved[{number}]":
            out[node.name] = name
    return out


def _finish_backward(
    partitions: Partitions, binder: GraphBinder, saved: _Saved, depends: dict[tuple[str, Any], tuple[int, ...]]
) -> Plan:
    joint = binder.joint
    binder.saved = {node.name: i for i, node in enumerate(saved.nodes)}
    binder.donated = frozenset(saved.donated)
    gradients = []
    copies = _copies_of_views(
        binder, [n for t, n in zip(joint.gradient_slots, results_of(binder.graph), strict=True) if t in joint.gradients]
    )
    for target, node in zip(joint.gradient_slots, results_of(binder.graph), strict=True):
        if target in joint.gradients:
            node = copies.get(node, node)
            # the name repeats the dependence, and a reader compares the two
            name = f"gradient of {_name_of(joint, target)} from {', '.join(map(str, depends[target]))}"
            source = binder.result(node, name) if isinstance(node, Node) else ""
            gradients.append(Gradient(_written(target), source, depends[target]))
    return binder.plan(partitions.graphs, gradients=tuple(gradients))


def _copies_of_views(binder: GraphBinder, gradients: list[Any]) -> dict[Node, Node]:
    """Copy gradients that are views of another one or of a graph input, because autograd adds into gradients in
    place."""
    nodes = [n for n in dict.fromkeys(gradients) if isinstance(n, Node)]
    roots = {n for n in nodes if root_of(n) is n}
    out = {}
    for node in nodes:
        root = root_of(node)
        if root is not node and (root in roots or root.op != "call_function"):
            out[node] = fx_graph.clone_of(binder.graph, node, binder.joint.fake_mode)
        roots.add(root)
    return out


def _dependence(joint: Joint) -> dict[tuple[str, Any], tuple[int, ...]]:
    """Return for each gradient the indices of the incoming gradients that reach it."""
    reach: dict[Node, frozenset[int]] = {}
    for node in joint.graph.graph.nodes:
        kind, index = joint.placeholders.get(node.name, ("", None)) if node.op == "placeholder" else ("", None)
        own_indices = frozenset([joint.cotangents.index(index)]) if kind == "cotangent" else frozenset()
        reach[node] = own_indices.union(*(reach[a] for a in node.all_input_nodes))
    results = results_of(joint.graph)[joint.forward_values :]
    nodes = zip(joint.gradient_slots, results, strict=True)
    return {t: tuple(sorted(reach[n])) if isinstance(n, Node) else () for t, n in nodes if t in joint.gradients}


def _with_ties_summed(joint: Joint, weights: Weights) -> Joint:
    """Add a tied parameter's gradients in the graph, under its first name."""
    graph = joint.graph
    output = fx_graph.output_of(graph.graph)
    results = results_of(graph)
    gradients = dict(joint.gradients)
    positions: dict[str, int] = {}
    for position, target in enumerate(joint.gradient_slots, start=joint.forward_values):
        if target is None or target[0] != "parameter" or target not in gradients:
            continue
        key = weights[target[1]][0]
        if key not in positions:
            positions[key] = position
            continue
        gradient, other = results[positions[key]], results[position]
        owner = joint.gradient_slots[positions[key] - joint.forward_values]
        results[position] = None
        del gradients[target]
        if isinstance(gradient, Node) and isinstance(other, Node):
            with graph.graph.inserting_before(output), joint.fake_mode:
                results[positions[key]] = fx_graph.call(graph.graph, aten.add.Tensor, gradient, other)
        elif isinstance(other, Node):
            results[positions[key]] = other
        gradients[owner] = results[positions[key]]
    output.args = (results,)
    return replace(joint, gradients=gradients)


@dataclass
class _Saved:
    """Tensors that go from the forward to the backward: nodes of the forward, and the owners of their memory."""

    nodes: list[Node] = field(default_factory=list)
    watched: list[Node] = field(default_factory=list)  # not saved themselves, but a saved tensor is a view of them
    donated: list[int] = field(default_factory=list)  # indices in ``nodes``; nothing else refers to their memory


def _saved_tensors(joint: Joint, forward: GraphModule, backward: GraphModule) -> _Saved:
    """Return the tensors that the backward needs from the forward, without parameters, their views and sizes."""
    writes = fx_graph.written_placeholders(forward)
    saved = {
        n.name: n
        for n in results_of(forward)[joint.forward_values :]
        if isinstance(n, Node) and isinstance(n.meta["val"], torch.Tensor)
    }
    reachable: dict[Node, Node] = {}  # memory that the caller can reach -> the output that exposes it
    for node in results_of(forward)[: joint.forward_values]:
        if isinstance(node, Node) and isinstance(node.meta["val"], torch.Tensor):
            reachable.setdefault(root_of(node), node)

    def state(node: Node) -> bool:
        return node.op == "placeholder" and joint.placeholders[node.name][0] in ("parameter", "buffer")

    for placeholder in backward.graph.find_nodes(op="placeholder"):
        source = saved.get(placeholder.name)
        if (
            source is not None
            and source.op != "placeholder"
            and state(root_of(source))
            and root_of(source).name not in writes
        ):
            _rebuild_view(source, placeholder, backward)
        elif source is not None and fx_graph.overlaps(source) and _rebuild_view(source, placeholder, backward):
            saved.setdefault(root_of(source).name, root_of(source))
    out = _Saved()
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        source = saved.get(placeholder.name)
        if source is None or not placeholder.users:
            continue
        root = root_of(source)
        # The forward overwrites it, or Inductor would change its strides
        if (state(root) and root.name in writes) or fx_graph.overlaps(source):
            source = fx_graph.clone_of(forward, source, joint.fake_mode)
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
        if (
            node.op == "call_function"
            and roots[i] is node
            and roots.count(node) == 1
            and node not in reachable
            and fx_graph.is_fresh(node)
        ):
            out.donated.append(i)
    return out


def _rebuild_view(source: Node, placeholder: Node, backward: GraphModule) -> bool:
    """Rebuild a view of a parameter or saved tensor in the backward instead of saving it; return False if that is
    impossible."""
    chain = []
    node, root = source, root_of(source)
    while node is not root:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    placeholders = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    last = list(placeholders.values())[-1]
    base = placeholders.get(node.name)
    if base is None:
        if any(n.name == node.name for n in backward.graph.nodes):
            return False  # recomputed in the backward
        with backward.graph.inserting_before(next(iter(placeholders.values()))):
            base = backward.graph.placeholder(node.name)
        base.name = node.name  # tensors are matched by name, and FX changes a name that an erased node had
        base.meta = dict(node.meta)
    if any(fx_graph.depends_on_nodes(step.args[1:]) for step in chain):
        return False  # it depends on a symbolic size: save it
    anchor = last
    for step in reversed(chain):
        with backward.graph.inserting_after(anchor):
            new_node = backward.graph.create_node(
                "call_function", step.target, (base, *step.args[1:]), dict(step.kwargs)
            )
        new_node.meta = dict(step.meta)
        base = anchor = new_node
    if chain:
        placeholder.replace_all_uses_with(base)
    return True


def _refuse_sizes_from_data(joint: Joint, forward: GraphModule) -> None:
    """Refuse results of the forward, for the caller or the backward, with sizes that do not follow from the inputs'
    sizes."""
    for i, node in enumerate(results_of(forward)):
        value = node.meta["val"] if isinstance(node, Node) else None
        if not isinstance(value, torch.Tensor | torch.SymFloat | torch.SymInt):
            continue
        symbols = torch_api.free_unbacked_symbols(value)
        if not symbols:
            continue
        producers = (n for n in forward.graph.nodes if symbols & torch_api.free_unbacked_symbols(n.meta.get("val")))
        source = next(producers, node)
        if source.target is operator.getitem:
            source = source.args[0]
        result = "a result with a size that depends" if isinstance(value, torch.Tensor) else "a number that depends"
        restriction = (
            "cannot be an output of a package"
            if i < joint.forward_values
            else "cannot be passed from a forward to its backward"
        )
        is_read = str(source.target) == "aten._local_scalar_dense.default" and isinstance(
            source.meta["val"], torch.SymInt
        )
        advice = (
            "pass such a size as an argument" if is_read else "use torch.where or a mask, or a loss in a Grad entry"
        )
        raise ExportError.of(
            source.target,
            f"{source.target} returns {result} on the values of a tensor; it {restriction}. Instead, {advice}",
        )


def joint_passes(graph: GraphModule, device: torch.device) -> GraphModule:
    """Return ``graph`` after Inductor's passes over joint graphs, which the partitioner runs itself."""
    with torch.no_grad(), _partition_settings():
        out = torch_api._recursive_joint_graph_passes(graph, input_device=device)
    return out if out is not None else graph


@contextlib.contextmanager
def _partition_settings() -> Iterator[None]:
    """Configure the partitioner. ``shape_padding`` enlarges matrices on a GPU if that is faster; it would add guards on
    sizes and run timings. ``backed_size_oblivious``: views of two dynamic sizes ask whether a size is 1, and the guard
    would refuse a batch of 1."""
    with (
        matrix_products_for_any_size(),
        torch_api.inductor_config.patch(
            fallback_random=True,
            layout_optimization=False,
            shape_padding=False,
            emulate_precision_casts=True,  # otherwise casts to 16 bits and back are removed
        ),
        torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True),
    ):
        yield


def _written(target: tuple[str, Any]) -> str:
    return f"{target[0]}:{target[1]}"


def _name_of(joint: Joint, target: tuple[str, Any]) -> str:
    return target[1] if target[0] == "parameter" else joint.input_names[target[1]]
