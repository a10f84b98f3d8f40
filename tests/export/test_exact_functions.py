"""``tanh`` and GELU in compiled code: ``tanh`` is about as exact as the library function that it replaces, in every place
that models use it; GELU and its gradient share an exponential, with eager's numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.shared_exponential import by_one
from aot_backward_runtime import load

from ..support import rewriting
from ..support.exports import shared

aten = torch.ops.aten
SPECIAL = [
    0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-20, 1e-4, -1e-4, 0.7, -0.7, 5.9, -5.9, 9.0, 9.1, 13.2, -13.2, -30.0, 44.3, 88.8,
    1e10, -1e10, 3e38, math.inf, -math.inf, math.nan,
]  # fmt: skip


def weighed(x: Tensor, weight: Tensor, z: Tensor, scale: Tensor) -> Tensor:
    """Return a sum whose gradient by ``weight`` is tanh(x), element by element."""
    return (torch.tanh(x) * weight).float().sum() + (functional.gelu(z) * scale).float().sum()


def package(dtype: torch.dtype) -> Any:
    """Return the gradients of :func:`weighed`, for any two lengths."""
    example = tuple(torch.randn(40, dtype=dtype, requires_grad=True) for _ in range(4))
    shapes = [{0: Dim(name, min=2)} for name in ("length", "length", "other", "other")]
    return load(
        shared(
            f"exact-functions-{dtype}",
            lambda path: ab.export_grad(weighed, example, wrt="inputs", dynamic_shapes=shapes, path=path),
        )
    )


def gradients(dtype: torch.dtype, x: Tensor, z: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Return the package's gradients, and eager's, by weights of 1."""
    given = [
        t
        for of in (x.to(dtype, copy=True), z.to(dtype, copy=True))
        for t in (of.requires_grad_(), torch.ones_like(of).requires_grad_())
    ]
    return package(dtype).grad()(*given)[1], torch.autograd.grad(weighed(*given), given)


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
def test_units_in_the_last_place(dtype: torch.dtype, units: float) -> None:
    assert not calls_tanh(package(dtype))
    x = all_over(dtype)
    ours, (slope, *_) = gradients(dtype, x, x[:2])
    exact = torch.tanh(x.double())
    result = ours["weight"]
    assert result.dtype == dtype and units_apart(result, exact) <= units
    assert result[exact.isfinite()].abs().max() <= 1 and torch.equal(result.isnan(), exact.isnan())
    assert torch.equal(result.signbit()[~exact.isnan()], exact.signbit()[~exact.isnan()])
    negative = gradients(dtype, -x, x[:2])[0]["weight"]
    assert torch.equal(negative[~exact.isnan()], -result[~exact.isnan()])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(ours["x"], slope, equal_nan=True, rtol=4 * rounding, atol=3 * rounding)


def test_double_precision_stays() -> None:
    assert calls_tanh(package(torch.float64))
    x = torch.randn(40).double()
    ours, _ = gradients(torch.float64, x, x)
    torch.testing.assert_close(ours["weight"], torch.tanh(x), rtol=1e-15, atol=0)


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


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 3e-7), (torch.bfloat16, 4e-3), (torch.float64, 1e-15)])
def test_gradients_of_gelu_are_as_exact_as_eagers(dtype: torch.dtype, off: float) -> None:
    """Eager's error function is also exact to 1.5e-7 of its limit at infinity, so its gradients are off by up to
    2.5e-7."""
    z = torch.cat([torch.linspace(-7, 7, 100_003), torch.logspace(-30, 1, 10_003), torch.tensor(SPECIAL)]).to(dtype)
    ours, (_, _, eager, _) = gradients(dtype, z[:2], z)
    assert ours["z"].dtype == dtype
    wide = z.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(functional.gelu(wide).sum(), [wide])
    assert (ours["z"].double() - exact).abs()[exact.isfinite()].max() <= off
    assert torch.equal(ours["z"].isnan(), eager.isnan())


def slope(x: Tensor) -> Tensor:
    return aten.gelu_backward(torch.ones_like(x), x)


def other(factor: float, by: float) -> Any:
    return lambda x: torch.erf(x * factor) + torch.exp(x * x * by)


# A function, and the number of calls of the exponential and of erf after the pass
COUNTS: dict[str, tuple[Any, int, int]] = {
    "gradient of GELU": (slope, 1, 0),
    "forward and gradient": (lambda x: functional.gelu(x) + slope(x), 1, 0),
    "forward": (functional.gelu, 0, 1),
    "two inputs": (lambda x: slope(x) + slope(x + 1), 2, 0),
    "the exponential first": (lambda x: (p := torch.exp(x * x * -0.5)) * x + torch.erf(x * math.sqrt(0.5)) * p, 1, 0),
    "another factor": (other(2.0, -4.0), 1, 0),
    "not its square": (other(2.0, -2.0), 1, 1),
    "growing": (other(1.0, 1.0), 1, 1),
    "of another tensor": (lambda x: torch.erf(x * math.sqrt(0.5)) + torch.exp((x + 1) * (x + 1) * -0.5), 1, 1),
    "a product of two": (lambda x: torch.erf(x * math.sqrt(0.5)) + torch.exp(x * (x + 1) * -0.5), 1, 1),
    "double precision": (lambda x: slope(x.double()), 1, 1),
}


@pytest.mark.parametrize("case", COUNTS)
def test_what_is_rewritten(case: str) -> None:
    function, exponentials, errors = COUNTS[case]
    x = torch.linspace(-6, 6, 1001)
    graph = torch_api.make_fx(function, decomposition_table=torch_api.select_decomp_table(), tracing_mode="fake")(x)
    rewriting.rewritten(graph, by_one)
    calls = [node.target for node in graph.graph.nodes]
    assert (calls.count(aten.exp.default), calls.count(aten.erf.default)) == (exponentials, errors)
    torch.testing.assert_close(graph(x), function(x), rtol=1e-6, atol=1e-6)
