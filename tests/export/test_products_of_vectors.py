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

# An outer product, an inner one, one of single numbers, and one of a matrix and a column
SHAPES = ((3, 1), (1, 4)), ((1, 5), (5, 1)), ((1, 1), (1, 1)), ((3, 5), (5, 1))
LEFT = {
    (torch.float32, torch.float64, torch.float64, torch.float32): 2 + 0 + 0 + 2,
    (torch.bfloat16,) * 4: 4 * 3,
}
"""How many batched products stay, of four and their eight gradients."""


class Multiplied(nn.Module):
    def forward(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [torch.bmm(left.tanh(), right.sin()) for left, right in pairs]


def drawn(count: int, dtypes: tuple[torch.dtype, ...]) -> list[tuple[Tensor, ...]]:
    return [
        tuple(torch.randn(count, *shape).to(dtype).requires_grad_() for shape in pair)
        for pair, dtype in zip(SHAPES, dtypes, strict=True)
    ]


@pytest.mark.parametrize("dtypes", LEFT, ids=["32 and 64 bits", "16 bits"])
def test_results_and_gradients_are_eagers(dtypes: tuple[torch.dtype, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, batch = tmp_path / "bmm.pt2", {0: Dim("batch", min=1, max=100)}
    shapes = ([(batch, batch)] * len(SHAPES),)
    ab.export_module(Multiplied(), (drawn(7, dtypes),), dynamic_shapes=shapes, path=path, tune="none")
    with zipfile.ZipFile(path) as archive:
        graphs = [archive.read(name) for name in archive.namelist() if "/graphs/" in name]
    assert sum(graph.count(b"aten.bmm") for graph in graphs) == LEFT[dtypes]
    for count in (1, 2, 100):
        given = drawn(count, dtypes)
        leaves = [t for pair in given for t in pair]
        ours, eager = load(path).module()(given), Multiplied()(given)
        assert [t.stride() for t in ours] == [t.stride() for t in eager]
        torch.testing.assert_close(ours, eager)
        weights = [torch.randn(t.shape).to(t.dtype) for t in eager]
        expected = torch.autograd.grad(eager, leaves, weights)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves, weights), expected)
