"""Programs that compiled code gets wrong are exported with the fewest operators computed by eager's own kernels, and say which."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import aot_backward as ab
from aot_backward_runtime import load


def extremes(u: Tensor, v: Tensor) -> Tensor:
    """Compiled code computes the angles twice, in vectors and one by one, with other last bits: the gradients of the smallest go nowhere."""
    angle = torch.atan2(u * 1.5, v)
    return angle.amin(-1).sum() + angle.amax(0).sum()


class Extremes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return extremes(u * self.scale, v)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the exports of a test log for the user."""
    handler, lines = logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aot_backward").addHandler(handler)
    yield lines
    logging.getLogger("aot_backward").removeHandler(handler)


def test_the_operator_at_fault_is_found_and_named(tmp_path: Path, said: list[str]) -> None:
    torch.manual_seed(0)
    u, v = torch.randn(5, 7), torch.randn(5, 7)
    net = Extremes()
    entries = {
        "grad": ab.Grad(extremes, [ab.Variant((u, v))], wrt="u"),
        "step": ab.Step(net, [ab.Variant((u, v))], torch.optim.SGD(net.parameters(), lr=0.1)),
    }
    path = ab.export(tmp_path / "extremes.pt2", entries, tune="none")
    for name in entries:
        (line,) = [text for text in said if text.startswith(f"{name}: ")]
        assert "PyTorch's own kernels compute aten.atan2.default" in line and "test_kernel_search.py" in line and "off by" in line
    ab.rebuild(path, tmp_path / "rebuilt.pt2")
    for file in (path, tmp_path / "rebuilt.pt2"):
        package = load(file)
        assert "aten.atan2.default" in package.manifest.notes["kernels of grad"]
        given = torch.randn(5, 7, requires_grad=True)
        (eager,) = torch.autograd.grad(extremes(given, v), given)
        torch.testing.assert_close(package.grad("grad")(given.detach(), v)[1], eager)
        step = package.step("step")
        step(given.detach(), v)
        twin = Extremes()
        (gradient,) = torch.autograd.grad(twin(given.detach(), v), twin.scale)
        torch.testing.assert_close(step.parameters["scale"], twin.scale - 0.1 * gradient)


def hessian_of_a_trace(m: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return (1.0 / (2.0 + t + torch.trace(t))).mean()

    return (torch.func.hessian(inner)(m) * torch.arange(81.0, dtype=m.dtype).view(3, 3, 3, 3)).sum()


def test_nothing_is_written_into_an_expanded_tensor(tmp_path: Path, said: list[str]) -> None:
    """Inductor would put the diagonal's gradients into one row that stands for nine."""
    m = torch.rand(3, 3, dtype=torch.float64)
    path = ab.export_grad(hessian_of_a_trace, (m,), wrt="m", path=tmp_path / "hessian.pt2", tune="none")
    value, gradient = load(path).grad()(m)
    wanted = m.clone().requires_grad_()
    expected = hessian_of_a_trace(wanted)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, wanted)[0])
    assert not said
