"""Sums of rows by an index, which gradients of embeddings and of ``x[index]`` are: eager's numbers, by eager's kernel."""

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
from aot_backward_runtime import ExecutionError, load

KERNEL = b"aoti_torch_cpu_scatter_reduce_two_out"


def looked_up(table: Tensor, line: Tensor, cube: Tensor, half: Tensor, added: Tensor, index: Tensor, pairs: Tensor) -> Tensor:
    """Each way in which rows are looked up or added; gradients differ from row to row, and rows come several times."""
    terms = [
        functional.embedding(pairs, table, padding_idx=3),
        functional.embedding(pairs.int(), table, scale_grad_by_freq=True),
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
    return torch.stack([(t.double().pow(3) * (n + 1)).sum() for n, t in enumerate(terms)]).sum().float()


def tensors(length: int) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    differentiable = [torch.randn(10, 4), torch.randn(10), torch.randn(10, 2, 3), torch.randn(10, 5, dtype=torch.bfloat16), torch.randn(1, 4)]
    index = torch.randint(-9, 10, (length,))
    return (*(t.requires_grad_() for t in differentiable), index, torch.randint(10, (length, 3)))


@pytest.mark.parametrize("length", ["static", "dynamic"])
def test_gradients_are_eagers(length: str, tmp_path: Path) -> None:
    names = ["table", "line", "cube", "half", "added"]
    size = Dim("length", min=0, max=1000)
    shapes: Any = (*[None] * 5, {0: size}, {0: size}) if length == "dynamic" else None
    path = ab.export_grad(looked_up, tensors(24), wrt=names, dynamic_shapes=shapes, path=tmp_path / "rows.pt2")
    gradient = load(path).grad()
    for n in (24, 0, 1, 700) if shapes else (24,):
        arguments = tensors(n)
        precise = [a.detach().double().requires_grad_() for a in arguments[:5]]  # eager's kernel for bfloat16 rounds after each row that it adds
        expected = torch.autograd.grad(looked_up(*precise, *arguments[5:]), precise)
        ours = gradient(*arguments)[1]
        for name, exact in zip(names, expected, strict=True):
            tolerance = 1e-2 if name == "half" else 1e-5
            torch.testing.assert_close(ours[name].double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))
    package = load(path)
    libraries = [package._archive.library(name).read_bytes() for name in package.manifest.libraries]
    assert all(KERNEL in data and b"atomic_add" not in data for data in libraries)
    wrong = list(tensors(24))
    wrong[5] = torch.full_like(wrong[5], 10)
    with pytest.raises(ExecutionError, match="out of bounds" if torch_api.at_least("2.13") else "native code failed"):
        gradient(*wrong)
