"""Training steps of many parameters: the update that most of them share is traced once, and compiled to one loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import aot_backward as ab
from aot_backward.capture.step import alike
from aot_backward_exporters.inductor import lowering, updates
from aot_backward_runtime import load

from ..support.step_cases import Eager, assert_same_change, batch, everything

ROWS = 16
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "ASGD": (torch.optim.ASGD, {"t0": 3, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),  # its first step has no dampening
}


class Deep(nn.Module):
    """23 parameters of 1 to 4,000 numbers. One is in another memory order, one in float64, and one belongs to two
    layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [6, 50, 80, 7, *[4] * 6, 3]
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in itertools.pairwise(sizes))
        self.layers[2].weight = nn.Parameter(self.layers[2].weight.detach().t().contiguous().t())
        self.layers[7].weight = self.layers[8].weight
        self.norm = nn.BatchNorm1d(6)
        self.one = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + (x if layer.in_features == layer.out_features else 0)
        return x * self.scale.float() + self.one


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, as scripts make them: without weight decay for vectors."""
    return [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() == 1], "lr": 0.003},
    ]


@pytest.fixture
def traced_and_called(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """Record how many parameters are traced of how many, and whether their operators are repeated. Updates must become
    calls that Inductor compiles, unless the library is in the cache."""
    seen: dict[str, list[Any]] = {"traced": [], "repeated": [], "called": []}
    made, for_all, as_calls, lowered = alike.Alike.__init__, alike.Alike.for_all, updates.as_calls, lowering._lowered

    def record(self: alike.Alike, spec: Any, *values: Any) -> None:
        made(self, spec, *values)
        seen["traced"].append((len(self.spec.trained), len(spec.trained)))

    def repeated(*args: Any, **options: Any) -> Any:
        module = for_all(*args, **options)
        seen["repeated"].append(module is not None)
        return module

    def called(*args: Any) -> bool:
        seen["called"].append(as_calls(*args))
        return bool(seen["called"][-1])

    def only_with_calls(*args: Any, update_calls: bool = True, **options: Any) -> Any:
        assert update_calls, "the graph is lowered again, without calls"
        return lowered(*args, **options)

    monkeypatch.setattr(alike.Alike, "__init__", record)
    monkeypatch.setattr(alike.Alike, "for_all", repeated)
    monkeypatch.setattr(lowering, "_lowered", only_with_calls)
    monkeypatch.setattr(updates, "as_calls", called)
    monkeypatch.setattr(updates, "LEAST", 6)
    yield seen
    assert all(seen["called"])


def _trained_alike(module: nn.Module, optimizers: list[torch.optim.Optimizer], path: Path, **settings: Any) -> None:
    ab.export_step(
        module,
        batch(0, ROWS),
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizers[0],
        path=path,
        tune="none",
        **settings,
    )
    step, other = load(path).step(), Eager(module, optimizers[1])
    before = everything(other)
    for i in range(5):
        torch.testing.assert_close(step(*batch(i, ROWS)), other(*batch(i, ROWS)), rtol=1e-3, atol=1e-5)
    assert_same_change(step, other, before, 5e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_parameters_of_several_sizes(name: str, tmp_path: Path, traced_and_called: dict[str, list[Any]]) -> None:
    kind, options = OPTIMIZERS[name]
    module = Deep()
    _trained_alike(module, [kind(groups(module), lr=0.01, **options) for _ in range(2)], tmp_path / "s.pt2")
    assert traced_and_called["traced"] == [(3, 23)]  # a vector, a matrix, and the float64 one
    assert traced_and_called["repeated"] == [True]


class Gates(nn.Module):
    """The gradient of each parameter is a product with another parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.left = nn.ParameterList(nn.Parameter(1 + 0.3 * torch.randn(36)) for _ in range(8))
        self.right = nn.ParameterList(nn.Parameter(0.3 * torch.randn(36)) for _ in range(8))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x = x + torch.tanh(x @ (left.view(6, 6) * right.view(6, 6)))
        return self.last(x)


