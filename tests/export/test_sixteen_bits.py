"""bfloat16 and float16: compiled code selects the same elements as eager, also for values at an edge
(pytorch#185517)."""

from __future__ import annotations

import functools
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import aot_backward as ab
from aot_backward.capture.trace_environment import decompositions
from aot_backward_exporters import torch_api
from aot_backward_exporters.inductor import lowering
from aot_backward_runtime import load

from ..support.exports import shared

DTYPES = [torch.bfloat16, torch.float16]

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: x + 0.3,
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y: x - y,
    "subtract from a number": lambda x, y: 0.7 - x,
    "mul": lambda x, y: x * y,
    "mul by a number": lambda x, y: x * 1.1,
    "mul by a 0-d tensor": lambda x, y: x * torch.tensor(1.1),
    "mul a 0-d tensor": lambda x, y: torch.tensor(0.3) * x,
    "where of a 0-d tensor": lambda x, y: torch.where(y > 0, torch.tensor(0.3), x * 1.1) * y,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "div by a number": lambda x, y: x / 1.7,
    "mul, then add": lambda x, y: x * 1.1 + 0.3,
    "reciprocal": lambda x, y: (x.abs() + 0.3).reciprocal(),
    "neg, abs": lambda x, y: (-x * 1.1).abs(),
    "square": lambda x, y: x.square(),
    "pow 2": lambda x, y: x**2,
    "pow 3": lambda x, y: x**3,
    "pow 1.3": lambda x, y: x.abs() ** 1.3,
    "sqrt": lambda x, y: x.abs().sqrt(),
    "exp": lambda x, y: torch.exp(x),
    "expm1": lambda x, y: torch.expm1(x),
    "log": lambda x, y: torch.log(x.abs()),
    "log1p": lambda x, y: torch.log1p(x.abs()),
    "sin": lambda x, y: torch.sin(x),
    "cos": lambda x, y: torch.cos(x),
    "erf": lambda x, y: torch.erf(x),
    "tanh": lambda x, y: torch.tanh(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "relu": lambda x, y: F.relu(x * 1.1),
    "relu6": lambda x, y: F.relu6(x * 1.1),
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.13),
    "elu": lambda x, y: F.elu(x, 0.7),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "mish": lambda x, y: F.mish(x),
    "softplus": lambda x, y: F.softplus(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "hardtanh": lambda x, y: F.hardtanh(x * 1.1, -0.7, 0.7),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "hardshrink": lambda x, y: F.hardshrink(x, 0.7),
    "threshold": lambda x, y: F.threshold(x, 0.3, 0.7),
    "clamp": lambda x, y: (x * 1.1).clamp(-0.7, 0.7),
    "maximum": lambda x, y: torch.maximum(x * 1.1, y),
    "where": lambda x, y: torch.where(x * 1.1 > 0.7, x * 1.3, y),
    "masked_fill": lambda x, y: (x * 1.1).masked_fill(y > 0, 0.7),
    "round to decimals": lambda x, y: torch.round(x * 1.1, decimals=1),
    "truncated quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "logit": lambda x, y: torch.logit(torch.sigmoid(x)),
    "fmod": lambda x, y: torch.fmod(x, 0.7),
    "remainder": lambda x, y: torch.remainder(x, 0.7),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.7),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.7),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign(), reduction="none"),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
}


