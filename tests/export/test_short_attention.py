"""Attention between few positions, compiled as batched products: the kernel's numbers, gradients and strides."""

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
from aot_backward_exporters.rewrites.short_attention import by_products
from aot_backward_runtime import load

from ..support import rewriting

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(0)
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def heads(length: int, rows: int = 2, count: int = 3, depth: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return heads laid out as in a model: positions before heads in memory."""
    return torch.randn(rows, length, count, depth, generator=RANDOM).to(dtype).transpose(1, 2)


def masked() -> Tensor:
    """Return a mask: the third query sees no key, the fourth one key."""
    mask = torch.randn(2, 1, 5, 7, generator=RANDOM)
    mask[0, 0, 2] = -math.inf
    mask[0, 0, 3, 1:] = -math.inf
    return mask


def queries(length: int, keys: int | None = None, **options: Any) -> list[Tensor]:
    keys = length if keys is None else keys
    return [heads(length, **options), heads(keys, **options), heads(keys, **options), heads(length, **options)]


def forward_and_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, ...]:
    out, sums = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return (out, sums, *BACKWARD(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale))


def rewritten(function: Any, *arguments: Any) -> torch.fx.GraphModule:
    """Return the graph that Inductor gets for ``function`` after the pass."""
    graph = torch_api.make_fx(function, tracing_mode="fake")(*arguments)
    return rewriting.rewritten(graph, by_products)


def kernels(graph: torch.fx.GraphModule) -> int:
    return sum(node.target in (FORWARD, BACKWARD) for node in graph.graph.nodes)


SHORT: dict[str, tuple[list[Tensor], bool, Tensor | None, float | None]] = {
    "all keys": (queries(12), False, None, None),
    "causal": (queries(12), True, None, None),
    "another scale": (queries(5), True, None, 0.3),
    "more keys than queries": (queries(5, 7), True, None, None),
    "more queries than keys": (queries(7, 5), True, None, None),
    "a mask, and a query that sees no key": (queries(5, 7), False, masked(), None),
    "a mask of all rows": (queries(5, 7), False, masked()[1, 0], 2.0),
    "one of each": (queries(1, rows=1, count=1), False, None, None),
    "as long as may be": (queries(32, depth=20), True, None, None),
    "as long as may be with a mask": (queries(28, depth=8), False, torch.randn(28, 28, generator=RANDOM), None),
    "far apart": ([t * 5 for t in queries(6)], False, None, None),
}


@pytest.mark.parametrize("case", SHORT)
def test_products_give_what_the_kernel_gives(case: str) -> None:
    tensors, causal, mask, scale = SHORT[case]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return forward_and_backward(*given[:4], causal, *(given[4:] or (None,)), scale)  # type: ignore[arg-type]

    arguments = [*tensors, *([] if mask is None else [mask])]
    graph = rewritten(function, *arguments)
    assert kernels(graph) == 0
    expected, ours = function(*arguments), graph(*arguments)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5 * float(max(t.abs().max() for t in expected)))
    assert [t.stride() for t in ours] == [t.stride() for t in expected]


@pytest.mark.parametrize(
    ("length", "depth", "forward", "backward"), [(12, 8, True, True), (12, 64, True, False), (16, 16, False, False)]
)
def test_graphs_of_their_own(length: int, depth: int, forward: bool, backward: bool) -> None:
    q, k, v, grad = queries(length, depth=depth)
    out, sums = FORWARD(q, k, v, 0.0, True)
    ahead = rewritten(lambda q, k, v: FORWARD(q, k, v, 0.0, True), q, k, v)
    back = rewritten(lambda *given: BACKWARD(*given, 0.0, True), grad, q, k, v, out, sums)
    assert (kernels(ahead), kernels(back)) == (int(not forward), int(not backward))
    torch.testing.assert_close(ahead(q, k, v), (out, sums))
    torch.testing.assert_close(back(grad, q, k, v, out, sums), BACKWARD(grad, q, k, v, out, sums, 0.0, True))


def test_padding_masked_by_the_least_number() -> None:
    """If a query sees only padding, the kernel's backward weighs each key by 1. The gradients are the kernel's, not the
    softmax's."""
    tensors, mask = queries(5), torch.zeros(1, 1, 5, 5)
    mask[..., 2, :] = torch.finfo(torch.float32).min

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return forward_and_backward(*given[:4], False, given[4], None)

    graph = rewritten(function, *tensors, mask)
    assert kernels(graph) == 0
    torch.testing.assert_close(graph(*tensors, mask), function(*tensors, mask), rtol=2e-5, atol=2e-5)


def test_heads_that_share_keys_are_left_to_the_kernel() -> None:
    given = heads(8), heads(8, count=1), heads(8, count=1), heads(8)
    assert kernels(rewritten(lambda *given: forward_and_backward(*given, False, None, None), *given)) == 2  # type: ignore[call-arg]


def test_a_scale_that_is_not_positive_is_left_to_the_kernel() -> None:
    for scale in (0.0, -1.0):
        assert kernels(rewritten(lambda *given, s=scale: forward_and_backward(*given, True, None, s), *queries(8))) == 2  # type: ignore[misc]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v).square().mean()


def test_a_depth_that_is_open_stays_so(tmp_path: Path) -> None:
    depth = Dim("depth", min=2, max=64)
    example = tuple(torch.randn(2, 2, 8, 8, requires_grad=True) for _ in range(3))
    path = ab.export_grad(
        attended,
        example,
        wrt=["q", "k", "v"],
        dynamic_shapes=({3: depth},) * 3,
        path=tmp_path / "depth.pt2",
        tune="none",
    )
    given = tuple(torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(attended(*given), given)
    torch.testing.assert_close(tuple(load(path).grad()(*given)[1].values()), expected)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, 2, width // 2).transpose(1, 2) for t in self.mixed(x).split(width, dim=2))
        return self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(rows, length, width)
        )


def called_kernels(path: Path) -> int:
    package = load(path)
    return sum(
        b"flash_attention_for_cpu" in package._archive.library(name).read_bytes() for name in package.manifest.libraries
    )


@pytest.mark.parametrize("bound", [16, 4096])
def test_a_model_with_an_open_number_of_positions(bound: int, tmp_path: Path) -> None:
    """Up to 32 positions use products, whatever the example has. If there may be more, the kernel stays."""
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(3, 6, 16, requires_grad=True)
    rows, positions = Dim("rows", min=1, max=64), Dim("positions", min=2, max=bound)
    path = ab.export_module(
        model, (x,), dynamic_shapes=({0: rows, 1: positions},), path=tmp_path / "encoder.pt2", tune="none"
    )
    assert (called_kernels(path) == 0) == (bound == 16)
    loaded = load(path).module()
    for shape in ((3, 6, 16), (2, 2, 16), (5, 16, 16)):
        x = torch.randn(shape, requires_grad=True)
        expected, ours = model(x), loaded(x)
        torch.testing.assert_close(ours, expected)
        of_ours = torch.autograd.grad(ours.square().sum(), [x, *loaded.parameters()])
        torch.testing.assert_close(
            of_ours, torch.autograd.grad(expected.square().sum(), [x, *model.parameters()]), rtol=1e-4, atol=1e-4
        )


def test_a_training_step(tmp_path: Path) -> None:
    """Forward and backward are one graph, also with 32 positions."""
    torch.manual_seed(0)
    model, x, y = Encoder(), torch.randn(3, 32, 16), torch.randn(3, 32, 16)
    batch = Dim("batch", min=1, max=64)
    path = ab.export_step(
        model,
        (x, y),
        loss_fn=functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dynamic_shapes=({0: batch}, {0: batch}),
        path=tmp_path / "step.pt2",
        tune="none",
    )
    assert called_kernels(path) == 0
    step, optimizer = load(path).step(), torch.optim.SGD(model.parameters(), lr=0.1)
    for count in (3, 1, 7):
        x, y = torch.randn(count, 32, 16), torch.randn(count, 32, 16)
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x, y), loss.detach())
