"""Training in float16 with a scaled loss, compared with eager and ``torch.amp.GradScaler``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import ExportError, load

from ..conftest import aot_backward
from ..support import exports
from ..support.oracle import assert_same

SCALE = 2.0**22


class Half(nn.Module):
    """Computes in float16 inside, so its gradients overflow at large scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.last(torch.relu(self.first(x))).float()


def half() -> nn.Module:
    torch.manual_seed(7)
    return Half()


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(y, target)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _make(path: Path) -> None:
    module = half()
    example = torch.randn(16, 6), torch.randn(16, 2)
    ab.export_step(
        module,
        example,
        loss_fn=_loss,
        optimizer=_sgd(module),
        accumulate=True,
        clip_norm=0.5,
        loss_scale=SCALE,
        path=path,
    )


@pytest.fixture(scope="module")
def package() -> Path:
    return exports.shared("loss-scale", _make)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 2, generator=generator)


class Eager:
    """The loop from PyTorch's tutorial on mixed precision, with clipping and accumulation."""

    def __init__(self) -> None:
        self.module = half()
        self.optimizer, self.scaler = _sgd(self.module), torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.skipped = 0

    def step(self, *batches: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        for x, y in batches:
            self.scaler.scale(_loss(self.module(x), y)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before

    def same(self, step: Any) -> None:
        assert step.scaler.state_dict() == self.scaler.state_dict()
        assert step.skipped == self.skipped
        named = {n: p.detach() for n, p in step.parameters.items()}
        assert_same(named, {n: p.detach() for n, p in self.module.named_parameters()}, 2e-3)


def test_the_scale_and_the_training_are_grad_scalers(package: Path) -> None:
    step, eager = load(package).step(), Eager()
    step.scaler.growth_interval = 3
    eager.scaler.set_growth_interval(3)
    for i in range(24):
        if i % 4 == 3:
            step(*_batch(i), update=False)
            step(*_batch(100 + i))
            eager.step(_batch(i), _batch(100 + i))
        else:
            step(*_batch(i))
            eager.step(_batch(i))
        eager.same(step)
    assert 2 <= step.skipped < 24 and step.count == 24 - step.skipped and step.scaler.get_scale() < SCALE


def test_small_gradients_do_not_vanish(package: Path) -> None:
    step, module = load(package).step(), half()
    x, _ = _batch(0)
    with torch.no_grad():
        target = module(x)
    target = target + 1e-7  # the loss's gradients underflow in float16
    start = {n: p.detach().clone() for n, p in step.parameters.items()}
    for _ in range(10):
        if (step(x, target), step.count)[1]:
            break
    moved = max(float((p.detach() - start[n]).abs().max()) for n, p in step.parameters.items())
    assert step.count == 1 and moved > 0
    (_loss(module(x), target)).backward()
    assert all(p.grad is None or not p.grad.any() for p in module.first.parameters())  # without a scale they vanish


def test_the_scale_goes_into_the_state_and_back(package: Path, tmp_path: Path) -> None:
    step, eager = load(package).step(), Eager()
    for i in range(6):
        step(*_batch(i))
        eager.step(_batch(i))
    step.save(tmp_path / "state.safetensors")
    resumed, handed = load(package).step(), load(package).step()
    resumed.resume(tmp_path / "state.safetensors")
    handed.load_state_dict(
        {
            "module": eager.module.state_dict(),
            "optimizer": eager.optimizer.state_dict(),
            "scaler": eager.scaler.state_dict(),
        }
    )
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(step.state_dict()["scaler"])
    assert other.get_scale() == eager.scaler.get_scale() == resumed.scaler.get_scale() == handed.scaler.get_scale()
    for i in range(6, 10):
        for one in (step, resumed, handed):
            one(*_batch(i))
        eager.step(_batch(i))
    eager.same(step)
    assert all(torch.equal(step.parameters[n], p) for n, p in resumed.parameters.items())
    assert all(torch.allclose(step.parameters[n], p, rtol=1e-3, atol=1e-5) for n, p in handed.parameters.items())


def test_what_cannot_be_scaled_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(3, 1, dtype=torch.float16)
    example = torch.randn(4, 3, dtype=torch.float16), torch.randn(4, 1, dtype=torch.float16)
    with pytest.raises(ExportError, match=r"loss_scale: expected float32 parameters, got weight of torch.float16"):
        ab.export_step(
            module, example, loss_fn=_loss, optimizer=_sgd(module), loss_scale=SCALE, path=tmp_path / "s.pt2"
        )
    with pytest.raises(ExportError, match=r"loss_scale: expected a positive number, .*, got 0"):
        ab.export_step(
            whole := half(), _batch(0), loss_fn=_loss, optimizer=_sgd(whole), loss_scale=0, path=tmp_path / "s.pt2"
        )


def test_inspect_names_it(package: Path) -> None:
    assert (
        "Loss scale: 4.1943e+06 at first, then by torch.amp.GradScaler's rule"
        in aot_backward("inspect", package).stdout
    )
    told = json.loads(aot_backward("inspect", package, "--json").stdout)
    assert '"loss_scale": 4194304.0' in json.dumps(told)
