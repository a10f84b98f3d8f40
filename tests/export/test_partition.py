"""Partitioning does not change the traced joint graph, so one trace can be partitioned any number of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from aot_backward.capture import partition
from aot_backward.capture.joint_graph import Joint
from aot_backward.capture.program_module import FunctionModule
from aot_backward.capture.step import optimizer_spec, step_graph
from aot_backward.capture.trace import trace_program
from aot_backward_runtime.entries.named_tensors import state_of


class Tied(nn.Module):
    """A tied weight, buffers that the forward updates, a size that no saved tensor has, and an output that is a
    view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.first(x)).relu()
        return self.second(h) / x.shape[0], h.t()


def said(joint: Joint) -> Any:
    """Return everything that a rewrite could change."""
    gradients = {target: node and node.name for target, node in joint.gradients.items()}
    nodes = [(n.name, sorted(n.meta)) for n in joint.graph.graph.nodes]
    return joint.graph.code, gradients, nodes, dict(joint.placeholders), [getattr(o, "name", o) for o in joint.outputs]


def described(partitions: partition.Partitions) -> Any:
    graphs = [
        (g.name, g.module.code, g.inputs, g.outputs, {n: key for n, (key, _) in g.constants.items()}, g.donated)
        for g in partitions.graphs
    ]
    plans = (
        partitions.forward,
        partitions.backward,
        partitions.inference,
        partitions.gradient,
        partitions.step,
        partitions.accumulate,
    )
    return graphs, plans


def weights_of(program: nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    keys: dict[int, str] = {}
    return {n: (keys.setdefault(id(t), n), t.detach()) for n, t in state_of(program).items()}


def test_a_module_is_partitioned_twice_from_one_trace() -> None:
    torch.manual_seed(0)
    net = Tied()
    x = torch.randn(3, 4, requires_grad=True)
    joint = trace_program(net, (x,), {}, {"x": {0: Dim("batch", min=2, max=64)}}, signature=net.forward)
    before = said(joint)
    first = described(partition.split_module(joint, "net", weights_of(net), forward_only=True))
    assert said(joint) == before
    assert described(partition.split_module(joint, "net", weights_of(net), forward_only=True)) == first
    assert len(first[0]) == 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x).softmax(-1)


def test_sizes_that_no_saved_tensor_has_are_carried_where_the_first_input_is_one() -> None:
    """Under autocast the partitioner puts sizes before the tensors."""
    net, x = Block(), torch.randn(5, 3, 8, requires_grad=True)
    joint = trace_program(net, (x,), {}, {"x": {0: Dim("batch", min=2, max=64)}}, signature=net.forward)
    pieces = partition.split_module(joint, "net", weights_of(net), forward_only=False)
    assert pieces.backward is not None and pieces.backward.call is not None
    assert any(operand.startswith("size:") for operand in pieces.backward.call.operands)
    for graph in pieces.graphs:
        graph.module.graph.lint()


class Pointwise(nn.Module):
    """Operations that the min-cut partitioner would recompute in the backward from their input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.scale).sin().exp() * self.scale).softmax(-1).log()


@pytest.mark.parametrize("name", ["pointwise", "attention", "images"])
def test_on_a_cpu_the_backward_computes_nothing_that_the_forward_has_computed(name: str) -> None:
    torch.manual_seed(0)
    net, x = {
        "pointwise": (Pointwise(), torch.randn(3, 8)),
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 5, 8)),
        "images": (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)),
            torch.randn(2, 1, 8, 8),
        ),
    }[name]
    joint = trace_program(net, (x.requires_grad_(),), {}, None, signature=net.forward)
    partitions = partition.split_module(joint, "net", weights_of(net), forward_only=False)
    forward, backward = ([n for n in g.module.graph.nodes if n.op == "call_function"] for g in partitions.graphs)
    assert not {n.name for n in forward} & {n.name for n in backward}
    assert all(n.users for n in backward)


def test_a_gradient_function_is_partitioned_twice_from_one_trace_hooks_included() -> None:
    net = Tied()
    net.first.bias.register_hook(lambda gradient: 2 * gradient)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net(x)[0].square().mean()

    program = FunctionModule(loss)
    joint = trace_program(program, (torch.randn(3, 4),), {}, None, signature=loss, kind="grad", first_only=True)
    before = said(joint)
    wrt = [("parameter", "net.first.weight"), ("parameter", "net.first.bias")]
    first = described(partition.split_grad(joint, "loss", weights_of(program), wrt))
    assert said(joint) == before
    assert described(partition.split_grad(joint, "loss", weights_of(program), wrt)) == first
    assert " 2" in first[0][0][1]  # the hook is there, once


def test_a_step_is_made_twice_from_one_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    program = step_graph.ProgramWithLoss(net, nn.functional.mse_loss)
    args = (torch.randn(5, 4), torch.randn(5, 3))
    joint = trace_program(program, args, {}, None, signature=program.signature(args), kind="step", first_only=True)
    before = said(joint)

    def made() -> Any:
        weights = weights_of(program)
        scalar, gradient = partition.with_scalar_loss(joint, "step", weights)
        unscaled = said(scalar)
        settings = optimizer_spec.Settings(loss_scale=8.0, skip_nonfinite=True)
        looked_at = optimizer_spec.inspect_optimizer(
            optimizer, optimizer_spec.parameters_of(optimizer, net), step_graph.gets_gradient(scalar)
        )
        shared = step_graph.step_state(looked_at, settings, program, waiting=True)
        weights |= {name: (name, tensor) for name, tensor in shared.tensors.items()}
        scaled = step_graph.with_scaled_loss(scalar, shared, gradient)
        assert said(scalar) == unscaled
        rewritten = said(scaled)
        partitions, update = step_graph.split_step(scaled, "step", weights, shared)
        graph, plan = step_graph.update_alone(scaled, "step.update", weights, shared, update)
        assert said(scaled) == rewritten
        return described(partitions), graph.module.code, plan

    first = made()
    assert said(joint) == before
    assert made() == first
