"""A function of each row is computed once a row, in vectors of rows, wherever it is spread over columns."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import load

ROWS = Dim("rows", min=2, max=1000)


def envelope(r: Tensor, weight: Tensor) -> Tensor:
    """As in a force field: a cutoff function of each edge."""
    return ((torch.cos(r) + 1)[:, None] * weight).square().sum()


def expanded(r: Tensor, weight: Tensor) -> Tensor:
    return (torch.cos(r).view(-1, 1, 1).expand(-1, 4, 32).flatten(1) @ weight[0]).sum()


def looked_up(r: Tensor, weight: Tensor) -> Tensor:
    return (torch.cos(r)[torch.arange(4 * r.shape[0]) % r.shape[0]] * weight[0, 0]).square().sum()


def imported(package: Path, folder: Path) -> set[str]:
    """Return the names of the functions that the package's libraries import."""
    with zipfile.ZipFile(package) as archive:
        libraries = [archive.extract(name, folder) for name in archive.namelist() if name.endswith(".so")]
    listed = [
        subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
        for path in libraries
    ]
    return {line.split()[-1].partition("@")[0] for text in listed for line in text.splitlines()}


@pytest.mark.parametrize(
    ("program", "dtype"), [(envelope, torch.float32), (expanded, torch.float64), (looked_up, torch.float64)]
)
def test_functions_of_rows_are_computed_in_vectors(
    program: Callable[..., Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    examples = torch.rand(40, dtype=dtype), torch.randn(1, 128, dtype=dtype)
    path = ab.export_grad(
        program, examples, wrt=["r", "weight"], dynamic_shapes=({0: ROWS}, None), path=tmp_path / "f.pt2", tune="none"
    )
    for rows in (2, 3, 40, 1000):
        r, weight = torch.rand(rows, dtype=dtype) * 3, examples[1]
        value, gradients = load(path).grad()(r, weight)
        given = r.clone().requires_grad_(), weight.clone().requires_grad_()
        eager = program(*given)
        torch.testing.assert_close(value, eager.detach(), rtol=1e-5, atol=1e-5)
        for ours, expected in zip(gradients.values(), torch.autograd.grad(eager, given), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    names = imported(path, tmp_path)
    assert any(name.startswith("Sleef_cos") for name in names) and not names & {"cos", "cosf", "sincos", "sincosf"}