class Selections(nn.Module):
    """Returns which results of each operator exceed a limit."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {name: operator(x, y) - 0.7 > -0.4 for name, operator in OPERATORS.items()}


def drawn(dtype: torch.dtype, seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def test_fifty_operators_then_a_selection_as_in_eager(tmp_path: Path) -> None:
    entries = {
        str(dtype)[6:]: ab.Module(Selections(), [ab.Variant(drawn(dtype, 0, 102_400), requires_grad=[])])
        for dtype in DTYPES
    }
    package = load(ab.export(tmp_path / "selections.pt2", entries, tune="none"))
    assert len(OPERATORS) >= 50
    for dtype in DTYPES:
        given = drawn(dtype, 1, 102_400)
        ours, eager = package.module(str(dtype)[6:])(*given), Selections()(*given)
        assert not [name for name in OPERATORS if not torch.equal(ours[name], eager[name])]


def at_edges(a: Tensor, b: Tensor, sign: Tensor) -> Tensor:
    """Return losses whose gradients are those of a comparison, a maximum, a clamp and a rounding."""
    losses = (
        F.margin_ranking_loss(a, b, sign, margin=0.7, reduction="sum"),
        F.hinge_embedding_loss(a - b, sign, margin=1.1, reduction="sum"),
        torch.tanh(a * 1.1 + 0.3).amax(-1).float().sum(),
        (a * 1.1 + 0.3).max(-1).values.float().sum(),
        F.hardshrink(b * 1.1 + 0.3, 0.7).float().sum(),
        torch.where(b * 1.1 > 0.7, b, 2 * a).float().sum(),
        (b * 1.1 + 0.3).clamp(-0.7, 0.7).float().sum(),
        (a - 0.7).relu().float().sum(),
        ((a * 1.1).round() * b).float().sum(),
        ((a * 1.1).to(torch.int32) * b).float().sum(),
        ((a.float() * 1.1).to(a.dtype).float() > 0.7).float().mul(b.float()).sum(),
    )
    return sum(loss.float() for loss in losses)


def edges(dtype: torch.dtype) -> Path:
    """Return the gradient of :func:`at_edges`, with a dynamic number of rows."""
    a, b = drawn(dtype, 0, 4, 64)
    rows = ({0: Dim("n", min=2)},) * 3
    return shared(
        f"edges-{dtype}",
        lambda path: ab.export_grad(
            at_edges, (a, b, b.sign()), wrt=["a", "b"], dynamic_shapes=rows, path=path, tune="none"
        ),
    )


def differing(path: Path, dtype: torch.dtype) -> int:
    """Return the number of gradients of :func:`at_edges` that differ from eager's, on values unknown to the export."""
    a, b = (t.requires_grad_() for t in drawn(dtype, 50, 256, 64))
    sign = drawn(dtype, 51, 256, 64)[0].sign()
    eager = torch.autograd.grad(at_edges(a, b, sign), [a, b])
    ours = load(path).grad()(a.detach(), b.detach(), sign)[1]
    return sum(int(((ours[n] - e).abs() > 0.05).sum()) for n, e in zip("ab", eager, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_values_at_an_edge(dtype: torch.dtype) -> None:
    assert differing(edges(dtype), dtype) == 0


def test_a_rebuilt_package_rounds_the_same_values(tmp_path: Path) -> None:
    for dtype in DTYPES:
        with zipfile.ZipFile(edges(dtype)) as archive:
            (graph,) = (json.loads(archive.read(name)) for name in archive.namelist() if "/graphs/" in name)
        assert 0 < len(graph["rounded"]) < len(graph["nodes"])
        ab.rebuild(edges(dtype), tmp_path / "rebuilt.pt2")
        assert differing(tmp_path / "rebuilt.pt2", dtype) == 0


class Kinks(nn.Module):
    """A layer under autocast, then kinks after operators that round. The gradient of ``shift`` counts the rows on one
    side of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(16, 64), nn.Parameter(torch.full((64,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.linear(x)
            return F.hardtanh((hidden * 1.1 + self.shift.to(hidden.dtype)).relu() * 2, -0.7, 0.7).float()


def summed(y: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(y * 1.1, target, reduction="sum")


def test_modules_under_autocast_and_steps_in_16_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, half = Kinks(), nn.Sequential(nn.Linear(16, 32), nn.Hardtanh(-0.3, 0.3)).bfloat16()
    x, narrow, target = torch.randn(4096, 16), torch.randn(128, 16).bfloat16(), torch.randn(128, 32).bfloat16()
    optimizer = torch.optim.SGD(half.parameters(), lr=2**-10)
    n = Dim("n", min=2)
    entries = {
        "net": ab.Module(net, [ab.Variant((x[:4],), dynamic_shapes=({0: n},))]),
        "step": ab.Step(
            half, [ab.Variant((narrow[:4], target[:4]), dynamic_shapes=({0: n},) * 2)], optimizer, loss_fn=summed
        ),
    }
    package = load(ab.export(tmp_path / "net.pt2", entries, tune="none"))
    loaded = package.module("net")
    for rows in x.split(128):  # bfloat16 counts to 256
        ours, eager = (torch.autograd.grad(m(rows).sum(), [m.shift])[0] for m in (loaded, net))
        assert torch.equal(ours, eager)
    step = package.step("step")
    step(narrow, target)
    summed(half(narrow), target).backward()
    optimizer.step()
    assert torch.equal(step.parameters["0.bias"], half[0].bias)


def test_expm1_of_small_numbers(tmp_path: Path) -> None:
    """Inductor computes exp(x) - 1, which is 0 for 1e-8."""

    def loss(x: Tensor) -> Tensor:
        return (torch.expm1(x) * 1e8).sum()

    x = torch.logspace(-12, 0, 64)
    package = load(ab.export_grad(loss, (x,), wrt="x", path=tmp_path / "expm1.pt2", tune="none"))
    assert package.grad()(x[:64] * 0 + 1e-8)[0] == loss(x * 0 + 1e-8)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.norm(F.gelu(self.first(x)))
            return F.cross_entropy(self.head(h + F.gelu(self.second(h))), y)


def test_a_step_under_autocast_where_eager_is_near_float64_by_chance(tmp_path: Path) -> None:
    """With this seed eager's third loss is 3e-5 from float64's, ours 2e-4. Both are rounded in bfloat16."""
    torch.manual_seed(3)
    model, batch = Mixed(), (torch.randn(64, 32), torch.randint(10, (64,)))
    path = ab.export_step(
        model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), path=tmp_path / "step.pt2", tune="none"
    )
    torch.testing.assert_close(load(path).step()(*batch), model(*batch).detach(), rtol=1e-2, atol=0)


def added(x: Tensor, source: Tensor, index: Tensor) -> list[Tensor]:
    return [
        x.index_add(0, index, source),
        x.t().index_add(1, index, source.t(), alpha=2.5),
        (x * 1).index_add_(0, index, source, alpha=-2),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_index_add(dtype: torch.dtype, tmp_path: Path) -> None:
    """As in a graph network under autocast. Eager rounds after each sum."""
    x, source, index = torch.randn(10, 8).to(dtype), torch.randn(300, 8).to(dtype), torch.randint(10, (300,))
    function = load(ab.export_function(added, (x, source, index), path=tmp_path / "added.pt2", tune="none")).function()
    exact = added(x.double(), source.double(), index)
    for ours, t in zip(function(x, source, index), exact, strict=True):
        allowed = 2 * torch.finfo(dtype).eps * float(t.norm())
        assert torch.equal(ours, t.to(dtype)) or float((ours - t).norm()) <= allowed
        assert ours.dtype == dtype


class Blocks(nn.Module):
    """Batch normalization between convolutions under autocast: 16-bit inputs, float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 24, 1, bias=False)
        self.second = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False)
        self.norm, self.last = nn.BatchNorm2d(24), nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.relu6(self.last(self.second(F.relu6(self.norm(self.first(x)))))).float().square().mean()


