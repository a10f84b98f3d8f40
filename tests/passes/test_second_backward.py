"""Loops that differentiate gradients: the pass with ``create_graph=True`` runs in eager, and the pass that
differentiates it again is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import aot_backward as ab

from ..support.exports import shared

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 4
Losses = Iterator[torch.Tensor]


def gradient_penalty(net: nn.Module, step: int) -> Losses:
    """Yield the loss of a WGAN-GP critic."""
    rows = 6 + step % 2
    real, fake = torch.randn(rows, 4), torch.randn(rows, 4)
    mixed = (torch.rand(rows, 1) * (real - fake) + fake).requires_grad_()
    (slope,) = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True)
    yield net(fake).mean() - net(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def differential_equation(net: nn.Module, step: int) -> Losses:
    """Yield the residual of an equation with a second derivative."""
    x = torch.rand(8 + step % 2, 4, requires_grad=True)
    u = net(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    yield (first[:, 1] - 0.1 * second[:, 0]).square().mean() + u.square().mean()


def meta_learning(net: nn.Module, step: int) -> Losses:
    """Run MAML: differentiate the outer loss through two inner steps of descent."""
    x = torch.randn(5 + step % 2, 4)
    wanted = torch.sin(x.sum(1, keepdim=True) + step)
    parameters = dict(net.named_parameters())
    for _ in range(2):
        loss = functional.mse_loss(torch.func.functional_call(net, parameters, x), wanted)
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        parameters = {k: p - 0.1 * g for (k, p), g in zip(parameters.items(), gradients, strict=True)}
    yield functional.mse_loss(torch.func.functional_call(net, parameters, x), wanted)


LOOPS: dict[str, tuple[Callable[[nn.Module, int], Losses], int]] = {
    # the loop, and the number of its passes per step with create_graph=True
    "gradient_penalty": (gradient_penalty, 1),
    "differential_equation": (differential_equation, 2),
    "meta_learning": (meta_learning, 2),
}


def trained(losses: Callable[[nn.Module, int], Losses], steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        for loss in losses(net, step):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.fixture(scope="module")
def package() -> Path:
    def record(path: Path) -> None:
        with ab.record(path, tune="none", optimizer=False) as recording:
            for losses, _ in LOOPS.values():
                trained(losses, STEPS)
        assert not recording.skipped

    return shared("second-backward", record)


@pytest.mark.parametrize("name", LOOPS)
def test_the_second_backward_is_replayed(name: str, package: Path) -> None:
    losses, differentiable = LOOPS[name]
    with ab.replay(package) as session:
        ours = trained(losses, 6)
    torch.testing.assert_close(ours, trained(losses, 6), rtol=1e-4, atol=1e-6)
    report = session.report
    assert (report.bindings, report.hits, sum(report.misses.values())) == (1, 5, 0), str(report)
    ((reason, count),) = report.eager.items()
    assert "create_graph=True" in reason and count == 6 * differentiable
