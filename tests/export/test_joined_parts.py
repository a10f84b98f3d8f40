"""The gradient of a tensor whose every ``x[i]`` was used, as in attention's packed projection: it equals eager's and is
joined from its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.joined_parts import by_cat
from aot_backward_runtime import load

from ..support import rewriting

aten = torch.ops.aten


def parts(x: Tensor) -> Tensor:
    """Use all parts along each dimension, some of them, and the whole tensor too."""
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


def pad(part: Tensor, index: int, dim: int = 0, size: int = 3, value: float = 0.0) -> Tensor:
    shape = list(part.shape)
    shape.insert(dim, size)
    return aten.select_scatter(torch.full(shape, value), part, dim, index)


def twice(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    both = pad(x, 0) + pad(y, 1)
    return (both + both) + pad(z, 2)


SUMS: dict[str, tuple[int, Any]] = {
    "all": (1, lambda x, y, z: pad(x, 0) + pad(y, 1) + pad(z, 2)),
    "in another order": (1, lambda x, y, z: pad(z, 2) + (pad(y, 1) + pad(x, 0))),
    "from the end": (1, lambda x, y, z: pad(x, -3) + pad(y, -2) + pad(z, -1)),
    "beside another term": (1, lambda x, y, z: pad(x, 0) + (y.expand(3, 3, 3) + pad(y, 1)) + pad(z, 2)),
    "two of them": (2, lambda x, y, z: pad(x, 0) + pad(y, 1) + pad(z, 2) + pad(x, 0) + pad(z, 1) + pad(y, 2)),
    "along the last dimension": (1, lambda x, y, z: pad(x, 0, 2) + pad(y, 1, 2) + pad(z, 2, 2)),
    "with two further terms": (
        0,
        lambda x, y, z: (pad(x, 0) + y.expand(3, 3, 3)) + (pad(y, 1) + z.expand(3, 3, 3)) + pad(z, 2),
    ),
    "with one that is broadcast": (0, lambda x, y, z: pad(x, 0) + pad(y, 1) + (pad(z, 2) + x)),
    "one is missing": (0, lambda x, y, z: pad(x, 0) + pad(y, 1) + z),
    "one comes twice": (0, lambda x, y, z: pad(x, 0) + pad(y, 1) + pad(z, 1)),
    "into ones": (0, lambda x, y, z: pad(x, 0) + pad(y, 1) + pad(z, 2, value=1.0)),
    "a sum that is used twice": (0, twice),
    "times two": (0, lambda x, y, z: pad(x, 0) + pad(y, 1) + aten.add(pad(z, 2), pad(z, 2), alpha=2)),
    "along two dimensions": (0, lambda x, y, z: pad(x, 0, 0) + pad(y, 1, 1) + pad(z, 2, 0)),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums_of_all_parts_are_joined(case: str) -> None:
    found, function = SUMS[case]
    torch.manual_seed(0)
    arguments = [torch.randn(3, 3) for _ in range(3)]
    graph = torch_api.make_fx(function, tracing_mode="fake")(*arguments)
    rewriting.rewritten(graph, by_cat)
    assert [node.target for node in graph.graph.nodes].count(aten.cat.default) == found
    assert torch.equal(graph(*arguments), function(*arguments))  # bit for bit: no addition changes its place


def test_long_and_doubled_sums_take_no_long_time() -> None:
    """A sum that adds itself has 2^n terms. Each is visited once."""

    def doubled(x: Tensor) -> Tensor:
        x = pad(x, 0) + pad(x, 1)
        for _ in range(40):
            x = x + x
        for _ in range(400):
            x = x + pad(x[0], 2)
        return x

    graph = torch_api.make_fx(doubled, tracing_mode="fake")(torch.zeros(2))
    rewriting.rewritten(graph, by_cat)
    assert torch.equal(graph(torch.zeros(2)), torch.zeros(3, 2))
