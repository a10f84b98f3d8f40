"""Attention captured on the CPU with a GPU's kernels: the rewritten graphs give the CPU's results, with NVIDIA's
kernels written in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule, Interpreter

from aot_backward.capture import partition, program_module, trace
from aot_backward.capture.shapes import dynamic_shapes
from aot_backward_exporters.cuda import attention
from aot_backward_exporters.cuda.devices import DEVICES
from aot_backward_exporters.cuda.retarget import retarget

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
CPU, CPU_BACKWARD = attention.FORWARD, attention.BACKWARD


def flash(
    q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, debug: bool = False, *, scale: float
) -> Any:
    """Imitate ``mha_fwd`` (flash_api.cpp): the depth must be a multiple of 8 and rows dense; logarithms are (B, H,
    S)."""
    assert (
        dropout == 0
        and not debug
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )
    assert (
        {t.stride(-1) for t in (q, k, v)} == {1}
        and q.shape[1] % k.shape[1] == 0
        and (not causal or q.shape[2] == k.shape[2])
    )
    out, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, logs.contiguous(), None, None, q.shape[2], k.shape[2], None, None, None


def flash_backward(g: Any, q: Any, k: Any, v: Any, out: Any, logs: Any, *rest: Any, scale: float) -> Any:
    first, second, rows, columns, dropout, causal, seed, unused = rest
    assert first is second is None and (rows, columns) == (q.shape[2], k.shape[2]) and dropout == 0
    assert (
        logs.is_contiguous()
        and logs.dtype is torch.float32
        and logs.shape == q.shape[:3]
        and seed.dtype is unused.dtype is torch.uint64
    )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, logs, 0.0, causal, scale=scale)


def efficient(
    q: Any, k: Any, v: Any, bias: Any, logs: bool, dropout: float = 0.0, causal: bool = False, *, scale: float
) -> Any:
    """Imitate ``_efficient_attention_forward`` (attention.cu): logarithms for a multiple of 32 rows, with infinity
    after the last row."""
    fits(q, k, v, bias)
    assert logs and dropout == 0
    out, found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return by_rows(out), nn.functional.pad(found, (0, -found.shape[-1] % 32), value=math.inf).contiguous(), None, None


def efficient_backward(g: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, logs: Any, *rest: Any, scale: float) -> Any:
    seed, offset, dropout, wanted, causal = (*rest, False)[:5]
    fits(q, k, v, bias)
    rows = q.shape[2]
    assert (
        logs.shape[-1] % 32 == 0
        and logs.shape[-1] >= rows
        and logs.is_contiguous()
        and bool((logs[..., rows:] == math.inf).all())
    )
    assert (
        seed.shape == offset.shape == ()
        and seed.dtype is torch.int64
        and dropout == 0
        and wanted == [True, True, True, False]
    )
    scores = q.double() @ k.double().transpose(-2, -1) * scale + (0 if bias is None else bias.double())
    if causal:
        scores = scores.masked_fill(~torch.ones(rows, k.shape[2], dtype=torch.bool).tril(), -math.inf)
    weights = (scores - logs[..., :rows, None].double()).exp()  # with the forward's logarithms, not new ones
    of_weights = g.double() @ v.double().transpose(-2, -1)
    of_scores = weights * (of_weights - (g.double() * out.double()).sum(-1, keepdim=True)) * scale
    found = (of_scores @ k.double(), of_scores.transpose(-2, -1) @ q.double(), weights.transpose(-2, -1) @ g.double())
    return *(by_rows(f.to(q.dtype)) for f in found), None


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out results like the kernel: (B, S, H, D) in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def fits(q: Any, k: Any, v: Any, bias: Any) -> None:
    aligned = 4 if q.dtype is torch.float32 else 8
    assert (
        q.dtype is not torch.float64
        and q.shape[-1] % aligned == v.shape[-1] % aligned == 0
        and q.shape[1] == k.shape[1] == v.shape[1]
    )
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype is q.dtype and bias.stride(-1) == 1
        assert all(s % 8 == 0 for s in bias.stride()[:-1])


KERNELS: dict[Any, Callable[..., Any]] = {
    FLASH: flash, FLASH_BACKWARD: flash_backward, EFFICIENT: efficient, EFFICIENT_BACKWARD: efficient_backward
}  # fmt: skip


class Spelt(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return KERNELS.get(target, target)(*args, **kwargs)


class Attention(nn.Module):
    """Heads side by side in the last dimension, as in models."""

    def __init__(self, heads: int, few: int, causal: bool):
        super().__init__()
        self.heads, self.few, self.causal = heads, few, causal

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, self.heads), (k, self.few), (v, self.few)))
        gqa = self.few != self.heads
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(2)


def captured(program: nn.Module, args: tuple[Any, ...], shapes: Any) -> tuple[partition.Partitions, Any]:
    traced = trace.trace_program(
        program, args, {}, dynamic_shapes.normalized(shapes, program.forward, args, {}), signature=program.forward
    )
    return partition.split_module(traced, "net", {}, forward_only=False), traced.fake_mode


def targets(module: GraphModule) -> set[Any]:
    return {n.target for n in module.graph.nodes if n.op == "call_function"}


HALF = torch.bfloat16
CASES = {
    # dtype, depth, heads of queries and keys, queries, keys, causal, shape of the mask, the kernel
    "flash, causal": (HALF, 16, 2, 2, 5, 5, True, None, FLASH),
    "float16": (torch.float16, 8, 2, 2, 5, 7, False, None, FLASH),
    "a depth that flash attention is padded to": (HALF, 12, 2, 2, 5, 5, True, None, FLASH),
    "grouped queries": (HALF, 8, 4, 2, 5, 5, True, None, FLASH),
    "a causal mask from the top left": (HALF, 8, 2, 2, 5, 7, True, None, EFFICIENT),
    "float32": (torch.float32, 8, 2, 2, 37, 37, True, None, EFFICIENT),
    "float32, grouped queries": (torch.float32, 8, 4, 2, 37, 21, False, None, EFFICIENT),
    "a mask for all heads": (torch.float32, 8, 2, 2, 5, 7, False, (5, 7), EFFICIENT),
    "a mask for each batch": (HALF, 8, 2, 2, 5, 7, False, (3, 1, 1, 7), EFFICIENT),
    "a mask of one column": (torch.float32, 8, 2, 2, 5, 7, False, (3, 1, 5, 1), EFFICIENT),
    "a mask that is aligned": (torch.float32, 8, 2, 2, 5, 16, False, (3, 2, 5, 16), EFFICIENT),
    "a depth that no kernel has": (torch.float32, 6, 2, 2, 5, 7, False, None, None),
    "half precision, a mask and an odd depth": (HALF, 6, 2, 2, 5, 7, False, (5, 7), None),
    "float64, causal": (torch.float64, 6, 2, 2, 5, 5, True, None, None),
    "float64, grouped queries and a mask": (torch.float64, 8, 4, 2, 5, 7, False, (5, 7), None),
}


def example(name: str, rows: int, columns: int) -> list[torch.Tensor]:
    dtype, depth, heads, few, *_, masked, _ = CASES[name]
    made = [
        torch.randn(3, s, n * depth, dtype=dtype, requires_grad=True)
        for s, n in ((rows, heads), (columns, few), (columns, few))
    ]
    if masked is not None:
        shape = (*masked[:-2], rows if masked[-2] > 1 else 1, columns if masked[-1] > 1 else 1)
        mask = torch.randn(shape).where(torch.rand(shape) > 0.2, -math.inf).to(dtype)
        mask[..., 0] = 0  # every row has an unmasked key
        made.append(mask)
    return made


def dimensions(name: str) -> Any:
    *_, rows, columns, _, masked, _ = CASES[name]
    r, c = Dim("rows", min=2, max=64), Dim("columns", min=2, max=64)
    c = r if rows == columns else c
    of_mask = [{d: s for d, s in ((len(masked) - 2, r), (len(masked) - 1, c)) if masked[d] > 1}] if masked else []
    return ({1: r}, {1: c}, {1: c}, *of_mask)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_s_kernel_gives_what_the_cpu_s_does(name: str, dynamic: bool) -> None:
    dtype, _, heads, few, rows, columns, causal, _, kernel = CASES[name]
    torch.manual_seed(0)
    pieces, fake_mode = captured(
        Attention(heads, few, causal), tuple(example(name, rows, columns)), dimensions(name) if dynamic else None
    )
    forward, backward = pieces.graphs
    assert CPU in targets(forward.module) and CPU_BACKWARD in targets(backward.module)
    known = len(fake_mode.shape_env.guards)
    over = [retarget(graph, fake_mode, DEVICES["sm_90"], torch.device("cpu")) for graph in pieces.graphs]
    assert [str(g.expr) for g in fake_mode.shape_env.guards[known:]] == []
    wanted = ({kernel}, {{FLASH: FLASH_BACKWARD, EFFICIENT: EFFICIENT_BACKWARD}[kernel]}) if kernel else (set(), set())
    for graph, kernels in zip(over, wanted, strict=True):
        assert targets(graph.module) & {CPU, CPU_BACKWARD, *KERNELS} == kernels
    if dynamic:
        rows, columns = (33, 33) if rows == columns else (33, 42)
    inputs = [t.detach() for t in example(name, rows, columns)]
    given, expected = Spelt(over[0].module).run(*inputs), forward.module(*inputs)
    same(given, expected, dtype)
    cotangent = torch.randn_like(expected[0])

    def operands(results: Any) -> list[torch.Tensor]:
        """Return the backward's operands, from its own forward's results."""
        assert pieces.forward is not None and pieces.backward is not None and pieces.backward.call is not None
        held = {"input": inputs, "result": results, "cotangent": [cotangent]}
        held["saved"] = [held[kind][int(number)] for kind, number in (s.split(":") for s in pieces.forward.saved)]
        return [held[kind][int(number)] for kind, number in (o.split(":") for o in pieces.backward.call.operands)]

    same(Spelt(over[1].module).run(*operands(given)), backward.module(*operands(expected)), dtype)


def same(given: Any, wanted: Any, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 3e-2)
    for a, b in zip(given, wanted, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def test_forward_and_backward_in_one_graph() -> None:
    net = Attention(4, 2, True)
    q, k, v = (t.detach().requires_grad_() for t in example("float32, grouped queries", 37, 37))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return net(q, k, v).square().sum()

    traced = trace.trace_program(
        program_module.FunctionModule(loss), (q, k, v), {}, None, signature=loss, first_only=True
    )
    (graph,) = partition.split_grad(traced, "loss", {}, [("input", i) for i in range(3)]).graphs
    moved = retarget(graph, traced.fake_mode, DEVICES["sm_90"], torch.device("cpu"))
    assert targets(moved.module) & {CPU, CPU_BACKWARD, *KERNELS} == {EFFICIENT, EFFICIENT_BACKWARD}
    given = Spelt(moved.module).run(q.detach(), k.detach(), v.detach())
    loss(q, k, v).backward()
    for found, wanted in zip(given[1:], (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "depth", "kernel"),
    [("sm_90", 200, "flash"), ("sm_80", 200, "flash"), ("sm_89", 200, "efficient"), ("sm_89", 192, "flash"), ("sm_89", 256, "flash"),
     ("sm_90", 256, "flash"), ("sm_90", 264, "efficient"), ("sm_90", 260, "math")],
)  # fmt: skip
def test_limits_of_flash_attention(arch: str, depth: int, kernel: str) -> None:
    one = torch.empty(1, 1, 4, depth, dtype=HALF, device="meta")
    assert attention.kernel_for(one, one, one, None, False, (DEVICES[arch].major, DEVICES[arch].minor)) == kernel
