"""The gradient of a tensor of which every ``x[i]`` was used, as the packed projection of attention is: eager's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import load


def parts(x: Tensor) -> Tensor:
    """All parts along each dimension, some of them, and the whole beside them."""
    scaled, whole, squared = x * 1.5, x.sin(), x * x
    inner = scaled[:, 2] ** 2 * scaled[:, 0] + scaled.select(1, 1)
    outer = whole[0] ** 3 + 2 * whole[-1] ** 2 + whole[1] * whole[1]
    return inner.sum() + outer.sum() + squared[:, :, 2].sum() + (whole.exp() + x.shape[3]).sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_are_eagers(dynamic: bool, tmp_path: Path) -> None:
    def tensor(n: int) -> Tensor:
        torch.manual_seed(n)
        return torch.randn(3, 3, 4, n, requires_grad=True)

    shapes = {"x": {3: Dim("n", min=1, max=100)}} if dynamic else None
    path = ab.export_grad(parts, (tensor(5),), wrt="x", dynamic_shapes=shapes, path=tmp_path / "parts.pt2")
    gradient = load(path).grad()
    for n in (5, 1, 33) if dynamic else (5,):
        x = tensor(n)
        torch.testing.assert_close(gradient(x)[1], torch.autograd.grad(parts(x), x)[0])
