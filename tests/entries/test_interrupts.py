"""A ``KeyboardInterrupt`` between any two bytecodes of a call: counters, numbers and tensors agree, and the next call
is right.

Native code is one C call, which no interrupt enters. A trace function raises the interrupt at the n-th bytecode that
the runtime executes, for every n, or for some n if a path is long."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
import aot_backward_runtime
from aot_backward_runtime import load

from ..support import cli_program, exports
from ..support.step_cases import assert_equal, batch, everything, labelled, package, weighted_package
from ..training import test_loss_scale

RUNTIME = Path(aot_backward_runtime.__file__).parent
KEEPS_STATE = {
    f"{RUNTIME}/{room}/{name}.py"
    for room, names in {
        "entries": ("autograd_function", "bound_parameter", "call_cache", "dispatch", "grad", "module"),
        "native": ("bound_state", "library", "memory", "plan", "tensor_values", "variant"),
        "training": (
            "checkpoint_contents",
            "eager_state",
            "gradient_hooks",
            "loss_scale",
            "param_groups",
            "rng_state",
            "state",
            "step",
        ),
    }.items()
    for name in names
}


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Return whether ``call`` was interrupted, so whether it had a bytecode number ``at``."""
    left = at

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "call":
            if frame.f_code.co_filename not in KEEPS_STATE:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before, grad = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        # CPython checks no signals between the end of a with block and its __exit__; a trace function can raise there
        torch.set_grad_enabled(grad)
    return False


def _counters(step: Any) -> tuple[int, int, int]:
    return step.count, step.skipped, step.accumulated


def _alike(step: Any, twin: Any) -> None:
    assert _counters(step) == _counters(twin)
    assert_equal(everything(step), everything(twin))
    torch.testing.assert_close(dict(step.gradients), dict(twin.gradients), rtol=0, atol=0, equal_nan=True)
    assert step.state_dict()["optimizer"]["param_groups"] == twin.state_dict()["optimizer"]["param_groups"]
    if step.scaler is not None:
        assert step.scaler.state_dict() == twin.scaler.state_dict()
    if step.grad_norm is not None:
        torch.testing.assert_close(step.grad_norm, twin.grad_norm, rtol=0, atol=0, equal_nan=True)


def _at_bytecodes(
    step: Any,
    data: Callable[[int], Any],
    *,
    update: bool = True,
    waiting: bool = False,
    before: Callable[[Any], Any] | None = None,
    stride: int = 1,
) -> int:
    """Call ``step`` until a call is not interrupted, each time ``stride`` bytecodes later. A twin repeats,
    uninterrupted, the calls that the counters show. Use a ``stride`` above 1 if a call is long. The calls must include
    an interrupt before native code, one after it, and none."""
    twin = copy.deepcopy(step)
    for own in (step, twin):
        everything(own)  # once you hold the tensors, calls check fully until one has succeeded
        torch.manual_seed(0)
        own(*data(0))
        if waiting or not update:
            own(*data(0), update=False)
            own.zero_grad()
    at, outcomes = 0, set()
    while True:
        args = data(at)
        for own in (step, twin):
            if waiting and not own.accumulated:
                torch.manual_seed(1)
                own(*args, update=False)
            if not waiting and not update and own.accumulated > 3:
                own.zero_grad()
            if before is not None:
                before(own)
        old = _counters(step)
        torch.manual_seed(at)
        again = interrupted(lambda args=args: step(*args, update=update), at)
        new = _counters(step)
        torch.manual_seed(at)
        if new[:2] != old[:2]:
            twin(*args)
        elif new[2] != old[2]:
            twin(*args, update=False)
        outcomes.add((new != old, again))
        _alike(step, twin)
        if not again:
            break
        at += stride
    assert {(False, True), (True, True), (True, False)} <= outcomes  # before native code, after it, and no interrupt
    return at


def _static() -> Path:
    return exports.shared("step-static", lambda path: ab.export(path, {"step": cli_program.static()}))


