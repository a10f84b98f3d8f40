"""Loaded states and resumed files that have one bad item among good ones raise a typed error and change nothing."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import InputError, StateDictError, StateError, WeightsError, load
from aot_backward_runtime.training import checkpoint
from aot_backward_runtime.training.loss_scale import LossScale

from ..support import exports
from ..support.step_cases import assert_equal, batch, everything, package
from . import test_loss_scale


class Mixed(nn.Module):
    """The state of each dtype family. The first and the last by name are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]]))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("turn", torch.tensor([1 + 2j, 0.5 - 1j]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.first
        self.last = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x * self.last) @ self.first.t() * self.scale + self.tied(x) * self.hidden
        return (mixed * self.turn.abs()).square().sum() + self.calls


X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.25, 4.0]])


@pytest.fixture(scope="module")
def mixed() -> Path:
    def make(path: Path) -> None:
        net = Mixed()
        ab.export(
            path,
            {"net": ab.Module(net, [ab.Variant((X,))]), "slope": ab.Grad(net, [ab.Variant((X,))], wrt="parameters")},
        )

    return exports.shared("bad-states", make)


def _short() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(4)
    return tensor


def _fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(3).to_sparse(), "sparse_coo"),
    "meta": (lambda: torch.ones(3, device="meta"), "on meta"),
    "quantized": (_quantized, "quantized"),
    "nested": (lambda: _nested(torch.strided), "nested"),
    "jagged": (lambda: _nested(torch.jagged), "nested"),
    "fake": (_fake, "FakeTensor"),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), "is complex"),
    "freed": (_short, "freed or shrunk"),
    "a list": (lambda: [1.0, 2.0, 3.0], "is a list; expected a tensor"),
    "None": (lambda: None, "is a NoneType"),
    "a shape that broadcasts": (lambda: torch.ones(1), r"has shape \(1,\)"),
}


