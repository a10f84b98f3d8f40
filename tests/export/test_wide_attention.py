"""Attention in bfloat16 and float16, compiled as float32's kernel: dtypes, strides, and an error of at most eager's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.wide_attention import in_float32
from aot_backward_runtime import load

from ..support import rewriting
from .test_short_attention import BACKWARD, FORWARD, heads, masked

BF16, F16 = torch.bfloat16, torch.float16


def forward_and_backward(
    tensors: list[Tensor], causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, ...]:
    q, k, v, grad = tensors
    out, sums = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return (out, sums, *BACKWARD(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale))


def in_16_bits(graph: torch.fx.GraphModule) -> list[Any]:
    return [
        n.target
        for n in graph.graph.nodes
        if n.target in (FORWARD, BACKWARD) and n.args[1].meta["val"].dtype in (BF16, F16)
    ]


CASES: dict[str, tuple[tuple[int, int, int], bool, Tensor | None, float | None]] = {  # queries, keys, depth
    "all keys": ((40, 40, 64), False, None, None),
    "causal": ((40, 40, 64), True, None, 0.3),
    "more keys than queries": ((7, 90, 20), True, None, None),
    "a mask, and a query that sees no key": ((5, 7, 16), False, masked(), None),
    "a scale that is not positive": ((12, 12, 16), True, None, -1.0),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", CASES)
def test_float32_gives_what_the_kernel_gives(case: str, dtype: torch.dtype) -> None:
    (queries, keys, depth), causal, mask, scale = CASES[case]
    tensors = [heads(length, depth=depth, dtype=dtype) for length in (queries, keys, keys, queries)]
    mask = None if mask is None else mask.to(dtype)

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return forward_and_backward(list(given[:4]), causal, given[4] if len(given) > 4 else None, scale)

    arguments = [*tensors, *([] if mask is None else [mask])]
    graph = torch_api.make_fx(function, tracing_mode="fake")(*arguments)
    rewriting.rewritten(graph, in_float32)
    assert in_16_bits(graph) == ([FORWARD] if dtype is BF16 else [])
    expected, ours = function(*arguments), graph(*arguments)
    exact = forward_and_backward([t.double() for t in tensors], causal, None if mask is None else mask.double(), scale)
    for e, a, t in zip(expected, ours, exact, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (e.dtype, e.shape, e.stride())
        assert torch.equal(a.isfinite(), e.isfinite())
        error, eager_error = (float((x.double() - t)[e.isfinite()].norm()) for x in (a, e))
        assert error <= 1.1 * eager_error or math.isclose(error, 0, abs_tol=1e-6)


@pytest.mark.parametrize(("length", "depth", "gains"), [(128, 64, True), (129, 64, False)])
def test_a_long_backward_in_bfloat16_stays(length: int, depth: int, gains: bool) -> None:
    for dtype in (BF16, F16):
        q, k, v, grad = (heads(length, rows=1, count=1, depth=depth, dtype=dtype) for _ in range(4))
        out, sums = FORWARD(q, k, v)
        graph = torch_api.make_fx(lambda *given: BACKWARD(*given, 0.0, False), tracing_mode="fake")(
            grad, q, k, v, out, sums
        )
        rewriting.rewritten(graph, in_float32)
        assert in_16_bits(graph) == ([] if gains or dtype is F16 else [BACKWARD])


class Encoder(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.mixed, self.out, self.dtype = nn.Linear(32, 96), nn.Linear(32, 4), dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            rows, length, width = x.shape
            q, k, v = (t.view(rows, length, 2, width // 2).transpose(1, 2) for t in self.mixed(x).split(width, dim=2))
            mixed = (
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .reshape(rows, length, width)
            )
            return functional.cross_entropy(self.out(mixed).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_with_an_open_number_of_positions(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Encoder(dtype), torch.randn(3, 40, 32), torch.randint(4, (3, 40))
    positions = torch.export.Dim("positions", min=2, max=512)
    path = ab.export_grad(
        model, (x, y), dynamic_shapes=({1: positions}, {1: positions}), path=tmp_path / "grad.pt2", tune="none"
    )
    grad = load(path).grad()
    for length in (40, 3, 300):
        x, y = torch.randn(3, length, 32), torch.randint(4, (3, length))
        loss = model(x, y)
        expected = dict(
            zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
        )
        ours, gradients = grad(x, y)
        torch.testing.assert_close(ours, loss.detach(), rtol=2e-2, atol=0)
        for name, gradient in expected.items():
            assert gradients[name].dtype == gradient.dtype
            assert float((gradients[name] - gradient).norm()) <= 3e-2 * float(gradient.norm())