def _rows(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def _broken(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch; every second one has a non-finite gradient."""
    x, y = labelled(i)
    return (x * torch.inf if i % 2 else x), y


def test_the_modules_that_keep_state_are_there() -> None:
    assert [path for path in sorted(KEEPS_STATE) if not Path(path).exists()] == []


def test_a_step_of_each_kind() -> None:
    assert _at_bytecodes(load(_static()).step(), _rows) > 50
    _at_bytecodes(load(package("Adam")).step(), batch, stride=11)
    step = load(weighted_package()).step()
    _at_bytecodes(step, _broken, stride=11)
    assert step.count > 1 and step.skipped > 1  # the numbers depend on the stride
    step = load(exports.shared("loss-scale", test_loss_scale._make)).step()
    step.scaler.growth_interval = 2
    _at_bytecodes(step, test_loss_scale._batch, stride=11)
    assert step.scaler.get_scale() != test_loss_scale.SCALE


def test_gradients_that_wait() -> None:
    for path, data in ((package("Adam"), batch), (weighted_package(), _broken)):
        _at_bytecodes(load(path).step(), data, update=False, stride=19)
        _at_bytecodes(load(path).step(), data, waiting=True, stride=23)


def test_a_call_that_is_looked_at_closely() -> None:
    for options in ({}, {"update": False}, {"waiting": True}):
        _at_bytecodes(load(package("Adam")).step(), batch, before=lambda own: own.train(), stride=37, **options)
    step = load(package("Adam")).step()
    with torch.no_grad():
        values = [step.parameters["last.weight"].clone() * f for f in (1, 2)]

    def move(own: Any) -> None:
        own.parameters["last.weight"].data = values[own.count % 2].clone()

    _at_bytecodes(step, batch, before=move, stride=53)


@pytest.mark.parametrize("what", ["lr", "betas", "update", "zero_grad", "step", "train"])
def test_what_is_set_between_calls(what: str) -> None:
    step, twin = (load(package("Adam")).step() for _ in range(2))
    at = 0
    while True:
        for own in (step, twin):
            torch.manual_seed(at)
            own(*batch(at), update=what not in ("zero_grad", "step"))
        group, value = step.param_groups[0], 0.001 * (at % 7 + 1)
        misuse: dict[str, Callable[[], Any]] = {
            "lr": lambda group=group, value=value: group.__setitem__("lr", value),
            "betas": lambda group=group, value=value: group.__setitem__("betas", (0.9 - value, 0.99 - value)),
            "update": lambda group=group, value=value: group.update(lr=value, eps=value),
            "zero_grad": step.zero_grad,
            "step": step.step,
            "train": step.train,
        }
        again = interrupted(misuse[what], at)
        for key in ("lr", "betas", "eps"):
            twin.param_groups[0][key] = step.param_groups[0][key]
        if step.count != twin.count:
            twin.step()
        elif not step.accumulated:
            twin.zero_grad()
        _alike(step, twin)
        for own in (step, twin):
            for update in (what != "zero_grad", True):
                torch.manual_seed(at)
                own(*batch(at), update=update)
        _alike(step, twin)
        if not again:
            break
        at += {"lr": 7, "betas": 19, "update": 23, "step": 5, "train": 3}.get(what, 1)
    assert at > 10


def test_loading_and_resuming_are_made_or_not(tmp_path: Path) -> None:
    other = load(package("Adam")).step()
    for i in range(3):
        other(*batch(i))
    other.param_groups[0]["lr"] = 0.5
    state = other.state_dict()
    other(*batch(4), update=False)
    other.save(tmp_path / "state")
    source = load(package("Adam")).step()
    source(*batch(9))
    for load_it in (lambda own: own.load_state_dict(state), lambda own: own.resume(tmp_path / "state")):
        at, changed, kept = 0, copy.deepcopy(source), copy.deepcopy(source)
        load_it(changed)
        seen = set()
        while True:
            step = copy.deepcopy(source)
            step(*batch(1))
            kept.load_state_dict(step.state_dict())
            again = interrupted(lambda own=step, load_it=load_it: load_it(own), at)
            seen.add((step.count, again))
            for own in (step, twin := copy.deepcopy(changed if step.count == 3 else kept)):
                torch.manual_seed(2)
                own(*batch(2))
            assert step.count == twin.count
            assert_equal(everything(step), everything(twin))
            assert step.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
            if not again:
                break
            at += 173
        assert {(2, True), (3, True), (3, False)} <= seen


class Counting(nn.Module):
    """Its buffers count its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.layer(x)))


