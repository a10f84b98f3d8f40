"""Silent errors in a training step, found by attacks; each happened once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import ExecutionError, ExportError, InputError, WeightsError, load

X, Y = torch.randn(12, 6), torch.randn(12, 3)


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def _eager_steps(net: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(X), Y).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.ASGD])
def test_a_schedule_that_warms_up_moves_the_first_state(kind: Any, tmp_path: Path) -> None:
    """Rprop's step sizes and ASGD's eta start from the learning rate of the first step, not of the export."""
    net = _net()
    path = ab.export_step(
        net, (X, Y), loss_fn=nn.MSELoss(), optimizer=kind(net.parameters(), lr=0.05), path=tmp_path / "s.pt2"
    )
    step, eager = load(path).step(), copy.deepcopy(net)
    optimizer = kind(eager.parameters(), lr=0.05)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4) for o in (step, optimizer)]
    for _ in range(4):
        step(X, Y)
        schedules[0].step()
    _eager_steps(eager, optimizer, schedules[1], 4)
    torch.testing.assert_close(step.parameters["weight"].detach(), eager.weight.detach(), rtol=1e-4, atol=1e-6)
    again, other = load(path).step(), kind(_net().parameters(), lr=0.2)
    again.load_state_dict({"module": net.state_dict(), "optimizer": other.state_dict()})
    again(X, Y)
    fresh = copy.deepcopy(net)
    _eager_steps(fresh, kind(fresh.parameters(), lr=0.2), None, 1)
    torch.testing.assert_close(again.parameters["weight"].detach(), fresh.weight.detach(), rtol=1e-4, atol=1e-6)


class FromRate(torch.optim.Optimizer):
    """Keeps its first learning rate."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["rate"] = torch.full_like(p, group["lr"])
                p.sub_(self.state[p]["rate"] * p.grad)


def test_a_state_that_is_made_from_the_learning_rate_is_refused_by_name(tmp_path: Path) -> None:
    net = _net()
    with pytest.raises(ExportError, match=r"FromRate computes the initial state\['weight'\]\['rate'\] from lr"):
        ab.export_step(
            net, (X, Y), loss_fn=nn.MSELoss(), optimizer=FromRate(net.parameters(), 0.1), path=tmp_path / "s.pt2"
        )


class Dictionary(nn.Module):
    def __init__(self, first: str):
        super().__init__()
        self.net, self.first = _net(), first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(self.net(x), y)
        return {self.first: loss, "other": self.net.weight.pow(2).sum()}


def test_a_dict_whose_first_result_is_not_called_loss_is_refused(tmp_path: Path) -> None:
    net = Dictionary("penalty")
    with pytest.raises(
        ExportError, match="expected the loss as the first result, got 'penalty'; return the loss alone"
    ):
        ab.export_step(net, (X, Y), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), path=tmp_path / "s.pt2")


class Scaled(nn.Module):
    """A 0-d temperature parameter and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.temperature.exp()


def _entries() -> dict[str, Any]:
    net, x, y = Scaled(), X, torch.arange(12) % 5
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = ab.Step(net, [ab.Variant((x, y))], optimizer, loss_fn=nn.CrossEntropyLoss(), clip_norm=0.1)
    return {"fit": step, "net": ab.Module(net, [ab.Variant((x,), mode="eval")])}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ab.export(tmp_path_factory.mktemp("pitfalls") / "both.pt2", _entries())


def test_clipping_with_a_parameter_of_no_dimensions(path: Path) -> None:
    step, (x, y) = load(path).step(), (X, torch.arange(12) % 5)
    net = Scaled()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step.parameters["temperature"].detach(), net.temperature.detach(), rtol=1e-5, atol=1e-6)


def test_a_call_that_fails_in_the_loss_leaves_the_buffers_too(path: Path) -> None:
    step, y = load(path).step(), torch.arange(12) % 5
    step(X, y)
    before = {n: t.detach().clone() for n, t in {**step.parameters, **step.buffers}.items()}
    with pytest.raises(ExecutionError, match="nothing was changed"):
        step(X, torch.full((12,), 99))
    assert all(torch.equal(before[n], t) for n, t in {**step.parameters, **step.buffers}.items())
    assert torch.isfinite(step(X, y)) and step.count == 2


def test_memory_that_other_entries_would_not_see_is_refused(path: Path) -> None:
    package = load(path)
    step, y = package.step(), torch.arange(12) % 5
    step(X, y)
    step.parameters["body.0.weight"].data = torch.zeros(8, 6)
    with pytest.raises(
        WeightsError,
        match=r"body\.0\.weight was moved to other memory, and other entries of the package would not see it",
    ):
        step(X, y)


def _freeze(p: Any) -> None:
    p.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [_freeze, lambda p: p.register_hook(lambda g: g), lambda p: p.register_post_accumulate_grad_hook(lambda q: None)],
)
def test_what_would_have_no_effect_on_a_parameter_is_refused(change: Callable[[Any], Any], path: Path) -> None:
    step = load(path).step()
    with pytest.raises(InputError, match=r"fixed in the compiled step|a hook .* would never run"):
        change(step.parameters["body.0.weight"])
