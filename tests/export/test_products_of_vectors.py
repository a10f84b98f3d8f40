"""Batched outer and inner products are multiplications in compiled code, with eager's results; other products stay."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import load

SHAPES = {
    "outer": ((3, 1), (1, 4)),
    "inner": ((1, 5), (5, 1)),
    "of one number": ((1, 1), (1, 1)),
    "a matrix": ((3, 5), (5, 1)),
}
LEFT = {"outer": 2, "inner": 0, "of one number": 0, "a matrix": 2}
"""Of one product and its two gradients, those of a matrix."""


class Multiplied(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left.tanh(), right.sin())


def products(path: Path) -> int:
    """Return how many operators of the graphs, the forward's and the backward's, are batched products."""
    with zipfile.ZipFile(path) as archive:
        return sum(archive.read(name).count(b"aten.bmm") for name in archive.namelist() if "/graphs/" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_results_and_gradients_are_eagers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = SHAPES[name]
    examples = tuple(torch.randn(7, *shape).to(dtype).requires_grad_() for shape in shapes)
    batch = {0: Dim("batch", min=1, max=100)}
    path = ab.export_module(
        Multiplied(), examples, dynamic_shapes=(batch, batch), path=tmp_path / "bmm.pt2", tune="none"
    )
    assert products(path) == (3 if dtype == torch.bfloat16 else LEFT[name])
    for count in (1, 2, 100):
        given = [torch.randn(count, *shape).to(dtype).requires_grad_() for shape in shapes]
        ours, eager = load(path).module()(*given), Multiplied()(*given)
        weights = torch.randn(eager.shape).to(dtype)
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)
        for one, expected in zip(
            torch.autograd.grad(ours, given, weights), torch.autograd.grad(eager, given, weights), strict=True
        ):
            torch.testing.assert_close(one, expected)
