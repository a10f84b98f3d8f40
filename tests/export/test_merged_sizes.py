"""Attention heads that are merged with a dynamic batch, transposed and split again: eager's numbers at every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.merged_sizes import split_merged_views
from aot_backward_runtime import load

from ..support import rewriting

aten = torch.ops.aten


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Merge and split ``x`` of batch × n × 4 × 8, with both sizes dynamic."""
    batch, n = x.shape[0], x.shape[1]
    packed = (x * 2).reshape(batch * n, 4, 8).transpose(0, 1).reshape(4, batch, n * 8)
    merged = x.transpose(1, 2).reshape(batch * 4, n, 8).sin().transpose(0, 1).reshape(n, batch, 32)
    twice = x.permute(2, 0, 1, 3).reshape(4 * batch, n * 8).permute(1, 0).reshape(n, 8, 4, batch)
    return (merged @ weight).square().sum() + (packed**3).sum() + (twice.cos() * torch.arange(8.0)[:, None, None]).sum()


def test_gradients_are_eagers(tmp_path: Path) -> None:
    def arguments(batch: int, n: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(batch)
        return torch.randn(batch, n, 4, 8, requires_grad=True), torch.randn(32, 5, requires_grad=True)

    shapes = {"x": {0: Dim("batch", min=2, max=64), 1: Dim("n", min=2, max=64)}, "weight": None}
    path = ab.export_grad(
        heads, arguments(3, 5), wrt=["x", "weight"], dynamic_shapes=shapes, path=tmp_path / "heads.pt2"
    )
    gradient = load(path).grad()
    for batch, n in ((3, 5), (2, 2), (2, 7), (16, 3), (8, 24)):
        given = arguments(batch, n)
        for ours, eagers in zip(gradient(*given)[1].values(), torch.autograd.grad(heads(*given), given), strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-4)


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


VIEWS: dict[str, tuple[bool, Any]] = {
    "heads": (True, lambda x: copied(x.view(x.shape[0] * 4, 6, 8).permute(1, 0, 2)).view(6, x.shape[0], 32)),
    "negative dimensions": (
        True,
        lambda x: copied(x.view(x.shape[0] * 4, 6, 8).permute(-2, -3, -1)).view(6, x.shape[0], 32),
    ),
    "nothing dynamic is merged": (
        False,
        lambda x: copied(x.view(x.shape[0], 24, 8).permute(1, 0, 2)).view(24, x.shape[0] * 8),
    ),
    "divided first": (
        False,
        lambda x: copied(x.view(x.shape[0], 4, 2, 3, 8).permute(2, 1, 0, 3, 4)).view(2, 4, x.shape[0] * 24),
    ),
    "a view without a copy": (
        False,
        lambda x: x.view(x.shape[0] * 4, 6, 8).permute(1, 0, 2).unflatten(1, (x.shape[0], 4)),
    ),
}


@pytest.mark.parametrize("case", VIEWS)
def test_merged_sizes_are_taken_apart(case: str) -> None:
    found, function = VIEWS[case]
    x = torch.randn(5, 4, 6, 8)
    # The sum makes only the first size dynamic
    graph = torch_api.make_fx(lambda x: function(x + torch.zeros(4, 6, 8)), tracing_mode="symbolic")(x)
    before = [node.target for node in graph.graph.nodes]
    fake = next(iter(graph.graph.nodes)).meta["val"]
    guards = len(fake.fake_mode.shape_env.guards)
    with torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True):
        rewriting.rewritten(graph, split_merged_views)
    assert len(fake.fake_mode.shape_env.guards) == guards
    assert (
        [node.target for node in graph.graph.nodes].count(aten.view.default) < before.count(aten.view.default)
    ) == found
    for n in (5, 1, 2):
        x = torch.randn(n, 4, 6, 8)
        assert torch.equal(graph(x), function(x)) and graph(x).stride() == function(x).stride()


def beside_each_other(function: Any, *given: Tensor) -> tuple[int, Tensor]:
    """Return the dimensions that the ``cat`` of ``function`` joins after the pass, and the result."""
    graph = torch_api.make_fx(function, tracing_mode="fake")(*given)
    rewriting.rewritten(graph, split_merged_views)
    (cat,) = graph.graph.find_nodes(op="call_function", target=aten.cat.default)
    return cat.args[0][0].meta["val"].dim(), graph(*given)


CATS: dict[str, tuple[int, Any]] = {
    "heads": (
        4,
        lambda x, y: torch.cat([x.transpose(1, 2).reshape(x.shape[0], 6, 32), y.reshape(y.shape[0], 6, 16)], 2),
    ),
    "the last dimension from the end": (4, lambda x, y: torch.cat([x.transpose(1, 2).flatten(2), y.flatten(2)], -1)),
    "one of them is merged": (3, lambda x, y: torch.cat([x.transpose(1, 2).flatten(2), y[:, :, 0]], 2)),
    "others are merged": (
        3,
        lambda x, y: torch.cat([x.transpose(1, 2).flatten(1, 2), y.repeat(1, 1, 2, 1).flatten(1, 2)], 2),
    ),
    "other widths": (3, lambda x, y: torch.cat([x.transpose(1, 2).flatten(2), y.mT.flatten(2)], 2)),
    "along another dimension": (
        3,
        lambda x, y: torch.cat([x.transpose(1, 2).flatten(2), y.repeat(1, 1, 2, 1).flatten(2)], 1),
    ),
}


@pytest.mark.parametrize("case", CATS)
def test_what_is_put_side_by_side_is_merged_afterwards(case: str) -> None:
    dimensions, function = CATS[case]
    x, y = torch.randn(5, 4, 6, 8), torch.randn(5, 6, 2, 8)
    found, result = beside_each_other(function, x, y)
    expected = function(x, y)
    assert found == dimensions and torch.equal(result, expected) and result.stride() == expected.stride()