def _loss(x: torch.Tensor) -> torch.Tensor:
    return (x * x.sin()).sum()


def _counting() -> Path:
    def make(path: Path) -> None:
        x = torch.randn(5, 3)
        sized = [ab.Variant((torch.randn(n, 3),)) for n in (5, 2)]
        net = Counting()
        slope = nn.Sequential(Counting(), _Sum())
        ab.export(path, {"net": ab.Module(net, [ab.Variant((x,))]), "slope": ab.Grad(slope, sized, wrt="parameters")})

    return exports.shared("interrupts", make)


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x.sin()).sum()


def test_a_module_and_its_backward() -> None:
    loaded, eager, x = load(_counting()).module(), Counting(), torch.randn(5, 3)

    def passes(module: nn.Module) -> None:
        _loss(module(x)).backward()

    at = 0
    while True:
        loaded.zero_grad()
        eager.zero_grad()
        before, version = int(loaded.norm.num_batches_tracked), loaded.norm.running_mean._version
        again = interrupted(lambda: passes(loaded), at)
        if int(loaded.norm.num_batches_tracked) != before:
            passes(eager)
            assert loaded.norm.running_mean._version > version  # autograd notices if the old value was saved
        torch.testing.assert_close(loaded.state_dict(), eager.state_dict())
        for own, theirs in zip(loaded.parameters(), eager.parameters(), strict=True):
            if own.grad is not None or not again:
                torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        if not again:
            break
        at += 29
    assert at > 300


def test_a_gradient_function() -> None:
    slope, twin = load(_counting()).grad(), load(_counting()).grad()
    inputs = [torch.randn(5, 3), torch.randn(2, 3)]
    values = [slope.parameters["0.layer.weight"].detach() * f for f in (1, 2)]
    calls: dict[str, Callable[[Any, int], Any]] = {
        "again": lambda own, at: own(inputs[0]),
        "sizes": lambda own, at: own(inputs[at % 2]),
        "moved": lambda own, at: (
            setattr(own.parameters["0.layer.weight"], "data", values[at % 2].clone()),
            own(inputs[at % 3 % 2]),
        ),
        "mode": lambda own, at: own.train(),
    }
    for name, call in calls.items():
        at = 0
        while True:
            for own in (slope, twin):
                own(inputs[0])
            before = int(slope.parameters["0.norm.num_batches_tracked"])
            again = interrupted(lambda call=call, at=at: call(slope, at), at)
            if not torch.equal(slope.parameters["0.layer.weight"], twin.parameters["0.layer.weight"]):
                twin.parameters["0.layer.weight"].data = slope.parameters["0.layer.weight"].data.clone()
            if int(slope.parameters["0.norm.num_batches_tracked"]) != before:
                twin(inputs[{"sizes": at % 2, "moved": at % 3 % 2}.get(name, 0)])
            for x in inputs:
                torch.testing.assert_close(slope(x), twin(x), rtol=0, atol=0)
            torch.testing.assert_close(slope.state_dict(), twin.state_dict(), rtol=0, atol=0)
            if not again:
                break
            at += 1 if name in ("again", "mode") else 31


def test_memory_that_moved_is_bound_in_every_library() -> None:
    """The first call that sees the new memory has another size and a keyword argument."""
    slope, twin = load(_counting()).grad(), load(_counting()).grad()
    inputs = [torch.randn(5, 3), torch.randn(2, 3)]
    for own in (slope, twin):
        own.parameters["0.layer.weight"].data = own.parameters["0.layer.weight"].data.clone()
    for _ in range(3):
        torch.testing.assert_close(slope(inputs[0]), twin(input=inputs[0]), rtol=0, atol=0)
    for own in (slope, twin):
        own.parameters["0.layer.weight"].data = own.parameters["0.layer.weight"].data * 2
        own(input=inputs[1])
    twin.train()  # forgets its checks
    torch.testing.assert_close(slope(inputs[0]), twin(inputs[0]), rtol=0, atol=0)
