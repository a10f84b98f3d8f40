"""Heads of an attention that are merged with a dynamic batch, transposed, and divided again: eager's numbers at every size."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import load


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """``x``: batch × n × 4 × 8, both sizes dynamic."""
    batch, n = x.shape[0], x.shape[1]
    packed = (x * 2).reshape(batch * n, 4, 8).transpose(0, 1).reshape(4, batch, n * 8)
    merged = x.transpose(1, 2).reshape(batch * 4, n, 8).sin().transpose(0, 1).reshape(n, batch, 32)
    twice = x.permute(2, 0, 1, 3).reshape(4 * batch, n * 8).permute(1, 0).reshape(n, 8, 4, batch)
    return (merged @ weight).square().sum() + (packed**3).sum() + (twice.cos() * torch.arange(8.0)[:, None, None]).sum()


def test_gradients_are_eagers(tmp_path: Path) -> None:
    def arguments(batch: int, n: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(batch)
        return torch.randn(batch, n, 4, 8, requires_grad=True), torch.randn(32, 5, requires_grad=True)

    shapes = {"x": {0: Dim("batch", min=1, max=64), 1: Dim("n", min=1, max=64)}, "weight": None}
    path = ab.export_grad(heads, arguments(3, 5), wrt=["x", "weight"], dynamic_shapes=shapes, path=tmp_path / "heads.pt2")
    gradient = load(path).grad()
    for batch, n in ((3, 5), (1, 1), (1, 7), (16, 1), (8, 24)):
        given = arguments(batch, n)
        for ours, eagers in zip(gradient(*given)[1].values(), torch.autograd.grad(heads(*given), given), strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-4)
