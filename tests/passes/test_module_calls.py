"""Calls of an unmodified script's modules, recorded and replayed: eager's numbers, and each thing that changes is caught by what is named here."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_backward as ab
from aot_backward_runtime.errors import MissError
from aot_backward_runtime.module_calls.audit import _Gradients, on_copies_of_buffers
from aot_backward_runtime.module_calls.live_module import LiveModule, why_not_here

from ..commands.test_cli import called as aot_backward
from ..support.exports import shared

pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 1.5
ACTIVATION = torch.tanh
LIMITS = {"high": 4.0}
Out = namedtuple("Out", ["logits", "hidden"])


def halved(x: torch.Tensor, options: dict[str, float] = {"by": 0.5}) -> torch.Tensor:  # noqa: B006
    return x * options["by"]


class Schedule:
    """An object that is called, and read through no attribute that a module has."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self) -> float:
        return self.value


SCHEDULE = Schedule()


def halving(x: torch.Tensor, max: float) -> torch.Tensor:
    return x * 0.5


norm = torch.ones(8)  # called as an attribute of Mixed is: its forward does not read it


class Mixed(nn.Module):
    """Dropout, BatchNorm, a tied weight, plain attributes, a config, globals, a function of this file."""

    factor = 2.0
    limited = staticmethod(torch.clamp)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.tied = nn.Linear(6, 8)
        self.tied.weight = self.first.weight
        self.gain = 0.5
        self.config = SimpleNamespace(act="tanh", sizes={"shift": 0.25})
        self.stamp, self.notes = id(self), torch.ones(2)  # the forward names neither: they may be anything
        second, twice, self.half = self.second, 2, numpy.int64(1)
        self.last = lambda x: second(x) * twice

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, double: bool = False) -> Out:
        hidden = self.norm(self.first(x)) * SCALE + self.tied(halved(x)) * (self.factor * SCHEDULE())
        hidden = ACTIVATION(hidden) if self.config.act == "tanh" else torch.relu(hidden)
        hidden = self.limited(hidden, max=LIMITS["high"]) + self.config.sizes["shift"]
        if mask is not None:
            hidden = hidden * mask
        out = self.last(self.drop(hidden)) * (self.gain * (2 if double else 1) * int(self.half))
        return Out(out, hidden)


