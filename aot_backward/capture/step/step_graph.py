"""The graphs of a whole training step: a module, its loss and its optimizer.

``step``: loss, gradients and update in one graph. If gradients can be accumulated (over calls, or to be averaged over
processes), ``accumulate`` adds them to tensors of their own, and ``update`` passes those to the optimizer. Parameters,
buffers, the optimizer's state and the numbers of its groups are constants that the runtime binds, and are changed in
place.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from aot_backward_exporters.graph import Graph
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import GradientSlot, OptimizerStateSpec, Plan, StepSpec
from aot_backward_runtime.training.param_groups import plain

from .. import fx_graph, partition
from ..bind_graph import GraphBinder, Weights
from ..fx_graph import add_placeholder, by_name, call, output_of
from ..joint_graph import Joint
from ..partition import Partitions
from ..program_module import FunctionModule
from . import hyperparameters, optimizer_graph
from .optimizer_graph import AVERAGE, AVERAGED, Update
from .optimizer_spec import OptimizerSpec, Settings

aten = torch.ops.aten
MODULE = "module."
NUMBERS = "numbers"


class ProgramWithLoss(nn.Module):
    """``loss_fn(module(inputs…), target)``, with the last positional argument as target; without a ``loss_fn``, the
    module's own result."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None):
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn if loss_fn is None or isinstance(loss_fn, nn.Module) else FunctionModule(loss_fn)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            return self.module(*args, **kwargs)
        return self.loss_fn(self.module(*args[:-1], **kwargs), args[-1])

    def signature(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a function with the arguments' names: the module's, and after the given ones the target's."""
        if self.loss_fn is None:
            return self.module.forward
        if not args:
            raise ExportError(
                "with a loss_fn the last positional argument is its target: export_step(net, (x, y), loss_fn=…)"
            )
        module_parameters = list(inspect.signature(self.module.forward).parameters.values())
        if any(p.kind is p.VAR_POSITIONAL for p in module_parameters):
            return self.module.forward
        loss = self.loss_fn.function if isinstance(self.loss_fn, FunctionModule) else self.loss_fn.forward
        second_names = [p.name for p in inspect.signature(loss).parameters.values()][1:2]
        used_names = {p.name for p in module_parameters}
        target = next(n for n in [*second_names, "target", "loss_target"] if n not in used_names)
        positional = [
            p.replace(default=p.empty)
            for p in module_parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        inputs, rest = positional[: len(args) - 1], module_parameters[len(args) - 1 :]
        if len(inputs) < len(args) - 1:
            raise ExportError(
                f"the module takes {len(positional)} positional arguments; got {len(args) - 1} and the target"
            )
        parameters = [*inputs, inspect.Parameter(target, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in rest]

        def called(*args: Any, **kwargs: Any) -> Any: ...

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called


@dataclass(frozen=True)
class StepState:
    """State shared by the variants of a step. ``tensors``: state other than parameters and buffers, by its name in the
    entry."""

    optimized: OptimizerSpec
    settings: Settings
    tensors: dict[str, torch.Tensor]
    spec: StepSpec
    gradients: dict[str, str]  # parameter -> name of the tensor that accumulates its gradient


def step_state(optimized: OptimizerSpec, settings: Settings, program: ProgramWithLoss, *, waiting: bool) -> StepState:
    """Name the state, and create its first values. ``waiting``: whether gradients are also accumulated."""
    parameters = dict(program.module.named_parameters())
    tensors, slots = {}, []
    for slot in optimized.slots:
        name = f"optimizer.{slot.key}.{slot.parameters[0]}"
        tensors[name] = slot.value
        slots.append(OptimizerStateSpec(slot.key, slot.parameters, name, slot.starts_as))
    if settings.ema is not None:
        if taken := {s.key for s in optimized.slots} & {AVERAGE, AVERAGED}:
            raise ExportError(
                f"ema: {optimized.name} has state called {min(taken)!r}, and so would the averages. Rename it in the optimizer"
            )
        for parameter in optimized.trained:
            slots.append(OptimizerStateSpec(AVERAGE, (parameter,), f"{AVERAGE}.{parameter}"))
            tensors[slots[-1].state] = parameters[parameter].detach().clone()
        slots.append(OptimizerStateSpec(AVERAGED, optimized.trained, AVERAGED))
        tensors[AVERAGED] = torch.zeros((), dtype=torch.float64, device=parameters[optimized.trained[0]].device)
    gradients = {}
    if waiting:
        for parameter in optimized.trained:
            gradients[parameter] = f"gradient.{parameter}"
            tensors[gradients[parameter]] = torch.zeros_like(parameters[parameter], requires_grad=False)
    if settings.loss_scale is not None and (
        low := [n for n in optimized.trained if parameters[n].dtype in hyperparameters.LOW]
    ):
        raise ExportError(
            f"loss_scale: expected float32 parameters, got {low[0]} of {parameters[low[0]].dtype}: its gradient would vanish when it is unscaled. "
            "Keep parameters in float32, and compute in float16 under torch.autocast"
        )
    values = [n.value for n in optimized.numbers] + list(settings.numbers.values())
    device = parameters[optimized.trained[0]].device
    tensors[NUMBERS] = torch.tensor([0.0] * hyperparameters.FIRST_NUMBER + values, dtype=torch.float64, device=device)
    defaults = {k: plain(v) for k, v in optimized.optimizer.defaults.items()}
    spec = StepSpec(
        optimizer=optimized.name,
        defaults=json.dumps(defaults, allow_nan=False, default=str),
        groups=optimized.groups,
        numbers=(),
        state=tuple(slots),
        gradients=tuple(GradientSlot(p, g) for p, g in gradients.items()),
        fresh=optimized.fresh,
        norm=settings.clip_norm is not None,
        finite=settings.skip_nonfinite,
    )
    return StepState(optimized, settings, tensors, spec, gradients)


def with_scaled_loss(joint: Joint, state: StepState, loss_gradient: str) -> Joint:
    """Return a copy in which the loss's own gradient, the node ``loss_gradient``, is the scale, and every gradient is
    scaled back, as in ``torch.amp.GradScaler``."""
    joint = _with_step_state(joint.copy(), state)
    graph = joint.graph
    grad_output = by_name(graph)[loss_gradient]
    numbers = _placeholder_of(graph, joint, state, NUMBERS)
    index = (
        hyperparameters.FIRST_NUMBER + len(state.optimized.numbers) + list(state.settings.numbers).index("loss_scale")
    )
    convert = torch.ops.prims.convert_element_type.default
    with graph.graph.inserting_after(grad_output), joint.fake_mode:
        number = graph.graph.call_function(aten.select.int, (numbers, 0, index))
    number.meta["val"] = aten.select.int(numbers.meta["val"], 0, index)
    with graph.graph.inserting_after(number), joint.fake_mode:
        scale = call(graph.graph, convert, number, grad_output.meta["val"].dtype)
    grad_output.replace_all_uses_with(scale)
    graph.graph.erase_node(grad_output)
    gradients = {target: scale if gradient is grad_output else gradient for target, gradient in joint.gradients.items()}
    output = output_of(graph.graph)
    with graph.graph.inserting_before(output), joint.fake_mode:
        inverse = call(graph.graph, convert, call(graph.graph, aten.reciprocal.default, number), torch.float32)
        products = {
            node: call(graph.graph, aten.mul.Tensor, node, inverse)
            for node in dict.fromkeys(gradients.values())
            if isinstance(node, Node)
        }
    results = fx_graph.results_of(graph)
    output.args = (
        (*results[: joint.forward_values], *(products.get(node, node) for node in results[joint.forward_values :])),
    )
    graph.recompile()
    return dataclasses.replace(
        joint, gradients={target: products.get(node, node) for target, node in gradients.items()}
    )


def gets_gradient(joint: Joint) -> Callable[[str], bool]:
    return lambda name: joint.gradients.get(("parameter", MODULE + name)) is not None


def split_step(joint: Joint, name: str, weights: Weights, state: StepState) -> tuple[Partitions, Update]:
    """Return the graphs of one variant, and the traced optimizer. ``joint``: from
    :func:`..partition.with_scalar_loss`."""
    joint = _with_step_state(joint, state)
    trained = state.optimized.trained
    gradients = {p: joint.gradients[("parameter", MODULE + p)] for p in trained}
    parameters = {n: node for n, node in _parameters(joint, joint.graph).items() if n in gradients}
    values = [node.meta["val"] for node in gradients.values()], [parameters[p].meta["val"] for p in trained]
    update = optimizer_graph.trace(state.optimized, *values, joint.fake_mode, state.settings)
    partitions = Partitions()
    graph, nodes = fx_graph.copy_of(joint.graph)
    extra = _append_update(graph, joint, state, update, [nodes[gradients[p]] for p in trained])
    partitions.step = _finish(partitions, joint, graph, f"{name}.step", weights, extra)
    if state.gradients:
        graph, nodes = fx_graph.copy_of(joint.graph)
        _append_accumulation(graph, joint, state, {p: nodes[gradients[p]] for p in trained})
        partitions.accumulate = _finish(partitions, joint, graph, f"{name}.accumulate", weights, [])
    return partitions, update


def update_alone(joint: Joint, name: str, weights: Weights, state: StepState, update: Update) -> tuple[Graph, Plan]:
    """Return the optimizer on accumulated gradients, as a graph without inputs, and its plan. ``joint``: of any
    variant."""
    joint = _with_step_state(joint, state)
    graph = GraphModule(nn.Module(), torch.fx.Graph())
    graph.graph.output(())
    for p, node in _parameters(joint, joint.graph).items():
        if p in state.gradients:
            add_placeholder(graph, node.name, node.meta["val"])
    gradients = [_placeholder_of(graph, joint, state, state.gradients[p]) for p in state.optimized.trained]
    extra = _append_update(graph, joint, state, update, gradients)
    if not extra:  # a call must have a result
        with graph.graph.inserting_before(output_of(graph.graph)), joint.fake_mode:
            flag = call(graph.graph, aten.select.int, _placeholder_of(graph, joint, state, NUMBERS), 0, 0)
            extra = [call(graph.graph, aten.clone.default, flag)]
    partitions = Partitions()
    fx_graph.truncate(graph, extra)
    binder = GraphBinder(joint, partition.joint_passes(graph, joint.device), f"{name}.update", weights)
    for node in fx_graph.results_of(binder.graph):
        binder.result(node)
    plan = binder.plan(partitions.graphs)
    return partitions.graphs[0], plan


def _finish(
    partitions: Partitions, joint: Joint, graph: GraphModule, name: str, weights: Weights, extra: list[Node]
) -> Plan:
    fx_graph.truncate(graph, [*fx_graph.results_of(graph)[: joint.forward_values], *extra])
    binder = GraphBinder(joint, partition.joint_passes(graph, joint.device), name, weights)
    results = fx_graph.results_of(binder.graph)
    outputs = binder.outputs(results)
    for node in results[joint.forward_values :]:
        binder.result(node)
    return binder.plan(partitions.graphs, outputs=outputs)


def _append_update(
    graph: GraphModule, joint: Joint, state: StepState, update: Update, gradients: list[Node]
) -> list[Node]:
    """Append the optimizer. Return the nodes of the gradients' norm and of their finiteness, if requested."""
    parameter_nodes = _parameters(joint, graph)
    parameters = [parameter_nodes[p] for p in state.optimized.trained]
    slots = [_placeholder_of(graph, joint, state, s.state) for s in state.spec.state]
    numbers = _placeholder_of(graph, joint, state, NUMBERS)
    for node in update.graph.graph.find_nodes(op="get_attr"):
        setattr(graph, str(node.target), getattr(update.graph, str(node.target)))
    node_map = dict(
        zip(update.graph.graph.find_nodes(op="placeholder"), [*gradients, *parameters, *slots, numbers], strict=True)
    )
    _delay_buffer_updates(graph, joint, gradients)
    with graph.graph.inserting_before(output_of(graph.graph)), joint.fake_mode:
        results = pytree.tree_leaves(graph.graph.graph_copy(update.graph.graph, dict(node_map)))
        targets = [*parameters, *slots]
        new_values, extra = results[: len(targets)], results[len(targets) :]
        finite = extra[-1] if update.finite else None
        for target, new in zip(targets, new_values, strict=True):
            if finite is not None:
                new = call(graph.graph, aten.where.self, finite, new, target)
            if new is not target:
                call(graph.graph, aten.copy_.default, target, new)
    return extra


def _delay_buffer_updates(graph: GraphModule, joint: Joint, gradients: Sequence[Node]) -> None:
    """Let buffers that the forward updates wait for every gradient, too, so that a call that fails earlier has changed
    nothing."""
    updates = [
        n
        for n in graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
        if n.args[0].op == "placeholder"
    ]
    if not updates:
        return
    with graph.graph.inserting_before(output_of(graph.graph)), joint.fake_mode:
        false_node = hyperparameters.false_after(graph.graph, gradients)
        for node in updates:
            target, value = node.args
            if false_node is not None:
                value = call(graph.graph, aten.where.self, false_node, target, value)
            node.replace_all_uses_with(call(graph.graph, aten.copy_.default, target, value))
            graph.graph.erase_node(node)


def _append_accumulation(graph: GraphModule, joint: Joint, state: StepState, gradients: dict[str, Node]) -> None:
    numbers = _placeholder_of(graph, joint, state, NUMBERS)
    _delay_buffer_updates(graph, joint, list(gradients.values()))
    with graph.graph.inserting_before(output_of(graph.graph)), joint.fake_mode:
        keep = call(graph.graph, aten.ne.Scalar, call(graph.graph, aten.select.int, numbers, 0, 0), 0)
        for parameter, gradient in gradients.items():
            slot = _placeholder_of(graph, joint, state, state.gradients[parameter])
            total = call(graph.graph, aten.add.Tensor, slot, gradient)
            call(graph.graph, aten.copy_.default, slot, call(graph.graph, aten.where.self, keep, total, gradient))


def _parameters(joint: Joint, graph: GraphModule) -> dict[str, Node]:
    """Return the placeholders of the module's parameters, by name; a tied one under its first."""
    out: dict[str, Node] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        kind, name = joint.placeholders.get(node.name, ("", ""))
        if kind == "parameter" and name.startswith(MODULE):
            out.setdefault(name.removeprefix(MODULE), node)
    return out


def _placeholder_of(graph: GraphModule, joint: Joint, state: StepState, name: str) -> Node:
    """Return the placeholder of a tensor of ``StepState.tensors``; it becomes a constant when the graph is finished."""
    placeholder = next(node for node, place in joint.placeholders.items() if place == ("buffer", name))
    node = next((n for n in graph.graph.find_nodes(op="placeholder") if n.name == placeholder), None)
    if node is not None:
        return node
    tensor = state.tensors[name]
    with joint.fake_mode:
        value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return add_placeholder(graph, placeholder, value)


def _with_step_state(joint: Joint, state: StepState) -> Joint:
    """Return ``joint`` with the placeholders of ``StepState.tensors`` named as buffers."""
    step_placeholders = {f"step_state_{i}": ("buffer", name) for i, name in enumerate(state.tensors)}
    return dataclasses.replace(joint, placeholders={**joint.placeholders, **step_placeholders})
