"""Maximum pooling in compiled code: values and indices equal eager's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.max_pooling import by_channels
from aot_backward_runtime import load

from ..support import rewriting
from ..support.oracle import assert_same, run

POOL = torch.ops.aten.max_pool2d_with_indices.default
RANDOM = torch.Generator().manual_seed(0)


def rewritten(function: Any, *arguments: Any) -> torch.fx.GraphModule:
    """Return the graph that Inductor gets for ``function`` after the pass."""
    graph = torch_api.make_fx(function, tracing_mode="fake")(*arguments)
    return rewriting.rewritten(graph, by_channels)


def kernels(graph: torch.fx.GraphModule) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=POOL))


def images(height: int, width: int, *leading: int) -> Tensor:
    """Return images with equal numbers, both zeros, NaN, and windows of only minus infinity."""
    x = torch.randn(*(leading or (2, 5)), height, width, generator=RANDOM).round(decimals=1)
    x[torch.rand(x.shape, generator=RANDOM) < 0.1] = math.nan
    x[torch.rand(x.shape, generator=RANDOM) < 0.1] = -0.0
    x[..., :4, -5:] = -math.inf
    return x


POOLS: dict[str, tuple[Tensor, tuple[Any, ...]]] = {
    "two by two": (images(8, 8), ([2, 2], [2, 2])),
    "as large as its step": (images(8, 6), ([2, 3],)),
    "sizes that do not divide": (images(7, 9), ([2], [2])),
    "a last window that is cut": (images(7, 9), ([2, 2], [2, 2], [0], [1], True)),
    "overlapping, padded": (images(8, 9), ([3, 3], [2, 2], [1, 1])),
    "padded, the last window cut": (images(7, 8), ([3, 2], [2, 3], [1, 1], [1, 1], True)),
    "dilated": (images(9, 9), ([2, 2], [1, 2], [1, 1], [3, 2])),
    "one axis": (images(1, 12), ([1, 3], [1, 2], [0, 1])),
    "without a batch": (images(8, 8, 6), ([2, 2],)),
    "minus infinity alone, padded": (torch.full((1, 4, 6, 6), -math.inf), ([3, 3], [2, 2], [1, 1], [1, 1])),
    "one window": (images(4, 4), ([4, 4],)),
}


@pytest.mark.parametrize("case", POOLS)
def test_what_eager_gives(case: str) -> None:
    x, arguments = POOLS[case]
    graph = rewritten(lambda x: POOL(x, *arguments), x)
    assert kernels(graph) == 0
    (value, index), (expected, place) = graph(x), POOL(x, *arguments)
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(index, place)
    assert (value.stride(), index.stride(), index.dtype) == (expected.stride(), place.stride(), place.dtype)


def test_channels_last_is_left_to_the_kernel() -> None:
    x = torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last)
    assert kernels(rewritten(lambda x: POOL(x, [2, 2]), x)) == 1


def test_a_window_of_many_numbers_is_left_to_the_kernel() -> None:
    assert kernels(rewritten(lambda x: POOL(x, [5, 4]), torch.randn(2, 8, 12, 12))) == 1


class Pools(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        value, index = functional.max_pool2d(x, 2, return_indices=True)
        padded = functional.max_pool2d(functional.relu(x), 3, stride=2, padding=1, ceil_mode=True)
        return value, index, padded, functional.max_pool1d(x[:, :, 0], 3, stride=2, padding=1)


def test_a_package(tmp_path: Path) -> None:
    """Values, indices and gradients at sizes other than the example's."""
    example = images(9, 10, 3, 6).nan_to_num(0.5, neginf=-3.0).requires_grad_()
    path = ab.export_module(Pools(), (example,), dynamic_shapes=({0: Dim("rows")},), path=tmp_path / "pools.pt2")
    for rows in (1, 3, 8):
        x = images(9, 10, rows, 6).nan_to_num(0.5, neginf=-3.0).requires_grad_()
        assert_same(run(load(path).module(), (x,), 1), run(Pools(), (x,), 1))
