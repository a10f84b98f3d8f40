"""Averages of a compiled step's parameters, compared with eager training and
``torch.optim.swa_utils.AveragedModel``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import aot_backward as ab
from aot_backward_runtime import ExportError, InputError, StateError, load
from aot_backward_runtime.training.checkpoint import read_state, write_state

from ..support import c_library, exports, step_cases

DECAY = 0.9
CLIP = 0.5


class Net(nn.Module):
    """A net with a tied, a frozen and a buffered part. Two parameters are in no group."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 6, bias=False)
        self.outside = nn.Parameter(torch.ones(8))
        self.tied.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.again = self.tied
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.again(torch.tanh(self.frozen(torch.tanh(self.first(x))) + self.outside))


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def optimizer_of(module: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*module.first.parameters(), *module.tied.parameters()], lr=0.02)


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(3 + i % 4, 6, generator=generator), torch.randn(3 + i % 4, 6, generator=generator)


def _make(path: Path) -> None:
    module, rows = net(), {0: Dim("rows", min=2)}
    ab.export_step(
        module,
        batch(0),
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer_of(module),
        dynamic_shapes={"x": rows, "target": rows},
        accumulate=True,
        clip_norm=CLIP,
        skip_nonfinite=True,
        ema=DECAY,
        path=path,
    )


@pytest.fixture(scope="module")
def package() -> Path:
    return exports.shared("step-ema", _make)


