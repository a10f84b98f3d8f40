"""Variances by two sums: as exact as eager's for all sizes and call forms, and not decomposed for other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.variances import by_two_sums
from aot_backward_runtime import load

from ..support import rewriting

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(0)


class Normalised(nn.Module):
    """Every normalising layer, over dynamic and static dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.batch, self.group, self.instance = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.layer, self.rows, self.last = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.instance(self.group(self.second(torch.relu(self.batch(self.first(x))))))
        return self.last(self.rows(self.layer(hidden.relu().mean((2, 3)))))


def test_layers_are_eagers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normalised()
    x = torch.randn(6, 3, 8, 8).requires_grad_()
    package = load(
        ab.export_module(
            model,
            (x,),
            dynamic_shapes={"x": {0: Dim("rows", min=2, max=600)}},
            path=tmp_path / "norms.pt2",
            tune="none",
        )
    )
    for rows in (6, 3, 33, 300):
        exported, given = package.module(), (torch.randn(rows, 3, 8, 8, generator=RANDOM) * 3 + 20).requires_grad_()
        exported.load_state_dict(model.state_dict())
        expected, ours = model(given), exported(given)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(exported.named_buffers()), dict(model.named_buffers()))
        weights = torch.randn(expected.shape, generator=RANDOM)
        of_ours = torch.autograd.grad((ours * weights).sum(), [given, *exported.parameters()])
        for one, eager in zip(
            of_ours, torch.autograd.grad((expected * weights).sum(), [given, *model.parameters()]), strict=True
        ):
            torch.testing.assert_close(one, eager, rtol=1e-3, atol=1e-3 * max(1.0, float(eager.abs().max())))


def test_far_from_zero_as_exact_as_eager(tmp_path: Path) -> None:
    """A difference of two sums of squares would lose all digits."""

    def spread(x: Tensor, weight: Tensor) -> Tensor:
        return (x.var(1) * weight).sum()

    example = torch.randn(40, 30), torch.randn(40, requires_grad=True)
    shapes = ({0: (rows := Dim("rows", min=2)), 1: Dim("columns", min=2)}, {0: rows})
    grad = load(
        ab.export_grad(
            spread, example, wrt=["weight"], dynamic_shapes=shapes, path=tmp_path / "spread.pt2", tune="none"
        )
    ).grad()
    for columns in (2, 30, 1_025, 100_003):
        x = torch.randn(3, columns, generator=RANDOM) + 1_000
        ours, exact = grad(x, torch.ones(3, requires_grad=True))[1]["weight"].double(), x.double().var(1)
        assert (ours - exact).abs().max() <= max(4 * (x.var(1).double() - exact).abs().max(), 1e-5 * exact.max())


X = torch.randn(6, 4, 5, generator=RANDOM)
CASES: dict[str, tuple[bool, Any, Tensor]] = {  # whether it is decomposed, a function, and its input
    "of all": (True, lambda x: torch.var(x), X),
    "of one dimension": (True, lambda x: torch.var(x, 1), X),
    "of several, kept": (True, lambda x: torch.var(x, (0, -1), keepdim=True), X),
    "of the whole population": (True, lambda x: torch.var(x, 0, correction=0), X),
    "with another correction": (True, lambda x: torch.var(x, 0, correction=2), X),
    "with part of one": (True, lambda x: torch.var(x, 0, correction=0.5), X),
    "more corrected than there is": (True, lambda x: torch.var(x, 0, correction=7), X),
    "and the mean": (True, lambda x: torch.var_mean(x, (1, 2)), X),
    "and the mean, kept": (True, lambda x: torch.var_mean(x, (1, 2), correction=0, keepdim=True), X),
    "the mean alone": (True, lambda x: torch.var_mean(x, 2)[1], X),
    "the standard deviation": (True, lambda x: torch.std(x, 0), X),
    "with something infinite": (True, lambda x: torch.var(x, 0), X.masked_fill(X > 1, float("inf"))),
    "of one number": (True, lambda x: torch.var(x, 0), X[:1]),
    "of none": (True, lambda x: torch.var(x, 0), X[:0]),
    "of 64-bit floats": (True, lambda x: torch.var(x, 0), X.double()),
    "of 16-bit floats": (False, lambda x: torch.var(x, 0), X.bfloat16()),
    "of a number": (False, lambda x: torch.var(x, correction=0), X[0, 0, 0]),
    "a layer's": (True, lambda x: functional.layer_norm(x, (4, 5)), X),
}


@pytest.mark.parametrize("sizes", ["fixed", "open"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_what_is_rewritten(case: str, sizes: str) -> None:
    written_out, function, x = CASES[case]
    mode = "fake" if sizes == "fixed" else "symbolic"
    graph = torch_api.make_fx(function, decomposition_table=torch_api.select_decomp_table(), tracing_mode=mode)(x)
    rewriting.rewritten(graph, by_two_sums)
    left = [node for node in graph.graph.nodes if node.target in (aten.var.correction, aten.var_mean.correction)]
    assert bool(left) != written_out
    torch.testing.assert_close(graph(x), function(x), equal_nan=True)
