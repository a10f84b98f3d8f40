"""Interpolation, and its gradient, which is sums along axes: eager's numbers, by sums of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward.capture.interpolation import axis_by_axis
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.axis_sums import by_rows
from aot_backward_exporters.rewrites.row_sums import by_scatter_add
from aot_backward_runtime import load

from ..support import rewriting

KERNEL = b"aoti_torch_cpu_scatter_reduce_two_out"
NAMES = ["line", "image", "last", "volume", "half", "table"]
aten = torch.ops.aten


def interpolated(
    line: Tensor, image: Tensor, last: Tensor, volume: Tensor, half: Tensor, table: Tensor, index: Tensor
) -> Tensor:
    """Interpolate in each way that has a gradient, up and down, with position-dependent gradients."""
    terms = [
        functional.interpolate(line, scale_factor=2.0, mode="linear"),
        functional.interpolate(image, scale_factor=(2.0, 1.5), mode="bilinear"),
        functional.interpolate(image, size=(3, 9), mode="bilinear", align_corners=True),
        functional.interpolate(image, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
        functional.interpolate(image, size=(7, 11), mode="nearest"),
        functional.interpolate(image, scale_factor=(2.0, 1.5), mode="bicubic"),
        functional.interpolate(image, size=(9, 4), mode="bicubic", align_corners=True),
        functional.interpolate(last, scale_factor=2.0, mode="bilinear"),
        functional.interpolate(volume, scale_factor=2.0, mode="trilinear"),
        functional.interpolate(half, scale_factor=2.0, mode="bilinear").float(),
        table[:, index],
        table.index_select(1, index.abs()),
        torch.zeros_like(table).index_add(1, index.abs(), table[:, : index.shape[0]]),
    ]
    return torch.stack([(t.double().pow(3) * (n + 1)).sum() for n, t in enumerate(terms)]).sum().float()


def tensors(batch: int) -> tuple[Tensor, ...]:
    torch.manual_seed(batch)
    image, last = torch.randn(batch, 4, 5, 6), torch.randn(batch, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    half = torch.randn(batch, 4, 5, 6, dtype=torch.bfloat16)
    made = [torch.randn(batch, 4, 7), image, last, torch.randn(batch, 3, 3, 4, 4), half, torch.randn(20, 10)]
    return (*(t.requires_grad_() for t in made), torch.randint(-9, 10, (7,)))


def test_gradients_of_interpolation_are_eagers(tmp_path: Path) -> None:
    path = tmp_path / "up.pt2"
    rows = {0: Dim("batch", min=1, max=64)}
    ab.export_grad(
        interpolated, tensors(3), dynamic_shapes=(rows, rows, rows, rows, rows, None, None), wrt=NAMES, path=path
    )
    assert KERNEL in path.read_bytes()
    gradient = load(path).grad()
    for batch in (3, 1, 8):
        arguments = tensors(batch)
        value = interpolated(*arguments)
        expected = torch.autograd.grad(value, arguments[:-1])
        ours, gradients = gradient(*arguments)
        torch.testing.assert_close(ours, value.detach(), rtol=1e-4, atol=1e-4)
        for name, exact in zip(NAMES, expected, strict=True):
            tolerance = 2e-2 if name == "half" else 1e-5
            torch.testing.assert_close(
                gradients[name], exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
            )
            assert gradients[name].stride() == exact.stride(), name


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("kind", ["line", "image", "volume", "channels last", "bfloat16", "bytes"])
def test_axis_by_axis_gives_what_all_axes_at_once_give(kind: str, align: bool) -> None:
    """The bits and the memory format are equal, also if a scale is given in addition to the size."""
    torch.manual_seed(0)
    line, image, volume, *_ = torch.randn(2, 3, 7), torch.randn(2, 3, 5, 6), torch.randn(2, 3, 3, 4, 5)
    given = {
        "line": line,
        "image": image,
        "volume": volume,
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "bfloat16": image.bfloat16(),
        "bytes": torch.randint(255, (2, 3, 5, 6), dtype=torch.uint8),
    }[kind]
    sizes, scales = [9, 4, 7][: given.ndim - 2], [1.5] * (given.ndim - 2)
    calls: list[tuple[str, list[Any]]] = [("_upsample_linear", [given, sizes, align, [None] * len(sizes)])]
    calls += [("_upsample_linear", [given, [int(1.5 * n) for n in given.shape[2:]], align, scales])]
    if len(sizes) == 2:
        calls += [
            ("upsample_bicubic2d_default", [given, sizes, align, *scales]) for scales in ((None, None), (1.8, 0.7))
        ]
    for name, arguments in calls:
        expected = getattr(torch_api.decompositions, name)(*arguments)
        with axis_by_axis():
            made = getattr(torch_api.decompositions, name)(*arguments)
        assert torch.equal(made, expected) and made.dtype == expected.dtype and made.stride() == expected.stride()


def test_a_scale_that_is_not_the_sizes_reads_nothing_past_the_end() -> None:
    image = torch.randn(2, 3, 5, 6)
    with axis_by_axis():
        made = torch_api.decompositions._upsample_linear(image, [12, 11], False, [1.5, 1.5])
    torch.testing.assert_close(made, aten.upsample_bilinear2d(image, [12, 11], False, 1.5, 1.5))


def traced(function: Any, *arguments: Tensor) -> torch.fx.GraphModule:
    graph = torch_api.make_fx(function, decomposition_table=torch_api.select_decomp_table(), tracing_mode="fake")(
        *arguments
    )
    return rewriting.rewritten(graph, by_rows, by_scatter_add)


def put(to: Tensor, values: Tensor, *indices: Tensor | None) -> Tensor:
    return aten.index_put(to, indices, values, True)


def second(to: Tensor, values: Tensor, index: Tensor) -> Tensor:
    return put(to, values, None, index)


def outer(to: Tensor, values: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return put(to, values, None, one, other)


I5, I6 = torch.randint(-4, 4, (5,)), torch.randint(-6, 6, (6,))
SUMS = {
    "second axis": (second, torch.randn(20, 8), torch.randn(20, 6), I6),
    "in the middle": (second, torch.randn(3, 8, 9), torch.randn(3, 6, 9), I6),
    "two axes": (outer, torch.zeros(9, 4, 6), torch.randn(9, 5, 6), I5[:, None], I6),
    "two axes, and one after them": (outer, torch.randn(2, 4, 6, 8), torch.randn(2, 5, 6, 8), I5[:, None], I6[None]),
    "the first two": (
        lambda to, v, a, b: put(to, v, a, b),
        torch.randn(4, 6, 9),
        torch.randn(5, 6, 9),
        I5[:, None],
        I6,
    ),
    "int32": (second, torch.randn(20, 8, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64), I6.int()),
    "no index": (second, torch.randn(20, 8), torch.randn(20, 0), I6[:0]),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums_along_axes_become_sums_of_rows(case: str) -> None:
    function, *arguments = SUMS[case]
    graph = traced(function, *arguments)
    targets = [node.target for node in graph.graph.nodes]
    assert aten.scatter_add.default in targets and aten.index_put.default not in targets
    expected = function(*arguments)
    torch.testing.assert_close(graph(*arguments), expected)
    assert graph(*arguments).stride() == expected.stride()


OTHERS = {
    "pairs": (outer, torch.zeros(9, 4, 6), torch.randn(9, 5), I5, I5),
    "broadcast values": (second, torch.zeros(20, 8), torch.randn(20, 1), I6),
    "strides": (second, torch.randn(8, 20).t(), torch.randn(20, 6), I6),
    "assigned": (
        lambda to, v, index: aten.index_put(to, [None, index], v),
        torch.zeros(20, 8),
        torch.randn(20, 6),
        torch.arange(6),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_sums_are_left_to_inductor(case: str) -> None:
    function, *arguments = OTHERS[case]
    graph = traced(function, *arguments)
    assert aten.index_put.default in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(graph(*arguments), function(*arguments))