class Eager:
    """The same training in eager."""

    def __init__(self) -> None:
        self.module = net()
        self.optimizer = optimizer_of(self.module)
        self.averaged = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def __call__(self, x: torch.Tensor, y: torch.Tensor, update: bool = True) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.module(x), y)
        loss.backward()
        if update:
            trained = [p for g in self.optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(trained, CLIP)
            self.optimizer.step()
            self.averaged.update_parameters(self.module)
            self.optimizer.zero_grad()
        return loss.detach()


def assert_same_averages(averages: dict[str, torch.Tensor], eager: Eager, start: Net) -> None:
    """Compare the change of each average. The smallest wrong decay that a test uses differs by more than a tenth."""
    expected = dict(eager.averaged.module.named_parameters())
    assert averages.keys() == {"first.weight", "first.bias", "tied.weight"}
    for name, tensor in averages.items():
        change = expected[name].detach() - start.get_parameter(name).detach()
        error = float((tensor - expected[name].detach()).norm())
        assert error <= 1e-4 * float(change.norm()) + 4e-7 * float(tensor.norm()), f"{name}: off by {error:.3g}"


def test_averages_equal_those_of_eager(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    assert step.ema == DECAY
    assert_same_averages(dict(step.averages), eager, net())  # the parameters, before the first update
    for i in range(20):
        torch.testing.assert_close(step(*batch(i)), eager(*batch(i)))
        assert_same_averages(dict(step.averages), eager, net())
    model = net()
    model.load_state_dict(step.averages, strict=False)
    torch.testing.assert_close(model(batch(1)[0]).detach(), eager.averaged(batch(1)[0]).detach())


def test_the_first_average_is_the_updated_parameter(package: Path) -> None:
    step = load(package).step()
    step(*batch(0))
    assert all(torch.equal(t, step.parameters[n]) for n, t in step.averages.items())


def test_accumulated_gradients_average_at_their_update(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    for i in range(6):
        for training in (step, eager):
            training(*batch(2 * i), update=False)
        before = {n: t.clone() for n, t in step.averages.items()}
        step(*batch(2 * i + 2), update=False)
        assert all(torch.equal(t, before[n]) for n, t in step.averages.items())
        step.step()
        eager(*batch(2 * i + 2))
        assert_same_averages(dict(step.averages), eager, net())


def test_a_skipped_update_leaves_the_averages(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    for i in range(6):
        before = {n: t.clone() for n, t in step.averages.items()}
        x, y = batch(i)
        step(torch.full_like(x, float("inf")), y)
        assert (step.skipped, step.count) == (i + 1, i)
        assert all(torch.equal(t, before[n]) for n, t in step.averages.items())
        step(x, y)
        eager.module.calls += 1  # buffers change in a skipped call
        eager(x, y)
        assert_same_averages(dict(step.averages), eager, net())


def test_a_saved_training_goes_on(package: Path, tmp_path: Path) -> None:
    step, other = load(package).step(), load(package).step()
    for i in range(3):
        step(*batch(i))
    step.save(tmp_path / "a.state")
    other.resume(tmp_path / "a.state")
    copied = copy.deepcopy(other)
    for i in range(3, 6):
        for training in (step, other, copied):
            training(*batch(i))
    for training in (other, copied):
        assert all(torch.equal(t, training.averages[n]) for n, t in step.averages.items())
    tensors, about = read_state(tmp_path / "a.state")
    write_state(tmp_path / "b.state", {n: t for n, t in tensors.items() if n != "optimizer/ema/first.bias"}, about)
    before = {n: t.clone() for n, t in step.averages.items()}
    with pytest.raises(StateError, match=r"ema/first\.bias"):
        step.resume(tmp_path / "b.state")
    assert all(torch.equal(t, before[n]) for n, t in step.averages.items())


def test_the_state_of_an_averaged_model_goes_in_and_out(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    for i in range(4):
        eager(*batch(i))
    eager.averaged.load_state_dict(eager.averaged.state_dict())
    eager_state = {
        "module": eager.module.state_dict(),
        "optimizer": eager.optimizer.state_dict(),
        "ema": eager.averaged.state_dict(),
    }
    step.load_state_dict(eager_state)
    for i in range(4, 8):
        step(*batch(i))
        eager(*batch(i))
    assert_same_averages(dict(step.averages), eager, net())
    averaged = AveragedModel(net())
    averaged.load_state_dict(step.state_dict()["ema"])
    assert averaged.n_averaged == 8
    for name, parameter in averaged.module.named_parameters():
        assert torch.equal(parameter, step.averages.get(name, step.parameters[name])), name
    assert averaged.module.calls == 8
    with pytest.raises(StateError, match=r"module\.first\.bias"):
        step.load_state_dict({**eager_state, "ema": {"n_averaged": torch.tensor(3)}})


def test_averages_begin_anew_with_a_state_that_has_none(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    for i in range(3):
        step(*batch(9 + i))
    step.load_state_dict({"module": eager.module.state_dict(), "optimizer": eager.optimizer.state_dict()})
    assert_same_averages(dict(step.averages), eager, net())
    for i in range(3):
        step(*batch(i))
        eager(*batch(i))
    assert_same_averages(dict(step.averages), eager, net())


def test_the_decay_can_change(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    for i in range(8):
        decay = min(DECAY, (1 + i) / (3 + i))  # below and above one half
        step.ema, eager.averaged.multi_avg_fn = decay, get_ema_multi_avg_fn(decay)
        step(*batch(i))
        eager(*batch(i))
        assert_same_averages(dict(step.averages), eager, net())
    for wrong in (-0.1, 1.1, "0.5"):
        with pytest.raises(InputError, match=r"^ema "):
            step.ema = wrong  # type: ignore[assignment]
    assert step.ema == decay


def _c_averages(called: c_library.Function) -> dict[str, torch.Tensor]:
    names = [n for n, _ in called.describe(c_library.STATES)]
    return {n.removeprefix("ema."): called.state(n).clone() for n in names if n.startswith("ema.")}


@pytest.mark.parametrize("backend", ["libtorch", "standalone"])
def test_the_same_in_c(package: Path, tmp_path: Path, backend: str) -> None:
    step, eager = load(package).step(), Eager()
    with c_library.function(package, "step", backend) as called:
        for i in range(10):
            called.run(*batch(i))
            eager(*batch(i))
        assert_same_averages(_c_averages(called), eager, net())
        called.save(tmp_path / "c.state")
        step.resume(tmp_path / "c.state")
        assert all(torch.equal(t, step.averages[n]) for n, t in _c_averages(called).items())
        x, y = batch(0)
        called.run(torch.full_like(x, float("inf")), y)
        assert all(torch.equal(t, step.averages[n]) for n, t in _c_averages(called).items())
        called.number(-1, "ema", 0.3)
        eager.averaged.multi_avg_fn = get_ema_multi_avg_fn(0.3)
        called.accumulate(*batch(3))
        eager(*batch(3), update=False)
        called.run(*batch(4))
        eager.module.calls += 1
        eager(*batch(4))
        assert_same_averages(_c_averages(called), eager, net())
        step(*batch(11))
        step.save(tmp_path / "python.state")
        called.resume(tmp_path / "python.state")
        assert all(torch.equal(t, step.averages[n]) for n, t in _c_averages(called).items())


class _WithEma(torch.optim.SGD):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("ema", torch.zeros_like(p))
                if p.grad is not None:
                    average.lerp_(p.grad, 0.1)
                    p.add_(average, alpha=-0.1)


def test_refusals(tmp_path: Path) -> None:
    module, (x, y) = nn.Linear(6, 6), batch(0)

    def export(optimizer: torch.optim.Optimizer, ema: Any) -> None:
        ab.export_step(
            module, (x, y), loss_fn=nn.functional.mse_loss, optimizer=optimizer, ema=ema, path=tmp_path / "no.pt2"
        )

    for wrong in (1.5, -0.1, True, "0.9", float("nan")):
        with pytest.raises(ExportError, match="ema: expected a decay from 0 to 1"):
            export(torch.optim.SGD(module.parameters(), lr=0.1), wrong)
    with pytest.raises(ExportError, match="_WithEma has state called 'ema'"):
        export(_WithEma(module.parameters(), lr=0.1), 0.9)


def test_a_step_without_averages() -> None:
    step = load(step_cases.package("SGD")).step()
    assert step.averages == {} and step.ema is None and "ema" not in step.state_dict()
    with pytest.raises(InputError, match="export it with ema"):
        step.ema = 0.9
