"""Maxima and writes for which compiled code would select another element than eager."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

import aot_backward as ab
from aot_backward_runtime import load


def extremes(u: Tensor, v: Tensor) -> Tensor:
    """Inductor computes the angles twice, in vectors and one by one, with different last bits: the gradients of the
    smallest would be lost."""
    angle = torch.atan2(u, v)
    return angle.amin(-1).sum() + angle.amax(0).sum()


def test_extremes_of_a_value_that_several_loops_read(tmp_path: Path) -> None:
    package = load(
        ab.export_grad(
            extremes, (torch.randn(5, 7), torch.randn(5, 7)), wrt="u", path=tmp_path / "extremes.pt2", tune="none"
        )
    )
    for seed in range(50):
        u, v = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed))
        (eager,) = torch.autograd.grad(extremes(u.requires_grad_(), v), u)
        torch.testing.assert_close(package.grad()(u.detach(), v)[1], eager)


def test_a_sum_of_a_scan(tmp_path: Path) -> None:
    """The gradient of the last carry is expanded, and the backward scan would write into it."""

    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(carry + row), row.tanh()

    def loss(rows: Tensor, first: Tensor) -> Tensor:
        last, every = scan(step, first, rows, dim=0)
        return last.sum() + every.square().sum()

    rows = torch.randn(6, 3, requires_grad=True)
    package = load(
        ab.export_grad(loss, (rows.detach(), torch.zeros(3)), wrt="rows", path=tmp_path / "scan.pt2", tune="none")
    )
    torch.testing.assert_close(
        package.grad()(rows.detach(), torch.zeros(3))[1], torch.autograd.grad(loss(rows, torch.zeros(3)), rows)[0]
    )


def hessian_of_a_trace(m: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return (1.0 / (2.0 + t + torch.trace(t))).mean()

    return (torch.func.hessian(inner)(m) * torch.arange(81.0, dtype=m.dtype).view(3, 3, 3, 3)).sum()


def test_nothing_is_written_into_an_expanded_tensor(tmp_path: Path) -> None:
    """Inductor would write the diagonal's gradients into one row that represents nine."""
    m = torch.rand(3, 3, dtype=torch.float64)
    path = ab.export_grad(hessian_of_a_trace, (m,), wrt="m", path=tmp_path / "hessian.pt2", tune="none")
    value, gradient = load(path).grad()(m)
    wanted = m.clone().requires_grad_()
    expected = hessian_of_a_trace(wanted)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, wanted)[0])
