"""Calls of modules that a replay leaves to eager: how often they are looked at, what becomes of the calls within them, and how they are counted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import aot_backward as ab
from aot_backward.checks import speed
from aot_backward_runtime.module_calls.live_module import NO_GRADIENTS
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


def test_calls_without_gradients_are_counted_once(package: Path) -> None:
    """The outermost of them, whether they were recorded or not; a loss is none of them."""
    net, other = made(Hidden), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    with ab.replay(package, modules=True) as session:
        for step in range(6):
            with torch.no_grad():
                target = nn.Tanh()(other(torch.randn(5, 6)))
                nn.MSELoss()(net(target), target)
            if step % 2:
                nn.MSELoss()(net(target), target).backward()
    assert session.report.modules == 3 and session.report.eager_modules == {NO_GRADIENTS: 12}, str(session.report)


def test_a_module_that_holds_others_unseen_is_as_if_it_were_not_there(package: Path) -> None:
    """It has neither parameters nor submodules, and another one is made for each call."""

    class Solver(nn.Module):
        def __init__(self, *held: nn.Module) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self.held:
                x = module(x).detach() if module is layer else module(x)
            return x

    net, twin, layer = made(Hidden), made(Hidden), nn.Linear(6, 6)
    x = torch.randn(5, 6)
    for _ in range(6):
        Solver(layer, twin)(x).sum().backward()
    with ab.replay(package, modules=True) as session:
        for _ in range(6):
            Solver(layer, net)(x).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert session.report.modules == 6 and not session.report.eager_modules, str(session.report)


@pytest.mark.parametrize(("eager", "compiled", "served"), [(135.5, 102.4, 0), (265.9, 212.0, 8)])
def test_a_module_is_served_where_it_gains_more_than_a_script_takes_from_it(
    eager: float, compiled: float, served: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are timed in a loop, where caches are warm."""

    def measured(packages: Mapping[str, Any], *_: object) -> dict[str, float]:
        return {speed.EAGER: eager, **dict.fromkeys(packages, compiled)}

    path, net = tmp_path / "bw.pt2", made(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def passes() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [g for _ in range(8) for g in torch.autograd.grad(net(torch.randn(5, 6)).sum(), list(net.parameters()))]

    expected = passes()
    monkeypatch.setattr(speed, "measure", measured)
    with ab.record(path, modules=True, tune="quick") as recording:
        passes()
    assert not recording.skipped and ("replay leaves them to eager" in recording.compiled_modules[0]) == (not served)
    for always in (False, True):
        with ab.replay(path, modules=True, always=always) as session:
            torch.testing.assert_close(passes(), expected, rtol=1e-4, atol=1e-5)
        assert session.report.modules == (8 if always else served), str(session.report)
        assert always or served or f"{eager:,.0f}" in session.report.modules_left[0], session.report.modules_left


class Named(nn.Sequential):
    """It has something of its own by the name of a method."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.parameters = [1.0]  # type: ignore[assignment]


class Elsewhere(nn.Module):
    """It keeps what PyTorch's modules keep in their dict elsewhere."""

    @property
    def _modules(self) -> dict[str, nn.Module]:  # type: ignore[override]
        return self.__dict__.setdefault("kept", {})

    @_modules.setter
    def _modules(self, value: dict[str, nn.Module]) -> None:
        self.__dict__["kept"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


class Asks(nn.Module):
    """It has no parameters, and turns gradients on for what it holds unseen."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.held, self.act = (net,), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.held[0](x)


def test_modules_without_parameters_of_other_kinds(package: Path) -> None:
    net, x = made(Hidden), torch.randn(5, 6)
    asks, plain, named = Asks(net), nn.Sequential(nn.Tanh()), Named()
    with ab.replay(package, modules=True) as session, torch.no_grad():
        for _ in range(5):
            assert asks(Elsewhere()(named(plain(x)))).requires_grad
    assert session.report.modules == 5 and not session.report.eager_modules, str(session.report)


def test_a_normalization_in_both_modes_and_in_eager_within_one_backward(tmp_path: Path) -> None:
    """Eager writes its averages, and saves them, without autograd seeing the one; in the other mode compiled code reads them in its backward."""

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def net() -> nn.Module:
        return made(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()))

    def losses(of: nn.Module, count: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [of.train(step % 2 == 0)(torch.randn(5, 6)).square().sum() for step in range(count)]

    path, eager, ours = tmp_path / "both.pt2", net(), net()
    with ab.record(path, modules=True, tune="none") as recording:
        for _ in range(4):
            for loss in losses(ours, 2):
                loss.backward()
    assert len(recording.compiled_modules) == 1, recording.skipped
    ours = net()
    with ab.replay(path, modules=True) as session:
        for of in (eager.forward, ours):
            for _ in range(4):
                with Sees():
                    first = of(torch.ones(5, 6) + torch.arange(6.0))
                (first + of(torch.ones(5, 6).cumsum(0))).sum().backward()
        assert session.report.eager_modules
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], rtol=1e-4, atol=1e-5)
        before = ours.eval()(torch.randn(5, 6)).sum()
        ours.train()(torch.randn(5, 6))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # its backward reads the averages that the other call wrote
            before.backward()
    assert session.report.modules == 6 and not session.report.differed, str(session.report)
