"""Calls of modules that a replay leaves to eager: how often they are looked at, what becomes of the calls within them, and how they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_backward as ab
from aot_backward_runtime.module_calls.module_table import ModuleTable

from .test_module_calls import Hidden, made, recorded_modules

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def package() -> Path:
    return recorded_modules()


def test_what_nothing_serves_is_no_longer_looked_at(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of which neither it nor a part of it was recorded: after some calls its layers are called as if there were no replay. What it calls
    besides its parts is served all the same."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.layers(x)
            return inner(x.detach()) if self.calls > 12 and self.calls % 2 else x

    inner, outer, asked = made(Hidden), made(Outer), list[nn.Module]()
    has = ModuleTable.has
    monkeypatch.setattr(ModuleTable, "has", lambda table, module: asked.append(module) or has(table, module))
    with ab.replay(package, modules=True) as session:
        for call in range(12):
            if call == 9:
                asked.clear()
            outer(torch.randn(5, 6)).sum().backward()
    assert not asked and session.report.modules == 0
    assert session.report.eager_modules == {f"{Outer.__module__}.{Outer.__qualname__}: no module of that class was recorded": 12}
    outer = made(Outer)
    with ab.replay(package, modules=True) as session:
        outer.calls = 12
        for _ in range(20):
            outer(torch.randn(5, 6)).sum().backward()
    assert session.report.modules == 10, str(session.report)


class OwnNames(nn.Module):
    """It has attributes of its own where PyTorch's modules have methods."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.modules = [self.parts]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


def test_modules_that_no_entry_serves_may_be_of_any_kind(package: Path) -> None:
    odd, quiet, net = OwnNames(), nn.Sequential(nn.Tanh()), made(Hidden)
    with ab.replay(package, modules=True) as session:
        for _ in range(20):
            net(quiet(odd(torch.randn(5, 6)).detach())).sum().backward()
    assert session.report.modules == 20
    assert session.report.eager_modules == {f"{OwnNames.__module__}.OwnNames: no module of that class was recorded": 20}


def test_a_part_that_comes_later_is_served(package: Path) -> None:
    """Of a module that was left alone until then: assigned, or reached otherwise."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.besides = nn.Linear(6, 6), nn.Identity(), list[nn.Module]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in (self.head, *self.besides):
                x = module(self.body(x).detach())
            return x

    for grow in (lambda net: setattr(net, "head", made(Hidden)), lambda net: net.besides.append(made(Hidden))):
        net = Growing()
        with ab.replay(package, modules=True) as session:
            for call in range(300):
                if call == 12:
                    grow(net)
                net(torch.randn(5, 6)).sum().requires_grad_().backward()
        assert session.report.modules > 200, str(session.report)


def test_what_did_not_fit_for_long_is_looked_at_now_and_then(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a recorded class: it may fit again."""
    net, finds, find = made(Hidden), list[nn.Module](), ModuleTable.find
    monkeypatch.setattr(ModuleTable, "find", lambda table, module: finds.append(module) or find(table, module))
    net.more = nn.Linear(6, 6)
    with ab.replay(package, modules=True) as session:
        for _ in range(200):
            net(torch.randn(5, 6)).sum().backward()
        assert len(finds) < 40 and sum(session.report.eager_modules.values()) == 200, str(session.report)
        del net.more
        for _ in range(300):
            net(torch.randn(5, 6)).sum().backward()
    assert 200 < session.report.modules <= 300 and sum(session.report.eager_modules.values()) == 500 - session.report.modules, str(session.report)


def test_calls_under_checkpointing_and_without_gradients(package: Path) -> None:
    net, twin = made(Hidden), made(Hidden)
    x = torch.randn(6, 6, requires_grad=True)
    with ab.replay(package, modules=True) as session:
        checkpoint(net, x, use_reentrant=False).sum().backward()
        with torch.no_grad():
            out = net(x)
    twin(x.detach()).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    torch.testing.assert_close(out, twin(x).detach())
    assert any("saved-tensor hooks" in reason for reason in session.report.eager_modules), str(session.report)