class Reads(torch.autograd.Function):
    """A backward that depends on the environment, which nothing looks at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float(os.environ.get("AOTB_TEST_BACKWARD", "1"))


class Hidden(nn.Module):
    """It depends on the environment, which no fact states."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reads.apply(self.lin(x)) * float(os.environ.get("AOTB_TEST_FORWARD", "1"))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(9, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        out, (h, _) = self.rnn(self.emb(tokens))
        return {"logits": self.head(out), "last": h}


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def call(net: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    rows = 5 + step % 3
    if isinstance(net, Sequence):
        out = net(torch.randint(0, 9, (rows, 4), generator=generator))
        return out["logits"].square().mean() + out["last"].sum()
    x = torch.randn(rows, 6, generator=generator)
    if isinstance(net, Mixed):
        out = net(x, mask=torch.rand(rows, 1, generator=generator)) if step % 2 else net(x, double=True)
        return out.logits.square().mean() + out.hidden.mean()
    return net(x).square().mean()


def trained(net: nn.Module, steps: int, each: Callable[[int, nn.Module], object] = lambda step, net: None) -> list[Any]:
    """Losses, then parameters and buffers, then the random state."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        each(step, net)
        optimizer.zero_grad()
        loss = call(net, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in (*net.parameters(), *net.buffers())), torch.get_rng_state()]


KINDS: list[Callable[[], nn.Module]] = [Mixed, Hidden, Sequence]


def recorded_modules() -> Path:
    """A package with an entry for each of :data:`KINDS`."""

    def record(path: Path) -> None:
        with ab.record(path, modules=True, optimizer=False, tune="none") as recording:
            for kind in KINDS:
                trained(made(kind), 9)
        assert len(recording.compiled_modules) == len(KINDS), recording.skipped

    return shared("module-calls", record)


@pytest.fixture(scope="module")
def package() -> Path:
    return recorded_modules()


def both(
    package: Path, kind: Callable[[], nn.Module], steps: int, each: Callable[[int, nn.Module], object], undo: Callable[[], object], **options: Any
) -> Any:
    """The report of a replay whose numbers are eager's."""
    try:
        eager = trained(made(kind), steps, each)
    finally:
        undo()
    try:
        with ab.replay(package, modules=True, **options) as session:
            ours = trained(made(kind), steps, each)
    finally:
        undo()
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    return session.report


def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_calls_are_served_and_equal_eager(kind: Callable[[], nn.Module], package: Path) -> None:
    report = both(package, kind, 12, nothing, nothing)
    assert report.modules == 12 and report.audits == 4 and not report.eager_modules and not report.differed, str(report)
    assert report.through_modules and not report.misses


def test_passes_that_are_not_through_modules_are_served_between_many_that_are(tmp_path: Path) -> None:
    """The session rests where a pass after another is through modules; one that is not ends the rest. All are counted as what they were."""
    leaf = torch.randn(6, requires_grad=True)

    def passes(net: nn.Module, count: int, every: int) -> list[torch.Tensor]:
        gradients = []
        for step in range(1, count + 1):
            loss = (leaf.tanh() * step).square().sum() if step % every == 0 else call(net, step)
            gradients += torch.autograd.grad(loss, [leaf] if step % every == 0 else list(net.parameters()))
        return gradients

    path = tmp_path / "both.pt2"
    with ab.record(path, modules=True, optimizer=False, tune="none"):
        passes(made(Hidden), 20, 2)
    expected = passes(made(Hidden), 400, 40)
    with ab.replay(path, modules=True) as session:
        found = passes(made(Hidden), 400, 40)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    report = session.report
    assert (report.through_modules, report.bindings + report.hits) == (390, 10) and report.hits >= 9, str(report)
    assert report.passes == report.compiled == 400 and not report.slower and not report.misses, str(report)

    def nested(net: nn.Module) -> list[torch.Tensor]:
        for step in range(100):  # each has a pass within the pass
            inner = checkpoint(lambda t: t.tanh().sum(), leaf, use_reentrant=True) if step > 50 else 0.0
            (call(net, step) + inner).backward()
        (gradient, leaf.grad) = (leaf.grad, None)
        return [gradient, *(p.grad for p in net.parameters())]

    expected = nested(made(Hidden))
    with ab.replay(path, modules=True) as session:
        found = nested(made(Hidden))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    report = session.report
    assert report.passes == 149 and report.through_modules == 100 and not report.misses and report.bindings == 0, str(report)


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"always": True}], ids=str)
def test_all_passes_through_compiled_calls_count_as_such(package: Path, options: dict[str, bool]) -> None:
    """Of two calls that come before their passes, as of an actor and a critic, and of one call that is differentiated twice."""

    def passes(count: int) -> list[torch.Tensor]:
        actor, critic = made(Hidden), made(Hidden)
        for step in range(count):
            first, second = call(actor, step), call(critic, step + 1)
            first.backward(retain_graph=True)
            second.backward()
            first.square().backward()
        return [p.grad for net in (actor, critic) for p in net.parameters() if p.grad is not None]

    expected = passes(200)
    with ab.replay(package, modules=True, **options) as session:
        found = passes(200)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    report = session.report
    assert report.modules == 400 and report.passes == report.compiled == report.through_modules == 600, str(report)
    assert not report.misses and not report.slower and not report.eager, str(report)


def test_a_frozen_module_is_served_where_its_argument_requires_a_gradient(tmp_path: Path) -> None:
    """As a discriminator is in its generator's step, and thaws for its own."""
    path = tmp_path / "both.pt2"

    def steps(count: int) -> list[torch.Tensor]:
        generator, critic = made(lambda: nn.Linear(4, 6)), made(Hidden)
        losses = []
        for step in range(count):
            x = torch.randn(5 + step % 3, 4, generator=torch.Generator().manual_seed(step))
            critic.requires_grad_(True)
            losses.append(critic(generator(x).detach()).square().mean())
            losses[-1].backward()
            critic.requires_grad_(False)
            losses.append(critic(generator(x)).mean())
            losses[-1].backward()
            with torch.no_grad():
                critic(x @ x.T @ torch.ones(len(x), 6))
                for p in (*generator.parameters(), *critic.parameters()):
                    p -= 0.01 * p.grad
        return [*losses, *(p.grad for net in (generator, critic) for p in net.parameters())]

    with ab.record(path, modules=True, optimizer=False, tune="none") as recording:
        steps(6)
    assert {c.rpartition(".")[2] for c in recording.compiled_modules} == {"Hidden", "Linear"}, recording.skipped  # the more expensive one first
    expected = steps(30)
    with ab.replay(path, modules=True) as session:
        found = steps(30)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    report = session.report
    assert report.modules == 30 * 4 and sum(report.eager_modules.values()) == 30, str(report)
    assert report.passes == report.through_modules == 60 and not report.misses, str(report)


