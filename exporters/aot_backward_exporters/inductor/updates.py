"""Compiles the update of a parameter once for all parameters that are updated alike.

An optimizer makes the same element-wise changes to every parameter and its state. Inductor lowers, schedules and prints
each one: half of the time that the export of a training step takes. Here each update becomes one call of
:data:`UPDATE`. Its body is a subgraph over flat tensors of a dynamic size, which Inductor compiles once; each call
passes its own tensors and their number of elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import torch_api
from ..process_state import patched
from ..rewrites.graph_edit import call

aten = torch.ops.aten

LEAST = 32
"""Equal updates that become calls. A training step of 110 µs takes 1.5 % longer with 24 calls, because Inductor no
longer merges each update with the sum that is its gradient; steps of 5 ms and more take as long as before."""
_STORED = ("get_attr", "placeholder")
_SIZE = 2**16  # the size that stands for any in the body; the number of threads depends on the size of the call

_LIBRARY = torch.library.Library("aot_backward", "FRAGMENT")
_LIBRARY.define("update(str body, Tensor[] read, Tensor(a!)[] changed) -> ()")
_LIBRARY.impl("update", lambda body, read, changed: None, "Meta")

UPDATE = torch.ops.aot_backward.update.default
"""``body``: the name of the subgraph, whose inputs are ``changed`` and ``read``, and whose outputs are the new values
of ``changed``. The calls exist only in the graph that Inductor lowers."""


class _Update:
    """Nodes that lead to nothing but ``copies`` of new values into tensors of one shape, in the order of the graph.
    ``changed`` are these tensors, ``read`` the others that it needs. An element of a vector is read from the vector."""

    def __init__(self, nodes: list[Node], copies: list[Node]) -> None:
        self.nodes, self.copies = nodes, copies
        self.changed: list[Node] = [copy.args[0] for copy in copies]  # type: ignore[misc]
        inside = {*nodes, *self.changed}
        outside = dict.fromkeys(n for node in (*nodes, *copies) for n in node.all_input_nodes if n not in inside)
        elements = [node for node in outside if node.target is aten.select.int and node.meta["val"].dim() == 0]
        self.vectors = {node.args[0] for node in elements}
        self.inner = [*elements, *nodes]
        self.read: list[Node] = list(dict.fromkeys(n.args[0] if n in elements else n for n in outside))  # type: ignore[misc]


def as_calls(module: GraphModule, fake_mode: Any) -> bool:
    """Replace updates that occur at least :data:`LEAST` times in ``module``. Return whether there are any."""
    if not module.graph.find_nodes(op="placeholder"):
        return False  # Inductor knows no dynamic size then; the update of accumulated gradients is such a graph
    alike: dict[Any, list[_Update]] = {}
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for update in _updates(module.graph, order):
        if _can_wait(update, order) and (key := _key(update)) is not None:
            alike.setdefault(key, []).append(update)
    groups = [group for group in alike.values() if len(group) >= LEAST]
    for number, updates in enumerate(groups):
        name = f"update_{number}"
        setattr(module, name, _body(updates[0], fake_mode))
        for update in updates:
            with module.graph.inserting_before(update.copies[-1]), fake_mode:
                call(module.graph, UPDATE, name, update.read, update.changed)
            for node in (*update.copies, *reversed(update.nodes)):
                module.graph.erase_node(node)
    if groups:
        _register_lowering()
    return bool(groups)


def _updates(graph: Graph, order: Mapping[Node, int]) -> Iterator[_Update]:
    part_of: dict[Node, list[Node]] = {}  # the nodes that one update shares
    for node in reversed(graph.nodes):
        is_copy = node.target is aten.copy_.default and node.args[0].op in _STORED and not node.users
        if not is_copy and not (_is_elementwise(node) and node.users and all(user in part_of for user in node.users)):
            continue
        joined = [node]
        for part in {id(part_of[user]): part_of[user] for user in node.users}.values():
            joined += part
        for each in joined:
            part_of[each] = joined
    for part in {id(part): part for part in part_of.values()}.values():
        nodes = sorted(part, key=order.__getitem__)
        copies = [n for n in nodes if n.target is aten.copy_.default]
        yield _Update([n for n in nodes if n.target is not aten.copy_.default], copies)


def _is_elementwise(node: Node) -> bool:
    value = node.meta.get("val")
    is_pointwise = (
        torch.Tag.pointwise in getattr(node.target, "tags", ())
        or node.target is torch.ops.prims.convert_element_type.default
    )
    return is_pointwise and isinstance(value, torch.Tensor) and value.dim() > 0


def _can_wait(update: _Update, order: Mapping[Node, int]) -> bool:
    """Return whether the update may run where its last copy is: nothing that it reads changes before, and nothing reads
    earlier what it changes."""
    for copy, changed in zip(update.copies, update.changed, strict=True):
        if any(order[user] > order[copy] for user in changed.users):
            return False
    for node in update.read:
        while node.target is operator.getitem or (
            isinstance(node.target, torch_api.OpOverload) and _returns_view(node.target)
        ):
            node = node.all_input_nodes[0]
        if node.op in _STORED and any(
            user.target is aten.copy_.default and user.args[0] is node for user in node.users
        ):
            return False
    return True


def _returns_view(target: Any) -> bool:
    return any(value.alias_info is not None for value in target._schema.returns)


def _key(update: _Update) -> Any:
    """Return what equal updates have in common; None if the tensors of one differ in shape, are not contiguous, or have
    a dynamic size or none."""
    nodes = (*update.changed, *update.read, *update.inner)
    shape = update.changed[0].meta["val"].shape
    if not shape or len(set(update.changed)) < len(update.changed):
        return None
    layouts: list[Any] = []
    for node in nodes:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
            return None
        is_like = value.dim() > 0 and node not in update.vectors
        if value.device.type != "cpu" or not value.is_contiguous() or (is_like and value.shape != shape):
            return None
        layouts.append((value.dtype, "like" if is_like else value.shape))
    places = {node: number for number, node in enumerate(nodes)}
    calls = [
        (n.target, map_arg(n.args, places.__getitem__), map_arg(n.kwargs, places.__getitem__))
        for n in (*update.inner, *update.copies)
    ]
    return repr((len(update.changed), layouts, calls))


def _body(update: _Update, fake_mode: Any) -> GraphModule:
    """Return the update as a function of flat tensors of any size, and of numbers."""
    graph = Graph()
    size = _any_size(fake_mode)
    nodes: dict[Node, Node] = {}
    with fake_mode, torch_api.enable_python_dispatcher():
        for number, node in enumerate((*update.changed, *update.read)):
            value = node.meta["val"]
            nodes[node] = graph.placeholder(f"arg{number}_1")
            is_like = value.dim() > 0 and node not in update.vectors
            nodes[node].meta["val"] = torch.empty([size] if is_like else value.shape, dtype=value.dtype)
        for node in update.inner:
            nodes[node] = call(
                graph, node.target, *map_arg(node.args, nodes.__getitem__), **map_arg(node.kwargs, nodes.__getitem__)
            )
        for copy in update.copies:
            call(graph, aten.copy_.default, *map_arg(copy.args, nodes.__getitem__))
    graph.output(())
    return GraphModule(torch.nn.Module(), graph)


def _any_size(fake_mode: Any) -> Any:
    env = fake_mode.shape_env
    source = torch_api.ConstantSource("size_of_an_update")
    symbol = env.create_symbol(_SIZE, source=source, dynamic_dim=torch_api.DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=_SIZE, source=source)


def _register_lowering() -> None:
    lowering = torch_api.lowering
    if UPDATE in lowering.lowerings:
        return
    ir, V = torch_api.inductor_ir, torch_api.V

    class Update(ir.ExternKernel):  # type: ignore[name-defined]
        def __init__(self, body: Any, read: Sequence[Any], changed: Sequence[Any]) -> None:
            inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in (*changed, *read)]
            layout = ir.NoneLayout(device=inputs[0].get_device())
            super().__init__(None, layout, self.unwrap_storage(inputs))
            self.body = body
            # First: values that were not computed yet and read what changes are computed now, before this operation.
            self.mutation_outputs = [ir.MutationOutput(layout, x, self) for x in self.inputs[: len(changed)]]
            V.graph.register_operation(self)

        def get_outputs(self) -> list[Any]:
            return list(self.mutation_outputs)

        def should_allocate(self) -> bool:
            return False

        def codegen(self, wrapper: Any) -> None:
            kernel, arguments, types = _compiled(self.body, wrapper)
            values = dict(zip(self.body.graph_input_names, (x.codegen_reference() for x in self.inputs), strict=True))
            (size,) = {
                str(symbol) for x in self.body.graph_inputs.values() for n in x.get_size() for symbol in n.free_symbols
            }
            values[size] = str(int(self.inputs[0].get_numel()))
            wrapper.generate_kernel_call(kernel, [values[str(a)] for a in arguments], triton=False, arg_types=types)

    @lowering.register_lowering(UPDATE, type_promotion_kind=None)
    def update(body: str, read: Sequence[Any], changed: Sequence[Any]) -> None:
        module = getattr(V.graph.module, body)
        if not hasattr(module, "lowered"):
            inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
            module.lowered = V.graph.make_subgraph(module, inputs, body)
            with V.set_graph_handler(module.lowered):
                module.lowered.run(*inputs)
        Update(module.lowered, read, changed)


def _compiled(body: Any, wrapper: Any) -> tuple[str, list[Any], list[Any]]:
    """Return name, arguments and their types of the kernel of a lowered ``body``. Its code is added to the library's;
    other lines, which free the body's inputs, are not."""
    if hasattr(body, "kernel"):
        return body.kernel
    V = torch_api.V
    calls: list[tuple[str, list[Any], list[Any]]] = []

    def generate_kernel_call(name: str, arguments: Sequence[Any], *, arg_types: Any = None, **_: Any) -> None:
        calls.append((name, list(arguments), list(arg_types)))

    parent = V.graph
    with patched(wrapper, generate_kernel_call=generate_kernel_call), V.set_graph_handler(body):
        before = len(wrapper.lines)
        body.codegen_subgraph(parent)
        wrapper.lines[before:] = [
            line for line in wrapper.lines[before:] if isinstance(line, torch_api.KernelDefinitionLine)
        ]
    if len(calls) != 1:
        raise NotImplementedError(f"an update: expected one loop, got {len(calls)}")
    body.kernel = calls[0]
    return body.kernel
