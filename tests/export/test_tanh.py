"""``tanh`` in compiled code is about as exact as the library function that it replaces, in every place that models use
it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_runtime import load

SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-38,
    0.7,
    -0.7,
    9.0,
    9.1,
    -30.0,
    44.3,
    88.8,
    3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    """Return a sum whose gradient by ``weight`` is tanh(x), element by element."""
    return (torch.tanh(x) * weight).float().sum()


def all_over(dtype: torch.dtype) -> Tensor:
    dense = torch.linspace(-9.5, 9.5, 1_000_003)
    near_the_change = torch.linspace(0.69, 0.71, 100_003)
    return torch.cat(
        [dense, near_the_change, -near_the_change, torch.logspace(-40, 1, 100_003), torch.tensor(SPECIAL)]
    ).to(dtype)


def calls_tanh(package: Any) -> bool:
    return any(
        re.search(rb"Sleef_tanh|\0tanhf\0", package._archive.library(name).read_bytes())
        for name in package.manifest.libraries
    )


def units_apart(one: Tensor, exact: Tensor) -> float:
    """Return the largest distance, in units in the last place of ``one``'s dtype at the exact value."""
    rounded = exact.to(one.dtype).abs()
    unit = torch.nextafter(rounded, torch.full_like(rounded, torch.inf)).double() - rounded.double()
    return float(((one.double() - exact).abs() / unit)[exact.isfinite()].max())


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 1.1), (torch.bfloat16, 0.51), (torch.float16, 0.51)])
def test_units_in_the_last_place(dtype: torch.dtype, units: float, tmp_path: Path) -> None:
    example = torch.randn(40, dtype=dtype, requires_grad=True), torch.randn(40, dtype=dtype, requires_grad=True)
    length = {0: Dim("length", min=2)}
    package = load(
        ab.export_grad(
            weighed, example, wrt=["x", "weight"], dynamic_shapes=(length, length), path=tmp_path / "tanh.pt2"
        )
    )
    assert not calls_tanh(package)
    x = all_over(dtype).requires_grad_()
    weight = torch.ones_like(x, requires_grad=True)
    ours = package.grad()(x, weight)[1]
    exact = torch.tanh(x.detach().double())
    result = ours["weight"]
    assert result.dtype == dtype and units_apart(result, exact) <= units
    assert result[exact.isfinite()].abs().max() <= 1 and torch.equal(result.isnan(), exact.isnan())
    assert torch.equal(result.signbit()[~exact.isnan()], exact.signbit()[~exact.isnan()])
    negative = package.grad()(-x.detach(), weight)[1]["weight"]
    assert torch.equal(negative[~exact.isnan()], -result[~exact.isnan()])
    (slope,) = torch.autograd.grad(weighed(x, weight), [x])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(ours["x"], slope, equal_nan=True, rtol=4 * rounding, atol=3 * rounding)


def test_double_precision_stays(tmp_path: Path) -> None:
    example = torch.randn(40).double().requires_grad_(), torch.randn(40).double().requires_grad_()
    package = load(ab.export_grad(weighed, example, wrt=["weight"], path=tmp_path / "tanh.pt2"))
    assert calls_tanh(package)
    torch.testing.assert_close(
        package.grad()(*example)[1]["weight"], torch.tanh(example[0].detach()), rtol=1e-15, atol=0
    )


class Gates(nn.Module):
    """Recurrent cells and the activations that contain a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.plain = nn.LSTM(6, 8), nn.GRU(8, 8), nn.RNN(8, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plain(self.gru(self.lstm(x)[0])[0])[0]
        out = self.out(functional.gelu(hidden, approximate="tanh"))
        return out + functional.mish(out) + functional.tanhshrink(out)


def test_wherever_a_model_has_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Gates(), torch.randn(3, 4, 6, requires_grad=True)
    package = load(ab.export_module(model, (x,), path=tmp_path / "gates.pt2"))
    assert not calls_tanh(package)
    exported = package.module()
    expected, ours = model(x), exported(x)
    torch.testing.assert_close(ours, expected)
    of_ours = torch.autograd.grad(ours.square().sum(), [x, *exported.parameters()])
    torch.testing.assert_close(of_ours, torch.autograd.grad(expected.square().sum(), [x, *model.parameters()]))