def _refused(call: Callable[[], Any], error: Any, message: str, look: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    kept = {n: t.clone() for n, t in look().items()}
    with pytest.raises(error, match=message):
        call()
    assert_equal(look(), kept)


def _other(state: Mapping[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
    """Return other good values, with the bad one last."""
    return {**{n: t.clone() + 1 for n, t in state.items() if n not in changes}, **changes}


def test_a_bad_tensor_leaves_all_others_as_they_were(mixed: Path) -> None:
    loaded = load(mixed)
    net, slope, eager = loaded.module(), load(mixed).grad(), Mixed()
    before = [net(X).detach(), slope(X)]
    for name, (make, message) in BAD.items():
        for where in ("last", "calls") if name == "complex" else ("last",):
            bad: Any = make() if where == "last" else torch.tensor(1j)
            for take, kind in (
                (slope.load_state_dict, WeightsError),
                (net.load_state_dict, StateDictError),
                (lambda s: net.load_state_dict(s, assign=True), StateDictError),
                (lambda s: net.load_state_dict(s, strict=False), StateDictError),
                (lambda s: slope.load_state_dict(s, strict=False), WeightsError),
            ):
                own = net if kind is StateDictError else slope
                _refused(
                    lambda take=take, own=own, where=where, bad=bad: take(_other(own.state_dict(), **{where: bad})),
                    kind,
                    where,
                    own.state_dict,
                )
        _refused(
            lambda make=make: slope.load_state_dict({"last": make()}, strict=False),
            WeightsError,
            message,
            slope.state_dict,
        )
    for state, message in (
        (_other(slope.state_dict(), calls=torch.tensor(2.5)), "'calls' has dtype torch.float32; .* torch.int64"),
        ({**_other(slope.state_dict()), 3: X}, r"unexpected \['3'\]"),
        ([("last", X)], "is a list; expected tensors by name"),
    ):
        _refused(lambda state=state: slope.load_state_dict(state), WeightsError, message, slope.state_dict)
    state = _other(net.state_dict())
    for other, message in (
        ({n: t for n, t in state.items() if n != "last"}, r"missing \['last'\]"),
        ({**state, "more": X}, r"unexpected \['more'\]"),
    ):
        _refused(lambda other=other: net.load_state_dict(other), RuntimeError, message, net.state_dict)
    for other, message in (
        ({**state, "last": state["last"].double()}, "last has dtype torch.float64"),
        ({**state, "tied.weight": state["first"].clone()}, "tied.weight and first were one tensor"),
    ):
        _refused(lambda other=other: net.load_state_dict(other, assign=True), StateDictError, message, net.state_dict)
    after = [net(X).detach(), slope(X)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    good: dict[str, Any] = {
        **eager.state_dict(),
        "scale": torch.tensor([2.0]),
        "last": torch.ones(3, dtype=torch.float64),
        "calls": torch.tensor(7).int(),
    }
    for taking in (net, slope, eager):
        taking.load_state_dict(good)
    torch.testing.assert_close(net(X), eager(X))
    torch.testing.assert_close(slope(X)[0], eager(X).detach())
    net.load_state_dict(
        {n: t.clone() for n, t in Mixed().state_dict().items() if n != "tied.weight"}, strict=False, assign=False
    )
    torch.testing.assert_close(net(X), Mixed()(X))


def test_hooks_may_still_rename(mixed: Path) -> None:
    net = load(mixed).module()
    net.register_load_state_dict_pre_hook(lambda module, state, *_: state.update({"last": state.pop("old")}))
    state = dict(Mixed().state_dict())
    state["old"] = state.pop("last") * 2
    net.load_state_dict(state)
    assert torch.equal(net.last.detach(), Mixed().last.detach() * 2)


def test_weights_that_are_handed_to_load(mixed: Path) -> None:
    keys = load(mixed).manifest.weights
    key = next(k for k, w in keys.items() if w.shape == (3,))
    for name, (make, _) in BAD.items():
        with pytest.raises(WeightsError, match=key.replace(".", r"\.")):
            load(mixed, weights={key: make()})
        assert name
    for weights, message in (([X], "weights: expected tensors by key, got a list"), ({3: X}, "has no weight '3'")):
        with pytest.raises(WeightsError, match=message):
            load(mixed, weights=weights)  # type: ignore[arg-type]
    net = load(mixed).module()
    net(X)
    net.last.data = _short()
    with pytest.raises(WeightsError, match=r"last of shape .* freed or shrunk"):
        net(X)


@pytest.fixture
def adam() -> Any:
    step = load(package("Adam")).step()
    step(*batch(0))
    return step


def _picture(step: Any) -> Any:
    options = [{k: v for k, v in g.items() if k != "params"} for g in step.param_groups]
    return options, step.count, step.skipped, step.accumulated, {n: t.clone() for n, t in step.gradients.items()}


def _unchanged(step: Any, call: Callable[[], Any], message: str) -> None:
    kept, picture, random = everything(step), _picture(step), torch.get_rng_state()
    with pytest.raises((StateError, InputError), match=message):
        call()
    assert_equal(everything(step), kept)
    torch.testing.assert_close(_picture(step), picture, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_bad_tensor_in_the_state_of_a_step(adam: Any) -> None:
    other = load(package("Adam")).step()
    other(*batch(5))
    for name, (make, message) in BAD.items():
        for part in ("module", "optimizer"):
            state = other.state_dict()
            if part == "module":
                state["module"]["last.bias"] = make()
            else:
                state["optimizer"]["state"][4]["exp_avg"] = make()
            expected = "has no 'exp_avg'" if name == "None" and part == "optimizer" else message
            _unchanged(adam, lambda state=state: adam.load_state_dict(state), expected)
    for path, value, message in (
        (("module", "norm.num_batches_tracked"), torch.tensor(1.5), "num_batches_tracked' has dtype"),
        (("module",), None, "module state is a NoneType"),
        (("count",), True, "count is True"),
        (("count",), 2**80, "count is 1208"),
        (("skipped",), 1.0, "skipped is 1.0"),
        (("optimizer", "state", 0), 3, "not the state of a module and an optimizer"),
        (("optimizer", "state"), [3], "not the state of a module and an optimizer"),
        (("optimizer", "state", 0, "step"), 10**400, "not the state of a module and an optimizer"),
        (("optimizer", "state", 0, "step"), True, "is a bool"),
        (("optimizer", "param_groups"), None, "not the state of a module and an optimizer"),
        (("optimizer", "param_groups", 1), [1], "not the state of a module and an optimizer"),
        (("optimizer", "param_groups", 1, "lr"), 10**400, "expected a number"),
        (("optimizer", "param_groups", 1, "params"), [[0], {}, 2], "not the state of a module and an optimizer"),
        (("optimizer", "param_groups", 1, "amsgrad"), torch.ones(2), "is fixed in the compiled step"),
    ):
        state = other.state_dict()
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        _unchanged(adam, lambda state=state: adam.load_state_dict(state), message)
    state = other.state_dict()
    for slots in state["optimizer"]["state"].values():
        slots["step"] = slots["step"].reshape(1)
    adam.load_state_dict(state)
    assert_equal(everything(adam), everything(other))


def _rewritten(source: Path, path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Write the training state of ``source`` with a change and a correct digest."""
    tensors, about = checkpoint.read_state(source)
    change(about, tensors)
    checkpoint.write_state(path, tensors, about)
    return path


def test_files_whose_numbers_are_absurd(adam: Any, tmp_path: Path) -> None:
    other = load(package("Adam")).step()
    other(*batch(3), update=False)
    other.save(good := tmp_path / "good")
    about: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda a: a.update(count=True), "count is True; expected a count"),
        (lambda a: a.update(accumulated=2**80), "accumulated is 1208"),
        (lambda a: a.update(accumulated=-1), "accumulated is -1"),
        (lambda a: a.update(skipped=1.0), "skipped is 1.0"),
        (lambda a: a.update(fresh=3), "fresh is 3; expected true or false"),
        (lambda a: a.update(groups=[]), "parameter groups differ from this step's"),
        (lambda a: a.update(groups=3), "does not fit this step"),
        (lambda a: a.update(groups=[3, 4]), "does not fit this step"),
        (lambda a: a.update(scaler={}), "it has a loss scale"),
        (lambda a: a.pop("extra"), "it has no 'extra'"),
        (lambda a: a["groups"][0].update(options=[1]), "options of a parameter group are a list; expected a dict"),
        (lambda a: a["groups"][0].update(options=None), "options of a parameter group are a NoneType"),
        (
            lambda a: a["groups"][1]["options"].update(lr=10**400),
            "'lr'.* is an integer beyond float64; expected a number",
        ),
        (lambda a: a["groups"][1]["options"].update(lr="1"), "'lr'.* is '1'; expected a number"),
        (lambda a: a["groups"][1]["options"].update(lr={}), "expected a number"),
        (lambda a: a["groups"][1]["options"].update(betas=[0.5]), "expected 2 numbers"),
    ]
    for change, message in about:
        _rewritten(good, tmp_path / "bad", lambda a, _, change=change: change(a))
        _unchanged(adam, lambda: adam.resume(tmp_path / "bad"), message)
    tensors: list[tuple[str, Any, str]] = [
        ("random/cpu", torch.zeros(7, dtype=torch.uint8), "torch refuses the random state 'cpu'"),
        ("random/cpu", torch.full_like(torch.get_rng_state(), 255), "torch refuses the random state 'cpu'"),
        ("random/cpu", torch.zeros(7), "random state 'cpu' is torch.float32 of shape"),
        ("random/cpu/1", torch.zeros(3, 3, dtype=torch.uint8), "random state 'cpu/1' is torch.uint8 of shape"),
        ("module/last.bias", torch.ones(3).view(torch.int32), "'last.bias' has dtype torch.int32"),
        ("module/last.bias", torch.ones(3, dtype=torch.float64), "'last.bias' has dtype torch.float64"),
        ("optimizer/exp_avg/last.bias", torch.ones(4), r"'exp_avg/last.bias' has shape \(4,\)"),
        ("gradient/last.bias", torch.ones(3).view(torch.int32), "gradient state: 'last.bias' has dtype"),
        ("nothing/last.bias", torch.ones(3), "nothing"),
    ]
    for name, tensor, message in tensors:
        _rewritten(good, tmp_path / "bad", lambda _, t, name=name, tensor=tensor: t.update({name: tensor}))
        _unchanged(adam, lambda: adam.resume(tmp_path / "bad"), message)
    _rewritten(good, tmp_path / "bad", lambda a, _: a.update(accumulated=0))
    _unchanged(adam, lambda: adam.resume(tmp_path / "bad"), "gradient state: .*unexpected")
    _rewritten(good, tmp_path / "other", lambda _, t: t.update({"random/cpu": torch.zeros(7, dtype=torch.uint8)}))
    adam.resume(tmp_path / "other", random=False)  # for example from another torch
    assert_equal(everything(adam), everything(other))
    assert adam.accumulated == 1 and adam.count == 0
    rms = load(package("RMSprop")).step()
    rms.save(tmp_path / "rms")
    _rewritten(tmp_path / "rms", tmp_path / "bad", lambda a, _: a.update(accumulated=2))
    with pytest.raises(
        StateError, match="it has accumulated gradients of 2 calls, and this step was exported without accumulate=True"
    ):
        rms.resume(tmp_path / "bad")


def test_numbers_of_groups(adam: Any) -> None:
    first = adam.param_groups[0]
    for value in (
        10**400,
        10**5000,
        -(10**400),
        "0.5",
        b"1",
        1j,
        torch.tensor(1j),
        torch.ones((), device="meta"),
        torch.ones(2),
        [],
        object(),
    ):
        for key in ("lr", "eps"):
            _unchanged(
                adam, lambda key=key, value=value: first.update(betas=(0.6, 0.7), **{key: value}), "expected a number"
            )
    for value in (torch.ones(2), torch.ones((), device="meta"), math.nan, torch.tensor(True)):
        _unchanged(adam, lambda value=value: first.update(amsgrad=value), "amsgrad.* is fixed")
    _unchanged(adam, lambda: first.update(betas=torch.ones(2)), "expected 2 numbers")
    with pytest.raises((StateError, InputError)):
        first["weight_decay"] = math.nan
    numpy = pytest.importorskip("numpy")
    twin = copy.deepcopy(adam)
    for step, value in ((adam, numpy.float32(0.5)), (twin, 0.5)):
        step.param_groups[0]["lr"] = value
    assert type(first["lr"]) is float
    for step in (adam, twin):
        torch.manual_seed(1)
        step(*batch(1))
    assert_equal(everything(adam), everything(twin))
    first["lr"] = math.nan  # allowed, as in eager
    adam(*batch(1))
    assert adam.parameters["last.weight"].isnan().all()


def test_the_loss_scale(tmp_path: Path) -> None:
    step = load(exports.shared("loss-scale", test_loss_scale._make)).step()
    assert isinstance(step.scaler, LossScale)
    kept = step.scaler.state_dict()
    for key, value in (
        ("scale", 10**400),
        ("growth_factor", 10**400),
        ("_growth_tracker", True),
        ("backoff_factor", "1"),
        ("scale", 0.0),
        ("scale", math.nan),
        ("_growth_tracker", -1),
    ):
        state = step.state_dict()
        state["scaler"][key] = value
        _unchanged(step, lambda state=state: step.load_state_dict(state), "loss scale")
        step.save(tmp_path / "good")
        _rewritten(
            tmp_path / "good", tmp_path / "bad", lambda a, _, key=key, value=value: a["scaler"].update({key: value})
        )
        _unchanged(step, lambda: step.resume(tmp_path / "bad"), "loss scale")
    state["scaler"] = {**kept, "more": 1}
    _unchanged(step, lambda: step.load_state_dict(state), "expected .*'scale'., as torch.amp.GradScaler has it")
    for value in (10**400, -1.0, 1j, "2.0", None, math.inf, torch.ones(2)):
        with pytest.raises(StateError, match="the loss scale is"):
            step.scaler.set_scale(value)
    with pytest.raises(StateError, match="growth_factor is set to"):
        step.scaler.growth_factor = 10**400
    assert step.scaler.state_dict() == kept