def test_passes_through_a_loaded_module_are_not_through_the_scripts_own(package: Path, tmp_path: Path) -> None:
    ab.export_module(nn.Linear(6, 6), (torch.randn(5, 6),), path=tmp_path / "loaded.pt2")
    net, loaded = made(Hidden), ab.load(tmp_path / "loaded.pt2").module()
    with ab.replay(package, modules=True) as session:
        net(torch.randn(5, 6)).sum().backward()
        for _ in range(5):
            loaded(torch.randn(5, 6)).cos().sum().backward()
    assert session.report.through_modules == 1 and sum(session.report.misses.values()) == 5, str(session.report)


def test_other_sizes_than_were_recorded_are_served(package: Path) -> None:
    net = made(Hidden)
    twin = made(Hidden)
    with ab.replay(package, modules=True) as session:
        for rows in (2, 31, 100):
            x = torch.randn(rows, 6)
            net(x).sum().backward()
            twin.forward(x).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert session.report.modules == 3


def at(step: int, change: Callable[[Any], object]) -> Callable[[int, nn.Module], None]:
    return lambda now, net: change(net) if now == step else None


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def set_cell(function: Any, name: str, value: Any) -> None:
    function.__closure__[function.__code__.co_freevars.index(name)].cell_contents = value


def relued(self: Mixed, x: torch.Tensor, mask: torch.Tensor | None = None, *, double: bool = False) -> Out:
    hidden = torch.relu(self.first(x))
    return Out(self.second(hidden), hidden)


