"""Put hooks on parameters into the graph, once, after the sum of the gradients from all of the parameter's uses.

Eager runs them there, too, in ``.backward()`` and in ``torch.autograd.grad``. The result of a hook is traced. Its reads
of the program's own parameters and buffers stay bound to them; other tensors that it closes over become constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError

from .. import fx_graph
from ..joint_graph import Joint
from ..trace_environment import decompositions, tracing
from . import source_location

aten = torch.ops.aten


def with_hooks(joint: Joint, weights: Mapping[str, tuple[str, torch.Tensor]]) -> Joint:
    """Insert ``joint.hooks`` after the gradients of their parameters, which must have been summed over ties, in the FX
    graph of ``joint``, a copy. ``weights``: state name -> (key, tensor). :class:`ExportError` names a hook that cannot
    be traced."""
    gradients = dict(joint.gradients)
    hooks = {weights[name][0]: (name, functions) for name, functions in joint.hooks.items()}
    output = fx_graph.output_of(joint.graph.graph)
    results = fx_graph.results_of(joint.graph)
    for position, target in enumerate(joint.gradient_slots, start=joint.forward_values):
        if target not in gradients or target is None or target[0] != "parameter" or weights[target[1]][0] not in hooks:
            continue
        gradient = results[position]
        if isinstance(gradient, Node):
            name, functions = hooks[weights[target[1]][0]]
            results[position] = gradients[target] = _apply_hooks(gradient, name, functions, joint, output)
    output.args = (results,)
    return replace(joint, gradients=gradients)


def _apply_hooks(gradient: Node, name: str, hooks: Sequence[Callable[..., Any]], joint: Joint, output: Node) -> Node:
    """Apply ``hooks`` to ``gradient`` in their order, before ``output``."""
    for hook in hooks:
        traced = _traced_hook(hook, name, gradient.meta["val"], joint.fake_mode)
        node_map: dict[Node, Any] = {next(iter(traced.graph.find_nodes(op="placeholder"))): gradient}
        with joint.graph.graph.inserting_before(output):
            for node in traced.graph.find_nodes(op="get_attr"):
                node_map[node] = _current(getattr(traced, str(node.target)), joint)
            gradient = joint.graph.graph.graph_copy(traced.graph, node_map)  # type: ignore[assignment]
    return gradient


def _traced_hook(hook: Callable[..., Any], name: str, value: torch.Tensor, fake_mode: Any) -> GraphModule:
    def called(gradient: torch.Tensor) -> torch.Tensor:
        with _refuse_writes(hook, name):
            result = hook(gradient.clone())  # the hook may change it in place
        if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
            kind = (
                f"{result.dtype} {tuple(result.shape)}"
                if isinstance(result, torch.Tensor)
                else f"a {type(result).__name__}"
            )
            raise ExportError(
                f"the gradient hook {source_location.of(hook)} on the parameter {name!r} returns {kind}; expected {gradient.dtype} "
                f"{tuple(gradient.shape)}"
            )
        return result.clone()  # a copy: it may be a constant or a parameter

    try:
        with fake_mode, tracing(), torch.no_grad():
            traced = make_fx(
                torch.func.functionalize(called, remove="mutations"), decomposition_table=decompositions()
            )(value)
    except ExportError:
        raise
    except Exception as error:  # the user's own hook may raise anything
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        remedy = (
            "it reads a tensor's value in Python: use torch.where, or "
            if "data-dependent" in cause or "_local_scalar_dense" in cause
            else ""
        )
        raise ExportError(
            f"the gradient hook {source_location.of(hook)} on the parameter {name!r} could not be traced: {type(error).__name__}: {cause}; "
            f"{remedy}export without it, and register it on the loaded parameter"
        ) from error
    return traced


def _refuse_writes(hook: Callable[..., Any], name: str) -> Any:
    """Return a dispatch mode that refuses writes to tensors that existed before."""

    class NoWrites(torch_api.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for argument, value in zip(operator._schema.arguments, args, strict=False):
                if argument.is_write and type(value) in (torch.Tensor, torch.nn.Parameter):
                    raise ExportError(
                        f"the gradient hook {source_location.of(hook)} on the parameter {name!r} changes a tensor in place: this would happen once, "
                        "while tracing, and never again. Return the gradient to pass on, and change nothing else; or export without the hook, and "
                        "register it on the loaded parameter"
                    )
            return operator(*args, **kwargs)

    return NoWrites()


def _current(value: torch.Tensor, joint: Joint) -> Node:
    """Return the node of ``value``: a parameter or buffer of the program after the forward's updates, or else a
    constant."""
    graph = joint.graph
    name = next((n for n, t in joint.state.items() if t is value), None)
    if name is None:
        attribute = f"hook_constant_{sum(1 for _ in graph.graph.find_nodes(op='get_attr'))}"
        graph.register_buffer(attribute, value.detach())
        constant = graph.graph.get_attr(attribute)
        constant.meta["val"] = joint.fake_mode.from_tensor(value.detach(), static_shapes=True)
        return constant
    node = next(n for n in graph.graph.find_nodes(op="placeholder") if joint.placeholders[n.name][1] == name)
    updates = [
        n.args[1] for n in graph.graph.find_nodes(op="call_function", target=aten.copy_.default) if n.args[0] is node
    ]
    return updates[-1] if updates else node
