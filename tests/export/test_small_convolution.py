"""Convolutions of little data, compiled as batched products: the kernel's numbers, gradients and strides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.sequence import rewrite
from aot_backward_exporters.rewrites.small_convolution import by_products
from aot_backward_runtime import load

from ..support import rewriting
from ..support.oracle import assert_same, run

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
RANDOM = torch.Generator().manual_seed(0)


def rewritten(function: Any, *arguments: Any) -> torch.fx.GraphModule:
    """Return the graph that Inductor gets for ``function`` after the pass."""
    graph = torch_api.make_fx(lambda *given: function(*given), tracing_mode="fake")(*arguments)
    return rewriting.rewritten(graph, by_products)


def kernels(graph: torch.fx.GraphModule) -> int:
    return sum(node.target in (FORWARD, BACKWARD) for node in graph.graph.nodes)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def same(actual: Any, expected: Any) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6 * max(1.0, float(theirs.abs().max())))
            assert ours.stride() == theirs.stride()


# sizes of the input and of the weight; stride, padding, dilation
SMALL: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, Any, Any]] = {
    "three by three": ((4, 3, 8, 8), (5, 3, 3, 3), [1, 1], [1, 1], [1, 1]),
    "unequal sides": ((2, 3, 7, 9), (4, 3, 3, 2), [1, 1], [0, 1], [1, 1]),
    "lists of one": ((2, 2, 6, 6), (3, 2, 3, 3), [1], [1], [1]),
    "dilated": ((2, 3, 9, 8), (4, 3, 3, 3), [1, 1], [2, 1], [2, 1]),
    "one axis": ((3, 4, 11), (5, 4, 5), [1], [2], [1]),
    "one channel": ((3, 1, 8, 7), (4, 1, 3, 3), [1, 1], [1, 1], [1, 1]),
    "to one channel": ((3, 2, 8, 7), (1, 2, 3, 3), [1, 1], [1, 1], [1, 1]),
    "one place": ((3, 2, 3, 4), (5, 2, 3, 4), [1, 1], [0, 0], [1, 1]),
    "one place, one channel": ((3, 1, 3, 3), (1, 1, 3, 3), [1, 1], [0, 0], [1, 1]),
    "many channels": ((2, 16, 5, 6), (8, 16, 3, 2), [1, 1], [1, 0], [1, 1]),
    "many channels along three axes": ((2, 9, 4, 5, 6), (4, 9, 2, 1, 3), [1, 1, 1], [0, 0, 2], [1, 1, 1]),
    "three axes": ((2, 2, 4, 5, 3), (3, 2, 2, 3, 1), [1, 1, 1], [1, 1, 0], [1, 1, 1]),
    "one window": ((2, 3, 4, 4), (5, 3, 4, 4), [1, 1], [0, 0], [1, 1]),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("case", SMALL)
def test_products_give_what_the_kernel_gives(case: str, bias: bool) -> None:
    shape, kernel, stride, padding, dilation = SMALL[case]
    x, weight, of_bias = drawn(*shape), drawn(*kernel), drawn(kernel[0]) if bias else None
    options = (stride, padding, dilation, False, [0] * (len(shape) - 2), 1)
    mask = [True, True, bias]

    def function(x: Tensor, weight: Tensor, grad: Tensor, of_bias: Tensor | None = None) -> tuple[Any, ...]:
        sizes = None if of_bias is None else [kernel[0]]
        return (FORWARD(x, weight, of_bias, *options), *BACKWARD(grad, x, weight, sizes, *options, mask))

    grad = torch.randn_like(FORWARD(x, weight, of_bias, *options))
    given = (x, weight, grad, *([of_bias] if bias else []))
    graph = rewritten(function, *given)
    assert kernels(graph) == 0
    batched = [node.args[0].meta["val"] for node in graph.graph.nodes if node.target is torch.ops.aten.bmm.default]
    # Inductor lowers a product by one row to a loop that is slower than the kernel
    assert all(rows.shape[1] > 1 for rows in batched)
    same(graph(*given), function(*given))


@pytest.mark.parametrize(
    "mask", [[False, True, True], [True, False, False], [False, True, False], [False, False, True]]
)
def test_gradients_that_are_asked_for(mask: list[bool]) -> None:
    given = (drawn(2, 4, 6, 6), drawn(2, 3, 6, 6), drawn(4, 3, 3, 3))

    def function(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
        return BACKWARD(grad, x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)  # type: ignore[no-any-return]

    graph = rewritten(function, *given)
    if kernels(graph) == 0:  # for the bias only, eager's kernel also gives the weight's gradient
        same(graph(*given), function(*given))
    assert kernels(graph) == int(mask == [False, False, True])


def test_strides_leave_the_gradient_of_the_input_to_the_kernel() -> None:
    x, weight = drawn(2, 3, 8, 8), drawn(4, 3, 3, 3)
    options = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    for mask, left in (([True, True, False], 1), ([False, True, False], 0)):

        def function(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Any, ...]:
            return (FORWARD(x, weight, None, *options), *BACKWARD(grad, x, weight, None, *options, mask))  # noqa: B023

        given = x, weight, drawn(2, 4, 4, 4)
        graph = rewritten(function, *given)
        assert kernels(graph) == left
        same(graph(*given), function(*given))


def _convolved(x: Tensor, weight: Tensor, **options: Any) -> Any:
    return functional.conv2d(x, weight, padding=1, **options)


OTHERS: dict[str, Any] = {
    "groups": (lambda x, w: _convolved(x, w, groups=2), drawn(2, 4, 6, 6), drawn(4, 2, 3, 3)),
    "transposed": (lambda x, w: functional.conv_transpose2d(x, w), drawn(2, 4, 6, 6), drawn(4, 2, 3, 3)),
    "channels last": (_convolved, drawn(2, 4, 6, 6).to(memory_format=torch.channels_last), drawn(4, 4, 3, 3)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_left_to_the_kernel(case: str) -> None:
    function, *given = OTHERS[case]
    assert kernels(rewritten(function, *given)) == 1


class Masked(nn.Module):
    """Its number of rows depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(self.conv(x[x[:, 0, 0, 0] > 0]), 2).square().sum()


