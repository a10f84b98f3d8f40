"""GELU and its gradient share an exponential: eager's numbers, with one exponential."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.shared_exponential import by_one
from aot_backward_runtime import load

from ..support import rewriting

aten = torch.ops.aten
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-20,
    1e-4,
    -1e-4,
    5.9,
    -5.9,
    13.2,
    -13.2,
    -30.0,
    1e10,
    -1e10,
    3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    return (functional.gelu(x) * weight).float().sum()


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 3e-7), (torch.bfloat16, 4e-3), (torch.float64, 1e-15)])
def test_numbers_are_as_exact_as_eagers(dtype: torch.dtype, off: float, tmp_path: Path) -> None:
    """Eager's error function is also exact to 1.5e-7 of its limit at infinity, so its gradients are off by up to
    2.5e-7."""
    example = torch.randn(40, dtype=dtype, requires_grad=True), torch.randn(40, dtype=dtype, requires_grad=True)
    shapes = ({0: Dim("length", min=2)},) * 2
    package = load(
        ab.export_grad(weighed, example, wrt=["x", "weight"], dynamic_shapes=shapes, path=tmp_path / "gelu.pt2")
    )
    x = (
        torch.cat([torch.linspace(-7, 7, 100_003), torch.logspace(-30, 1, 10_003), torch.tensor(SPECIAL)])
        .to(dtype)
        .requires_grad_()
    )
    ours = package.grad()(x, torch.ones_like(x).requires_grad_())[1]["x"]
    assert ours.dtype == dtype
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(weighed(wide, torch.ones_like(wide)), [wide])
    assert (ours.double() - exact).abs()[exact.isfinite()].max() <= off
    (eager,) = torch.autograd.grad(weighed(x, torch.ones_like(x)), [x])
    assert torch.equal(ours.isnan(), eager.isnan())


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
