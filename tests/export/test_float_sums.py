"""Sums of a dynamic number of floats are as exact as pairwise sums for any length, in every direction of vector
loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters.toolchain.cpp_source import kernel_source
from aot_backward_exporters.toolchain.float_sums import in_registers
from aot_backward_runtime import load


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return packages by number of columns. The gradient of ``weight`` adds up over the rows in whole vectors (16), in
    parts of one (5), and over all (0)."""
    folder, found = tmp_path_factory.mktemp("sums"), {}
    rows = {0: Dim("rows", min=2, max=1 << 26)}
    for columns in (16, 5, 0):
        example = torch.randn(40, columns or 1), torch.randn(columns or 1, requires_grad=True)
        path = folder / f"{columns}.pt2"
        found[columns] = load(
            ab.export_grad(weighed, example, wrt=["weight"], dynamic_shapes=(rows, None), path=path, tune="none")
        )
    return found


@pytest.mark.parametrize("columns", [16, 5, 0])
@pytest.mark.parametrize("rows", [2, 33, 1_023, 1_024, 1_025, 8_192, 12_289, 1_234_567])
def test_sums_are_as_exact_as_by_pairs(packages: dict[int, Any], columns: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.rand(rows, columns or 1, generator=generator) + 0.1
    weight = torch.ones(columns or 1, requires_grad=True)
    exact = x.double().sum(0)
    for count in (1, 2):
        torch.set_num_threads(count)
        value, gradients = packages[columns].grad()(x, weight)
        torch.testing.assert_close(gradients["weight"].double(), exact, rtol=2e-5, atol=0)
        torch.testing.assert_close(value.double(), exact.sum(), rtol=2e-5, atol=0)


def test_many_chunks(packages: dict[int, Any]) -> None:
    x = torch.full((40_000_003, 1), 0.1)
    value, gradients = packages[0].grad()(x, torch.ones(1, requires_grad=True))
    exact = x.double().sum()
    for sum_ in (value, gradients["weight"]):
        torch.testing.assert_close(sum_.double().reshape(()), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_what_is_not_finite_stays(packages: dict[int, Any], special: float) -> None:
    x = torch.rand(100_000, 5)
    x[70_001, 3] = special
    of = packages[5].grad()(x, torch.ones(5, requires_grad=True))[1]["weight"]
    torch.testing.assert_close(of, x.sum(0), equal_nan=True)


def test_what_is_written_in_the_place_of_inductors() -> None:
    loop = (
        "CascadeSumHelper<at::vec::Vectorized<float>, 4096> helper0(n);\nsum = cascade_sum_combine(tmp0, &helper0);\n"
        "sum = cascade_sum_final(&helper0);\n"
    )
    ours = in_registers(loop)
    assert "Cascade" not in ours and "cascade" not in ours
    assert ours.endswith(
        "aot_backward::Sum<at::vec::Vectorized<float>> helper0(n);\nsum = aot_backward::sum_combine(tmp0, &helper0);\n"
        "sum = aot_backward::sum_final(&helper0);\n"
    )
    other = "sum = sum + tmp0;\n"
    assert in_registers(other) == other and "aot_backward::" not in kernel_source(other)