def test_gradients_read_parameters_before_any_changes(tmp_path: Path, traced_and_called: dict[str, list[Any]]) -> None:
    """The check of the export, with its small steps, would not notice."""
    module = Gates()
    path, optimizer = tmp_path / "s.pt2", torch.optim.SGD(module.parameters(), lr=1e-6)
    ab.export_step(module, batch(0, ROWS), loss_fn=nn.functional.mse_loss, optimizer=optimizer, path=path, tune="none")
    step, other = load(path).step(), Eager(module, optimizer)
    before = everything(other)
    for group in (*step.param_groups, *optimizer.param_groups):
        group["lr"] = 0.1
    for i in range(3):
        torch.testing.assert_close(step(*batch(i, ROWS)), other(*batch(i, ROWS)), rtol=1e-4, atol=1e-5)
    assert_same_change(step, other, before, 1e-4)


def test_averages_are_updated_alike_too(tmp_path: Path, traced_and_called: dict[str, list[Any]]) -> None:
    module = Deep()
    path = tmp_path / "s.pt2"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    ab.export_step(
        module, batch(0, ROWS), loss_fn=nn.functional.mse_loss, optimizer=optimizer, path=path, tune="none", ema=0.9
    )
    assert traced_and_called["traced"] == [(2, 23)]


def test_a_norm_over_all_gradients_is_traced_whole(tmp_path: Path, traced_and_called: dict[str, list[Any]]) -> None:
    module = Deep()
    path = ab.export_step(
        module, batch(0, ROWS), loss_fn=nn.functional.mse_loss, optimizer=torch.optim.AdamW(module.parameters()), path=tmp_path / "s.pt2",
        tune="none", clip_norm=0.1,
    )  # fmt: skip
    assert traced_and_called["repeated"] == [False] and load(path).step()(*batch(0, ROWS)).isfinite()


class ByShape(torch.optim.SGD):
    """An optimizer of the user's own, which treats matrices and wide tensors in other ways."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * 0.001 if p.shape[0] > 6 else p.grad * group["lr"])


def test_another_optimizer_may_look_at_shapes(tmp_path: Path, traced_and_called: dict[str, list[Any]]) -> None:
    module = Deep()
    _trained_alike(module, [ByShape(module.parameters(), lr=0.1) for _ in range(2)], tmp_path / "s.pt2")
    assert traced_and_called["traced"] == [(23, 23)]


def test_an_update_that_is_no_single_loop_is_compiled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(updates, "_compiled", fails)
    monkeypatch.setattr(updates, "LEAST", 6)
    module = Deep()
    _trained_alike(module, [torch.optim.AdamW(module.parameters(), eps=2e-8) for _ in range(2)], tmp_path / "s.pt2")


@pytest.mark.parametrize("order", ["reads what changed", "is read later", "waits"])
def test_an_update_is_called_only_if_it_may_wait(order: str) -> None:
    """Each of forty tensors takes half of itself and half of its neighbour."""
    mode = updates.torch_api.FakeTensorMode(shape_env=updates.torch_api.ShapeEnv())
    graph, aten = Graph(), torch.ops.aten
    tensors = [graph.placeholder(f"x{n}") for n in range(80)]
    with mode:
        for node in tensors:
            node.meta["val"] = torch.empty(5)
        later = []
        for n in range(0, 80, 2):
            neighbour = tensors[(n + (2 if order == "reads what changed" else 1)) % 80]
            half = updates.call(
                graph, aten.mul.Tensor, updates.call(graph, aten.add.Tensor, tensors[n], neighbour), 0.5
            )
            updates.call(graph, aten.copy_.default, tensors[n], half)
            if order == "is read later":
                later.append(updates.call(graph, aten.sum.default, tensors[n]))
    graph.output(tuple(later))
    assert updates.as_calls(GraphModule(nn.Module(), graph), mode) == (order == "waits")