ORIGINAL = Mixed.forward
CAUGHT: dict[str, tuple[Callable[[Any], object], Callable[[], object], str]] = {
    # what changes in the sixth step -> how, how it is undone, and what the reason names
    "an attribute": (lambda net: setattr(net, "gain", 2.0), nothing, "gain is 2.0; recorded was 0.5"),
    "an attribute that is deleted": (lambda net: delattr(net, "gain") or setattr(net, "gain", 3.0), nothing, "gain is 3.0"),
    "a number in a dict of a configuration": (lambda net: net.config.sizes.update(shift=1.0), nothing, "config is"),
    "an attribute of a configuration": (lambda net: setattr(net.config, "act", "relu"), nothing, "config is"),
    "a class attribute": (lambda net: setattr(Mixed, "factor", 3.0), lambda: setattr(Mixed, "factor", 2.0), "Mixed.factor is 3.0; recorded was 2.0"),
    "a function of a class": (
        lambda net: setattr(Mixed, "limited", staticmethod(halving)),
        lambda: setattr(Mixed, "limited", staticmethod(torch.clamp)),
        "Mixed.limited is",
    ),
    "a global": (lambda net: set_global("SCALE", 0.5), lambda: set_global("SCALE", 1.5), "SCALE is 0.5; recorded was 1.5"),
    "a global object that is called": (
        lambda net: setattr(SCHEDULE, "value", 3.0),
        lambda: setattr(SCHEDULE, "value", 1.0),
        "SCHEDULE is",
    ),
    "a default argument": (
        lambda net: halved.__defaults__[0].update(by=0.1),
        lambda: halved.__defaults__[0].update(by=0.5),
        "halved is another one",
    ),
    "a global dict": (lambda net: LIMITS.update(high=0.1), lambda: LIMITS.update(high=4.0), "LIMITS is"),
    "a global that names a function": (
        lambda net: set_global("ACTIVATION", torch.sigmoid),
        lambda: set_global("ACTIVATION", torch.tanh),
        "ACTIVATION is",
    ),
    "what a closure holds": (lambda net: set_cell(net.last, "twice", 3), nothing, "last is"),
    "a numpy scalar": (lambda net: setattr(net, "half", numpy.int64(3)), nothing, "half is numpy.int64(3)"),
    "the forward": (lambda net: setattr(Mixed, "forward", relued), lambda: setattr(Mixed, "forward", ORIGINAL), "Mixed.forward"),
    "a hook of a submodule": (lambda net: net.first.register_forward_hook(lambda m, a, out: out * 2), nothing, "first has a forward hook"),
    "a submodule": (lambda net: setattr(net, "drop", nn.Identity()), nothing, "class of drop is torch.nn.modules.linear.Identity"),
    "a submodule that is written past setattr": (
        lambda net: net._modules.update(drop=nn.Identity()),
        nothing,
        "class of drop is torch.nn.modules.linear.Identity",
    ),
    "another probability of a dropout": (lambda net: setattr(net.drop, "p", 0.9), nothing, "drop.p is 0.9; recorded was 0.3"),
    "the mode of a submodule": (lambda net: net.drop.eval(), nothing, "another mode"),
    "a parameter that is added": (lambda net: net.register_parameter("more", nn.Parameter(torch.ones(1))), nothing, "more is new"),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_what_changes_is_caught_and_goes_to_eager(name: str, package: Path) -> None:
    change, undo, words = CAUGHT[name]
    report = both(package, Mixed, 9, at(5, change), undo)
    assert report.modules == 5 and not report.differed, str(report)
    assert sum(report.eager_modules.values()) == 4 and any(words in reason for reason in report.eager_modules), str(report)


def test_a_change_that_is_undone_is_served_again(package: Path) -> None:
    def each(step: int, net: Any) -> None:
        net.gain = 2.0 if step == 5 else 0.5

    report = both(package, Mixed, 9, each, nothing)
    assert report.modules == 8 and sum(report.eager_modules.values()) == 1, str(report)


def test_a_mode_that_is_set_in_each_step_has_no_module_looked_at_anew(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``transformers.Trainer`` does it: all facts of a module take longer than its call."""
    bind, binds = LiveModule.bind, []
    monkeypatch.setattr(LiveModule, "bind", lambda self, module: (binds.append(1), bind(self, module)))
    with ab.replay(package, modules=True, always=True) as replaying:
        ours = trained(made(Mixed), 6, lambda step, net: net.eval().train() if step % 2 else net.train())
    assert len(binds) == 1 and replaying.report.modules == 6, replaying.report
    torch.testing.assert_close(ours, trained(made(Mixed), 6), rtol=1e-4, atol=1e-6)


def test_a_submodule_of_two_modules_is_watched_for_both(package: Path) -> None:
    def run() -> list[Any]:
        first, second = made(Mixed), made(Mixed)
        second.drop = first.drop
        found = []
        for step in range(6):
            if step == 3:
                first.drop.p = 0.6
            found += [call(net, step).detach() for net in (first, second)]
        return found

    with ab.replay(package, modules=True, always=True) as replaying:
        torch.manual_seed(0)
        ours = run()
    assert replaying.report.modules == 6, replaying.report
    torch.manual_seed(0)
    torch.testing.assert_close(ours, run(), rtol=1e-4, atol=1e-6)


def test_a_call_that_does_not_fit_is_made_once(package: Path) -> None:
    def run() -> list[Any]:
        net = made(Mixed)
        torch.manual_seed(0)
        outs = [net(torch.randn(rows, 6, requires_grad=True), double=True).logits.detach() for rows in (5, 6, 7)]
        return [*outs, *(b.clone() for b in net.buffers()), torch.get_rng_state()]

    eager = run()
    with ab.replay(package, modules=True) as session:
        ours = run()
    torch.testing.assert_close(ours, eager)
    assert not session.report.modules and sum(session.report.eager_modules.values()) == 3, str(session.report)


def test_a_forward_that_raises_in_an_audit_has_written_its_buffers() -> None:
    norm = nn.BatchNorm1d(6)
    with pytest.raises(IndexError, match="bad"), on_copies_of_buffers(norm):
        norm(torch.randn(5, 6))
        raise IndexError("bad")
    assert norm.num_batches_tracked == 1


def test_hooks_that_come_between_an_audited_call_and_its_backward_are_called_once(package: Path) -> None:
    net, twin = made(Hidden), made(Hidden)
    with ab.replay(package, modules=True) as session:
        for called in (net, twin.forward):
            hidden = torch.ones(5, 6)
            out = called(hidden)
            calls: list[int] = []
            (net if called is net else twin).lin.weight.register_hook(lambda g, calls=calls: calls.append(1) or g * 2)
            out.sum().backward()
            assert calls == [1]
    torch.testing.assert_close(net.lin.weight.grad, twin.lin.weight.grad)
    assert session.report.audits == 1 and not session.report.differed, str(session.report)


def test_an_index_that_is_out_of_range_is_eagers_error_and_the_next_call_is_served(package: Path) -> None:
    net, twin = made(Sequence), made(Sequence)
    with ab.replay(package, modules=True) as session:
        for step in range(3):
            call(net, step)
        with pytest.raises(IndexError):
            net(torch.full((5, 4), 99))
        torch.testing.assert_close(call(net, 4), call_of(twin, 4))
    assert session.report.modules == 4 and not session.report.differed, str(session.report)


def call_of(net: nn.Module, step: int) -> torch.Tensor:
    """By the forward itself."""
    out = net.forward(torch.randint(0, 9, (5 + step % 3, 4), generator=torch.Generator().manual_seed(step)))
    return out["logits"].square().mean() + out["last"].sum()


def test_one_row_where_more_were_recorded_is_eagers(package: Path) -> None:
    net = made(Mixed)
    with ab.replay(package, modules=True) as session, pytest.raises(ValueError, match="more than 1 value per channel"):
        net(torch.randn(1, 6), double=True)  # BatchNorm has nothing to normalize by
    assert session.report.modules == 0 and any("none of the 2 variants" in reason for reason in session.report.eager_modules), str(session.report)


def test_equal_modules_are_told_apart(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hidden, "__eq__", lambda self, other: type(self) is type(other))
    monkeypatch.setattr(Hidden, "__hash__", lambda self: 1)
    net, other, x = made(Hidden), made(Hidden), torch.randn(5, 6)
    with torch.no_grad():
        other.lin.weight.mul_(3)
    with ab.replay(package, modules=True) as session:
        for called in (net, net, other):  # the third call of one module would not be audited
            torch.testing.assert_close(called(x), called.forward(x))
    assert session.report.modules == 3, str(session.report)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated: a DeprecationWarning, since torch 2.14 a FutureWarning
def test_no_call_is_compiled_while_torch_jit_traces() -> None:
    reasons = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        reasons.append(why_not_here())
        return x * 2

    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert "while torch.jit traces" in reasons[0] and not why_not_here()


def test_no_call_is_compiled_under_a_mode_that_sees_operations() -> None:
    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for mode in (Seeing(), Dispatched()):
        with mode:
            assert "TorchFunctionMode" in why_not_here()
    with torch.device("cpu"):
        assert not why_not_here()


def test_an_audit_knows_the_sum_of_the_gradients_of_a_tensor_that_is_given_twice() -> None:
    x, differed = torch.ones(3, requires_grad=True), list[str]()
    variant = SimpleNamespace(incoming=[0], spec=SimpleNamespace(out_tree=None))
    call: Any = SimpleNamespace(
        sources=(x, x),
        matched=SimpleNamespace(variant=variant),
        differentiated=SimpleNamespace(wrt=("input:0", "input:1"), forward=SimpleNamespace(outputs=[("result", 0)])),
    )
    one = torch.ones(3)
    for second, differs in ((2 * one, False), (one, True)):
        live: Any = SimpleNamespace(proven=False)
        audit = _Gradients(live, call, [x * 1 + x * 2], {}, torch.autograd.grad, differed.append)
        given = audit.gradients([one, second], [one], [True, True])
        torch.testing.assert_close(sum(g for g in given if g is not None), 3 * one)
        assert bool(differed) == differs


@pytest.mark.parametrize("variable", ["AOTB_TEST_FORWARD", "AOTB_TEST_BACKWARD"])
def test_an_audit_catches_what_nothing_looks_at(variable: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def each(step: int, net: nn.Module) -> None:
        if step == 7:  # the next call is the eighth, which is audited
            monkeypatch.setenv(variable, "3")

    report = both(package, Hidden, 12, each, lambda: monkeypatch.delenv(variable))
    assert report.modules == 8 and len(report.differed) == 1 and "call 8" in report.differed[0], str(report)
    assert ("the gradient of" in report.differed[0]) == (variable == "AOTB_TEST_BACKWARD")
    monkeypatch.setenv(variable, "3")
    with pytest.raises(MissError, match="not what the module itself computes"), ab.replay(package, modules=True, strict=True):
        trained(made(Hidden), 1)


def test_without_the_option_nothing_is_served(package: Path) -> None:
    plain = nn.Module.__call__
    with ab.replay(package) as session:
        assert nn.Module.__call__ is plain
        trained(made(Mixed), 3)
    assert not session.report.modules
    with ab.replay(package, modules=True):
        assert nn.Module.__call__ is not plain
    assert nn.Module.__call__ is plain and "noted" not in nn.Module.__setattr__.__qualname__


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * (1.0 if random.random() < 0.5 else 2.0)


class Counts(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.lin(x)


class Prints(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.lin(x)


class Keeps(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.ones(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.memory


class Closure(Draws):
    def __init__(self) -> None:
        super().__init__()
        factor = torch.tensor(2.0)
        self.scaled = lambda x: x * factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.lin(x))


TABLE = {"gain": 2.0, "weights": torch.ones(6)}


class Looks(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * TABLE["gain"]


class Views(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin.weight.t()


REFUSED = {
    Views: "its result shares memory with lin.weight",
    Looks: "reads the global TABLE, a dict, whose changes could not be seen",
    Draws: "its forward draws from Python's random numbers",
    Counts: "its forward changes calls",
    Prints: "its forward prints",
    Keeps: "memory is a torch.Tensor, whose changes could not be seen",
    Closure: "factor, in the closure of scaled, is a torch.Tensor",
}


def test_what_cannot_be_watched_is_refused_by_name_when_it_is_recorded(tmp_path: Path) -> None:
    hooked = made(Hidden)
    hooked.register_forward_pre_hook(lambda module, args: None)
    penalised = made(Hidden)
    with ab.record(tmp_path / "none.pt2", modules=True, optimizer=False, tune="none") as recording:
        for kind in REFUSED:
            trained(made(kind), 3)
        trained(hooked, 3)
        for _ in range(3):
            x = torch.randn(4, 6, requires_grad=True)
            (gradient,) = torch.autograd.grad(penalised(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()
    assert not recording.compiled_modules
    said = "\n".join(recording.skipped)
    for kind, words in REFUSED.items():
        assert f"{kind.__name__} (called at" in said and words in said, said
    assert "has a forward pre-hook" in said and "differentiated again (create_graph=True)" in said


class Unrolled(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[1]):  # fixes it
            x = torch.tanh(self.lin(x))
        return x


def test_a_size_that_the_program_fixes_is_said(tmp_path: Path) -> None:
    net = made(Unrolled)
    with ab.record(tmp_path / "fixed.pt2", modules=True, optimizer=False, tune="none") as recording:
        for steps in (2, 3, 3, 3):
            net(torch.randn(4, steps, 6)).sum().backward()
    assert len(recording.compiled_modules) == 1
    assert any("with other sizes than [4, 3, 6]" in words for words in recording.skipped), recording.skipped
    with ab.replay(tmp_path / "fixed.pt2", modules=True) as session:
        for steps in (3, 2, 3):
            net(torch.randn(4, steps, 6)).sum().backward()
    assert session.report.modules == 2 and sum(session.report.eager_modules.values()) == 1, str(session.report)


SCRIPT = """
import json, sys
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)])
    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x))) + x
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(4 + step % 2, 8)
    loss = nn.functional.mse_loss(net(x), x * 2)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(f"{loss.item():.6f}", "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
"""


@pytest.fixture(scope="module")
def recorded_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "train.py").write_text(SCRIPT)
    found = aot_backward("record", "--modules", "--tune", "none", "-o", str(folder / "bw.pt2"), "--", str(folder / "train.py"))
    assert found.exit_code == 0 and "calls of modules compiled: __main__.Net" in found.stderr, found.stderr
    yield folder


def test_the_command_line(recorded_script: Path) -> None:
    package, script = str(recorded_script / "bw.pt2"), str(recorded_script / "train.py")
    plain, found = (
        subprocess.run([sys.executable, "-m", "aot_backward.cli", "replay", *options, package, "--", script], capture_output=True, text=True)
        for options in ([], ["--modules", "--json", "--strict"])
    )
    assert found.returncode == 0 and plain.returncode == 0, found.stderr
    assert found.stdout == plain.stdout == subprocess.run([sys.executable, script], capture_output=True, text=True).stdout
    report = json.loads(found.stderr.splitlines()[-1])
    assert report["module_calls"] == 12 and report["module_calls_audited"] == 4 and not report["audits_that_differed"]


def test_the_entry_is_one_like_any_other(recorded_script: Path) -> None:
    package = str(recorded_script / "bw.pt2")
    assert "recorded from __main__.Net" in aot_backward("inspect", package).stdout
    entries = json.loads(aot_backward("inspect", "--json", package).stdout)["entries"]
    entries = entries.values() if isinstance(entries, dict) else entries
    (source,) = [e["source"] for e in entries if e.get("source")]
    assert source["module"] == "__main__.Net" and "class of layers.0" in source["facts"]
    assert aot_backward("verify", package).exit_code == 0
    loaded = ab.load(package)
    (name,) = [n for n, kind in loaded.entries.items() if kind == "module"]
    loaded.module(name)(torch.randn(3, 8)).sum().backward()