def test_statistics_of_normalizations_are_not_rounded(tmp_path: Path) -> None:
    """Eager saves them in float32. This network was refused: a gradient was off by 4 times what is allowed."""
    torch.manual_seed(0)
    net, x = Blocks(), torch.randn(4, 8, 16, 16)
    path = ab.export_grad(net, (x,), path=tmp_path / "grad.pt2", tune="none")  # compares with eager
    assert load(path).grad()(x)[0].isfinite()


def test_no_value_is_rounded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, lowered = list[str](), lowering._lowered

    def collected(*args: Any, **options: Any) -> Any:
        code = lowered(*args, **options)
        kernels.extend(f.read_text() for f in code.files if f.name.endswith(".kernel.cpp"))
        return code

    monkeypatch.setattr(lowering, "_lowered", collected)
    factor = random.Random().uniform(1, 2)  # another each time, so that the library is not in the cache
    x = torch.randn(64, 40).bfloat16().requires_grad_()
    ab.export_grad(
        lambda x: F.relu6((x * factor).sin() + x.amax(1, True)).float().sum(),
        (x,),
        path=tmp_path / "grad.pt2",
        tune="none",
    )
    assert kernels
    narrowed = 0
    for kernel in kernels:
        from_16_bits: set[str] = set()
        for name, call, argument in re.findall(r"auto (tmp\d+) = (\S*convert<.*?>)\((tmp\d+)\);", kernel):
            if re.search(r"convert<at::BFloat16", call):
                narrowed += 1
                assert argument not in from_16_bits
            else:
                from_16_bits.add(name)
    assert narrowed


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_a_padding_is_a_slice(memory_format: torch.memory_format) -> None:
    x = torch.randn(2, 3, 6, 5).to(memory_format=memory_format)
    for pad in ([0, -1, -2, 0], [-1, -1], [0, 1, -1, 0]):
        graph = torch_api.make_fx(
            functools.partial(torch.constant_pad_nd, pad=pad), decomposition_table=decompositions()
        )(x)
        assert ("constant_pad_nd" in graph.code) == (max(pad) > 0)
        expected, ours = torch.constant_pad_nd(x, pad), graph(x)
        assert torch.equal(ours, expected) and ours.stride() == expected.stride()