def test_rows_that_depend_on_data_are_left_to_the_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Masked(), drawn(6, 3, 8, 8)
    gradients = load(ab.export_grad(net, (x,), path=tmp_path / "masked.pt2")).grad()(x)[1]
    for name, gradient in zip(gradients, torch.autograd.grad(net(x), list(net.parameters())), strict=True):
        torch.testing.assert_close(gradients[name], gradient)


class Net(nn.Module):
    """Two convolutions whose weights the backward reads, and one whose weight it does not read: nothing before it is
    trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2)
        self.along = nn.Conv1d(4, 3, 3, padding=2, dilation=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.along(self.second(functional.relu(self.first(x))).flatten(2)).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("trained", [False, True], ids=["input", "trained"])
def test_a_package(tmp_path: Path, trained: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    path = ab.export_module(
        net, (drawn(4, 2, 8, 9).requires_grad_(trained),), dynamic_shapes=({0: Dim("rows")},), path=tmp_path / "net.pt2"
    )
    for rows in (1, 4, 9):
        x = drawn(rows, 2, 8, 9).requires_grad_(trained)
        assert_same(run(load(path).module(), (x,), 1), run(net, (x,), 1))
    module = load(path).module()
    out = module(drawn(2, 2, 8, 9))
    with torch.no_grad():
        module.first.weight.mul_(2)  # type: ignore[union-attr,operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated")  # from torch.export
@pytest.mark.parametrize(
    ("rows", "most", "chooses", "left"), [(2, 18, 0, 0), (2, 19, 1, 0), (18, None, 1, 0), (19, None, 0, 1)]
)
def test_an_open_batch_is_settled_by_its_range_and_the_example_or_else_by_the_call(
    rows: int, most: int | None, chooses: int, left: int
) -> None:
    """16 channels of 10 by 10: 18 rows are little data, 19 are not."""
    dim = Dim("rows", max=most) if most else Dim("rows")
    program = torch.export.export(
        nn.Conv2d(16, 4, 3, padding=1), (drawn(rows, 16, 10, 10),), dynamic_shapes=({0: dim},)
    ).run_decompositions()
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    for _ in range(2):  # the branch for many rows does not change again
        rewrite(program.graph_module, values[0].fake_mode)
    branches = [child for child in program.graph_module.children() if isinstance(child, torch.fx.GraphModule)]
    assert (len(branches), kernels(program.graph_module)) == (2 * chooses, left)
    assert sorted(map(kernels, branches)) == [0, 1] * chooses


class Small(nn.Module):
    """Its forward is little data up to 49 rows, its gradients up to 33."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.max_pool2d(self.first(x).tanh(), 2)).square().mean(0)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    net = Small()
    x = drawn(4, 3, 14, 14).requires_grad_()
    return net, ab.export_module(
        net, (x,), dynamic_shapes=({0: Dim("rows")},), path=tmp_path_factory.mktemp("small") / "small.pt2"
    )


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end")  # torch 2.11
@pytest.mark.parametrize(("rows", "called"), [(1, 0), (4, 0), (300, 2)])
def test_a_call_chooses_by_its_rows(small: tuple[nn.Module, Path], rows: int, called: int) -> None:
    net, path = small
    x = drawn(rows, 3, 14, 14).requires_grad_()
    module = load(path).module()
    expected = run(net, (x,), 1)
    for _ in range(2):  # the first call could write to memory that the second reads
        assert_same(run(module, (x,), 1), expected)
    with torch.profiler.profile() as profile:
        module(x).sum().backward()
    assert sum(event.name == "aten::_convolution" for event in profile.events() or ()) == called
