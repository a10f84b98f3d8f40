"""Sums of rows by an index, as in gradients of embeddings and of ``x[index]``: eager's numbers, by eager's kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.row_sums import by_scatter_add
from aot_backward_runtime import ExecutionError, load

from ..support import rewriting

NAMES = ["table", "line", "cube", "half", "added"]
KERNEL = b"aoti_torch_cpu_scatter_reduce_two_out"
aten = torch.ops.aten


def looked_up(
    table: Tensor, line: Tensor, cube: Tensor, half: Tensor, added: Tensor, index: Tensor, pairs: Tensor
) -> Tensor:
    """Look up or add rows in each way. Gradients differ from row to row, and rows repeat."""
    terms = [
        functional.embedding(pairs, table, padding_idx=3),
        functional.embedding(pairs.int(), table, scale_grad_by_freq=True),
        functional.embedding(pairs, table).mean(1),
        table[index],
        table.t()[index.abs() % 4],
        table.index_select(0, index.abs()),
        line[index],
        line[pairs],
        cube[pairs],
        half[pairs].float(),
        table.index_put((index,), added, accumulate=True),
        table.index_add(0, index.abs(), added.expand(index.shape[0], -1), alpha=2.0),
    ]
    return torch.stack([(t.double().pow(3) * (n + 1)).nansum() for n, t in enumerate(terms)]).sum().float()


def tensors(length: int, batch: int, time: int) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    differentiable = [
        torch.randn(10, 16),
        torch.randn(10),
        torch.randn(10, 4, 5),
        torch.randn(10, 20, dtype=torch.bfloat16),
        torch.randn(1, 16),
    ]
    index = torch.randint(-9, 10, (length,))
    return (*(t.requires_grad_() for t in differentiable), index, torch.randint(10, (batch, time)))


def check(path: Path, sizes: list[tuple[int, int, int]]) -> Any:
    """Check that the package's gradients equal eager's at each of ``sizes``. Return the gradient function."""
    gradient = load(path).grad()
    for size in sizes:
        arguments = tensors(*size)
        # Eager's bfloat16 kernel rounds after each added row
        precise = [a.detach().double().requires_grad_() for a in arguments[:5]]
        expected = torch.autograd.grad(looked_up(*precise, *arguments[5:]), precise)
        ours = gradient(*arguments)[1]
        for name, exact in zip(NAMES, expected, strict=True):
            # Before torch 2.13, the compiled code also rounds after each added row
            tolerance = 1e-5 if name != "half" else 1e-2 if torch_api.at_least("2.13") else 0.1
            torch.testing.assert_close(
                ours[name].double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
            )
    return gradient


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_gradients_are_eagers(kind: str, tmp_path: Path) -> None:
    dims = [Dim(name, min=0, max=1000) for name in ("length", "batch", "time")]
    shapes: Any = (*[None] * 5, {0: dims[0]}, {0: dims[1], 1: dims[2]}) if kind == "dynamic" else None
    path = ab.export_grad(looked_up, tensors(24, 6, 5), wrt=NAMES, dynamic_shapes=shapes, path=tmp_path / "rows.pt2")
    sizes = (
        [(24, 6, 5)]
        if shapes is None
        else [(24, 6, 5), (0, 1, 7), (1, 7, 1), (1, 1, 1), (700, 0, 3), (2, 3, 0), (3, 90, 8)]
    )
    if not torch_api.at_least("2.13"):  # before, Inductor tests whether the product of two sizes is at least 2
        sizes = [size for size in sizes if size[1] * size[2] > 1]
    gradient = check(path, sizes)
    package = load(path)
    assert all(KERNEL in package._archive.library(name).read_bytes() for name in package.manifest.libraries)
    wrong = list(tensors(24, 6, 5))
    wrong[5] = torch.full_like(wrong[5], 10)
    with pytest.raises(ExecutionError, match="out of bounds" if torch_api.at_least("2.13") else "native code failed"):
        gradient(*wrong)
    if shapes is not None:
        (variant,) = package.manifest.entries["grad"].variants
        assert variant.guards == () or not torch_api.at_least("2.13")
        ab.rebuild(path, path)
        check(path, sizes)


def traced(function: Any, *arguments: Tensor) -> torch.fx.GraphModule:
    """Return the graph that Inductor gets for ``function`` after the pass."""
    graph = torch_api.make_fx(function, decomposition_table=torch_api.select_decomp_table(), tracing_mode="fake")(
        *arguments
    )
    return rewriting.rewritten(graph, by_scatter_add)


def put(to: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return aten.index_put(to, [index], rows, True)


ROWS = {
    "one index": (put, torch.zeros(10, 16), torch.randint(-10, 10, (7,)), torch.randn(7, 16)),
    "pairs": (put, torch.randn(10, 16), torch.randint(-10, 10, (7, 3)), torch.randn(7, 3, 16)),
    "as short as they may be": (put, torch.randn(10, 8), torch.randint(-10, 10, (7,)), torch.randn(7, 8)),
    "int32": (put, torch.zeros(10, 16), torch.randint(0, 10, (7,)).int(), torch.randn(7, 16)),
    "broadcast rows": (put, torch.zeros(10, 16), torch.randint(-10, 10, (7, 3)), torch.randn(1, 3, 1)),
    "transposed rows": (put, torch.zeros(10, 16), torch.randint(-10, 10, (7,)), torch.randn(16, 7).t()),
    "rows of rows": (put, torch.zeros(10, 4, 5), torch.randint(-10, 10, (7,)), torch.randn(7, 4, 5)),
    "no index": (put, torch.randn(10, 16), torch.randint(0, 1, (0,)), torch.randn(0, 16)),
    "no rows": (put, torch.randn(0, 16), torch.randint(0, 1, (0,)), torch.randn(0, 16)),
    "embedding": (
        lambda grad, index: aten.embedding_dense_backward(grad, index, 10, 3, False),
        torch.randn(5, 6, 16),
        torch.randint(0, 10, (5, 6)),
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_added_by_scatter_add(case: str) -> None:
    function, *arguments = ROWS[case]
    graph = traced(function, *arguments)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(aten.scatter_add.default) == 1 and aten.index_put.default not in targets
    expected = function(*arguments)
    torch.testing.assert_close(graph(*arguments), expected)
    assert graph(*arguments).stride() == expected.stride()


OTHERS = {
    "strides": (put, torch.randn(16, 10).t(), torch.randint(-10, 10, (7,)), torch.randn(7, 16)),
    "expanded": (put, torch.randn(10, 1).expand(10, 16), torch.randint(-10, 10, (7,)), torch.randn(7, 16)),
    "a mask": (put, torch.zeros(10, 16), torch.rand(10) > 0.5, torch.randn(1, 16)),
    "not added": (
        lambda to, index, rows: aten.index_put(to, [index], rows, False),
        torch.zeros(10, 16),
        torch.arange(3),
        torch.randn(3, 16),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_else_is_put_is_left_alone(case: str) -> None:
    function, *arguments = OTHERS[case]
    graph = traced(function, *arguments)
    assert aten.scatter_add.default not in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(graph(*arguments), function(*arguments))
