"""Kinds of programs: each is traced faithfully, or refused with the name and place of the obstacle.

A few modules (:class:`Together`) hold the supported programs, so that each package is compiled once. Every kind has
separate parameters and inputs, and is compared with eager separately.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as mapped
from torch.ao import quantization
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_runtime import ExportError, load

from ..support import exports
from ..support.oracle import assert_same, tensors

# torch's warnings: complex numbers, recomputation, and forward mode of torch.func
pytestmark = pytest.mark.filterwarnings(
    "ignore:Torchinductor does not support code generation for complex",
    "ignore:`torch.jit.script` is deprecated",
    "ignore:.*use_reentrant",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # from Dynamo, which torch.cond and scan call
)
Forward = Callable[..., Any]


class Kind(nn.Module):
    """``forward(self, x)`` with a trainable matrix and vector."""

    def __init__(self, forward: Forward):
        super().__init__()
        self.w, self.b = nn.Parameter(0.5 * torch.randn(4, 4)), nn.Parameter(0.1 * torch.randn(4))
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class Together(nn.Module):
    def __init__(self, kinds: dict[str, nn.Module]):
        super().__init__()
        self.kinds = nn.ModuleDict(kinds)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: kind(inputs[name]) for name, kind in self.kinds.items()}


def observed(module: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return for each kind the outputs, buffers, and all gradients for random incoming ones."""
    inputs = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in inputs.items()}
    module.zero_grad()
    torch.manual_seed(3)
    value = module(inputs)
    differentiable = [t for t in tensors(value) if t.requires_grad]
    generator = torch.Generator().manual_seed(4)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in differentiable]
    torch.autograd.backward(differentiable, cotangents)
    out = {}
    for name in inputs:
        own = module.get_submodule(f"kinds.{name}")
        out[name] = {f"output[{i}]": t.detach().clone() for i, t in enumerate(tensors(value[name]))}
        out[name] |= {f"grad of {n}": p.grad for n, p in own.named_parameters(remove_duplicate=False)} | {
            "grad of x": inputs[name].grad
        }
        out[name] |= {f"buffer {n}": b.detach().clone() for n, b in own.named_buffers()}
    return out


class Halved(torch.autograd.Function):
    """A backward that is not the derivative, with a number as attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.sin() * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 0.5 * gradient * x.cos() * ctx.factor, None


class Pair(torch.autograd.Function):
    """``setup_context``, two outputs, possibly undefined gradients."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        assert first is not None and second is None
        return 3 * first * y, first * x


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 0.25 * gradient * ctx.saved_tensors[0].exp()


class Dirty(torch.autograd.Function):
    """Writes in place and marks its input dirty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 5 * gradient


class Straight(torch.autograd.Function):
    """A straight-through estimator that checks ``needs_input_grad``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (2 * gradient @ w.t() if ctx.needs_input_grad[0] else None), (
            3 * x.t() @ gradient if ctx.needs_input_grad[1] else None
        )


def hooked(register: Callable[[nn.Sequential], object]) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    register(net)
    return net


def on_a_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x @ self.w).tanh()
    h.register_hook(lambda g: 3 * g)
    return h * self.b


def on_a_node(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x @ self.w).tanh()
    h.grad_fn.register_hook(lambda inputs, outputs: tuple(2 * g for g in inputs))
    h.grad_fn.register_prehook(lambda outputs: tuple(5 * g for g in outputs))
    return h * self.b


def on_an_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda g: 3 * g)
    return x @ self.w


def twice(module: nn.Module, args: Any, output: Any) -> Any:
    return 2 * output


def written_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ self.w
    h[:, 1:3] *= self.b[1:3]
    h.sin_()
    h.t()[0].add_(1)
    return h


def recomputed(use_reentrant: bool) -> nn.Module:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x * 2, use_reentrant=use_reentrant)

    return Recomputed()


class Filtered(nn.Module):
    """Complex parameters and a filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.plane = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.randn(2)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        mixed = x.to(torch.complex64) @ self.mix
        turned = torch.view_as_complex(x.unflatten(-1, (2, 2))) * self.turn * torch.view_as_complex(self.plane)
        return [
            torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4),
            mixed,
            mixed.abs().square() + mixed.imag,
            torch.view_as_real(turned).flatten(1),
            torch.fft.fft2(mixed).real,
        ]


class Forces(nn.Module):
    """Energy and forces, with a loss on the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.requires_grad_()  # accepted, since x already requires a gradient
        energy = self.net(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -slope


class Adapted(nn.Module):
    """A loss after a step of gradient descent, differentiated through the step; and per-row gradients by ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = dict(self.net.named_parameters())
        slopes = torch.autograd.grad(self.net(x).square().mean(), list(parameters.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), slopes, strict=True)}

        def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.net, parameters, (row,)).sin().sum()

        each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        return torch.func.functional_call(self.net, moved, (x,)).square().mean(), each["weight"].square().sum((1, 2))


def penalised(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = (x @ self.w).tanh() @ self.b
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.norm(dim=1) - 1).square().mean()


def wave(self: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x @ self.w).sin()


def transformed(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return one result of each transform of ``torch.func``, and Hessian-vector products in both modes."""
    f, row, ones = wave(self), x[0], torch.ones_like(x)

    def total(x: torch.Tensor) -> torch.Tensor:
        return f(x).sum()

    return [
        torch.func.grad(total)(x),
        torch.func.vjp(f, x)[1](ones)[0],
        torch.func.jvp(f, (x,), (ones,))[1],
        torch.vmap(lambda r: (self.w @ r).sin() * r)(x),
        torch.func.jacrev(f)(row),
        torch.func.jacfwd(f)(row),
        torch.func.hessian(total)(row),
        torch.func.jvp(torch.func.grad(total), (x,), (ones,))[1],
        torch.autograd.functional.hvp(total, x, ones, create_graph=True)[1],
    ]


def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    """Return a module that gives outputs and last states for rows of two steps."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kind(4, 5, batch_first=True, **options)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(torch.stack([x, x.sin()], 1))

    return Recurrent()


class Causal(nn.Module):
    """Rows of two steps through a transformer layer, whose mask values PyTorch would read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.stack([x, x.sin()], 1), self.mask)


def windows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The backward of a parameter saves sliding windows, whose elements share memory."""
    return (x @ self.w).flatten().unfold(0, 4, 2) * self.b


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(4, 5), nn.GRUCell(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = z = x.new_zeros(x.shape[0], 5)
        for _ in range(2):
            h, c = self.lstm(x, (h, c))
            z = self.gru(h, z)
        return z


@torch.library.custom_op("aot_backward_tests::wave", mutates_args=())
def own_operator(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.sin() * factor


@own_operator.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _own_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return 0.5 * gradient * ctx.saved_tensors[0].cos() * ctx.factor, None


def _own_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


own_operator.register_autograd(_own_backward, setup_context=_own_context)


def decided_by_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x @ self.w).sin(), lambda x: (x @ self.w) * self.b, (x,))


def looped(self: Any, x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, (v @ self.w).tanh()), (torch.tensor(0), x))[1]


CONTROL: dict[str, Forward] = {
    "cond_here": decided_by_value,
    "cond_there": lambda self, x: decided_by_value(self, -x),
    "scan": lambda self, x: scan(lambda c, r: ((c @ self.w).tanh() + r, c * r), 0 * x[0] + self.b, x, dim=0),
    "associative_scan": lambda self, x: associative_scan(torch.mul, x @ self.w, dim=0, combine_mode="generic"),
    "map": lambda self, x: mapped(lambda row, w: (row @ w).sin(), x, self.w),
}


def quantized() -> nn.Module:
    """Return a fake quantization with an observed scale."""
    fake = quantization.FakeQuantize()
    fake(torch.linspace(-2, 3, 8))
    fake.disable_observer()
    return nn.Sequential(nn.Linear(4, 4), fake)


def learned_quantization() -> nn.Module:
    """Return a fake quantization with gradients of scale and zero point."""
    fake = _LearnableFakeQuantize(quantization.MovingAverageMinMaxObserver, scale=0.05, zero_point=3.0)
    fake.toggle_qparam_learning(True).toggle_fake_quant(True).toggle_observer_update(False)
    return nn.Sequential(nn.Linear(4, 4), fake)


GROUPS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "functions": {
        "halved": lambda: Kind(lambda self, x: Halved.apply(x @ self.w, 1.5)),
        "pair": lambda: Kind(lambda self, x: Pair.apply(x @ self.w, self.b.expand_as(x))[0]),
        "once": lambda: Kind(lambda self, x: Once.apply(x @ self.w)),
        "dirty": lambda: Kind(lambda self, x: Dirty.apply(x @ self.w)),
        "straight": lambda: Kind(lambda self, x: Straight.apply(x, self.w)),
        "operator": lambda: Kind(lambda self, x: own_operator(x @ self.w, 1.5)),
        "in_place": lambda: Kind(written_in_place),
        "rounded": lambda: Kind(
            lambda self, x: [(x * self.b).to(torch.bfloat16).float() * self.w[0], x * (x * self.b).half().float()]
        ),
        "views": lambda: Kind(lambda self, x: [(x @ self.w).t(), x[1:], (x * self.b)[:, 1]]),
        "recomputed": lambda: recomputed(use_reentrant=False),
        "recomputed_by_reentry": lambda: recomputed(use_reentrant=True),
        "filtered": Filtered,
    },
    "hooks": {
        "tensor": lambda: Kind(on_a_tensor),
        "node": lambda: Kind(on_a_node),
        "input": lambda: Kind(on_an_input),
        "output": lambda: hooked(lambda net: net[1].register_forward_hook(twice)),
        "output_of_the_whole": lambda: hooked(lambda net: net.register_forward_hook(twice)),
        "arguments": lambda: hooked(lambda net: net[1].register_forward_pre_hook(lambda m, args: (3 * args[0],))),
        "backward": lambda: hooked(
            lambda net: net[1].register_full_backward_hook(lambda m, inputs, outputs: (2 * inputs[0],))
        ),
        "backward_of_the_whole": lambda: hooked(
            lambda net: net.register_full_backward_hook(lambda m, inputs, outputs: (2 * inputs[0],))
        ),
        "backward_pre": lambda: hooked(
            lambda net: net[1].register_full_backward_pre_hook(lambda m, outputs: (2 * outputs[0],))
        ),
    },
    "transforms": {
        "forces": Forces,
        "adapted": Adapted,
        "penalised": lambda: Kind(penalised),
    },
    "static": {"transformed": lambda: Kind(transformed)},  # forward mode fixes every size
    "control": {name: lambda f=f: Kind(f) for name, f in CONTROL.items()},  # type: ignore[misc]
    "layers": {
        "gru": lambda: recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.3),
        "lstm": lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.3),
        "cells": Cells,
        "causal": Causal,
        "windows": lambda: Kind(windows),
        "cumulative": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
        "cumulative_3d": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2, 1, 1)), nn.BatchNorm3d(2, momentum=None), nn.Flatten(1)
        ),
        "quantized": quantized,
        "learned_quantization": learned_quantization,
        "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    },
}
# Inductor, g++ or the self-check refuses these before torch 2.13. Each would prevent the export of its whole group.
if not torch_api.at_least("2.13"):
    del GROUPS["functions"]["rounded"]  # a fused loop always omits a cast to 16 bits and back
    del GROUPS["functions"]["in_place"]  # torch 2.11: generated C++ blends a number as if it were a vector
    del GROUPS["functions"]["filtered"]  # torch 2.11: the gradient of a complex filter is wrong
    del GROUPS["control"]["scan"]  # a loop's body gets the wrong inputs
    del GROUPS["control"]["map"]
SIZES = 3, 5
STATIC = "static", "control"


def together(group: str) -> Together:
    torch.manual_seed(0)
    return Together({name: make() for name, make in GROUPS[group].items()})


def inputs(group: str, rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows)
    return {name: torch.randn(rows, 4, requires_grad=True) for name in GROUPS[group]}


@functools.cache
def compared(group: str) -> list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]]:
    """Return the results of the loaded module and of eager, at each size."""

    def make(path: Path) -> None:
        rows = {"inputs": {name: {0: Dim("rows", min=2, max=32)} for name in GROUPS[group]}}
        ab.export_module(
            together(group), (inputs(group, SIZES[0]),), dynamic_shapes=None if group in STATIC else rows, path=path
        )

    loaded, eager = load(exports.shared(f"kinds-{group}", make)).module(), together(group)
    return [
        (observed(loaded, inputs(group, n)), observed(eager, inputs(group, n)))
        for n in (SIZES[:1] if group in STATIC else SIZES)
    ]


@pytest.mark.parametrize(("group", "name"), [(g, n) for g, kinds in GROUPS.items() for n in kinds])
def test_equal_to_eager(group: str, name: str) -> None:
    for actual, expected in compared(group):
        assert_same(actual[name], expected[name])
        assert any(g is not None and bool(g.any()) for n, g in expected[name].items() if "grad" in n)


@pytest.mark.parametrize("group", ["control", "functions"])
def test_incoming_gradients_stay_as_they_are(group: str) -> None:
    """Native code may overwrite its own saved tensors, but no tensor of the caller."""
    compared(group)
    loaded = load(exports.shared(f"kinds-{group}", _made_before)).module()
    outputs = [t for t in pytree.tree_leaves(loaded(inputs(group, SIZES[0]))) if t.requires_grad]
    incoming = [torch.randn_like(t) for t in outputs]
    copies = [t.clone() for t in incoming]
    torch.autograd.grad(outputs, list(loaded.parameters()), incoming, allow_unused=True)
    torch.testing.assert_close(incoming, copies, rtol=0, atol=0)


def _made_before(path: Path) -> None:
    raise AssertionError(f"{path} was not made by the comparison with eager")


class Assigns(nn.Module):
    """``forward(self, x)`` on a module with a linear layer, a buffer, a plain tensor and a number."""

    def __init__(self, forward: Forward):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), forward
        self.register_buffer("seen", torch.zeros(()))
        self.scale, self.trained, self.calls = torch.ones(4), torch.ones(4, requires_grad=True), 0
        self.stats = [torch.zeros(4), torch.ones(4)]

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.linear(x))


def assigns_a_buffer(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.seen = self.seen + 1
    return h * self.seen


def changes_a_plain_tensor(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.scale += 1
    return h * self.scale


SHARED = {"mean": torch.zeros(4)}


def changes_a_global(self: Any, h: torch.Tensor) -> torch.Tensor:
    SHARED["mean"].lerp_(h.detach().mean(0), 0.1)
    return h - SHARED["mean"]


def with_a_closure() -> nn.Module:
    total = torch.zeros(())

    def counts_calls(self: Any, h: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += 1
        return h * total

    return Assigns(counts_calls)


def made_by(module: str) -> nn.Module:
    """Return a module with a scripted part, whose class claims to be from the Python module ``module``."""
    made = type("Made", (nn.Sequential,), {"__module__": module})()
    made.add_module("compiled", torch.jit.script(nn.Linear(4, 4)))
    return made


def sums_by_group(self: Any, h: torch.Tensor) -> torch.Tensor:
    index = h.argmax(1)
    groups = int(index.max()) + 1
    return torch.zeros(groups, 4).index_add(0, index, h)


def counts(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return h * self.calls


def decides(self: Any, h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        return h
    return 2 * h


def logs(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x @ self.w).tanh()
    h.register_hook(lambda g: seen.append(g.norm()))
    return h * self.b


def retains(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x @ self.w).tanh()
    h.retain_grad()
    return h * self.b


def clips_its_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.w.register_hook(lambda g: g.clamp(-1, 1))
    return x @ self.w


def keeps_half(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return (x @ self.w).tanh()


def goes_backward(self: Any, x: torch.Tensor) -> torch.Tensor:
    (x @ self.w).sum().backward()
    return x.grad * self.b


def asks_for_a_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    return torch.autograd.grad((x @ self.w).sin().sum(), x, create_graph=True)[0]


seen: list[torch.Tensor] = []
X = torch.ones(3, 4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a tensor hook that only looks": (
        lambda: Kind(logs),
        r"the backward hook logs\.<lambda> \(test_kinds\.py:\d+\), registered in logs \(test_kinds\.py:\d+: h\.register_hook.*expected a gradient",
    ),
    "a module hook that only looks": (
        lambda: hooked(lambda net: net[1].register_full_backward_hook(lambda m, i, o: seen.append(o[0]))),
        r"the backward hook \S+<lambda> \(test_kinds\.py:\d+\), on the module '1': expected a gradient to be returned, got None",
    ),
    "a module hook before that only looks": (
        lambda: hooked(lambda net: net.register_full_backward_pre_hook(lambda m, o: seen.append(o[0]))),
        r"the backward hook \S+<lambda> \(test_kinds\.py:\d+\), on the module itself: expected a gradient to be returned, got None",
    ),
    "a hook after accumulation": (
        lambda: hooked(lambda net: net[2].bias.register_post_accumulate_grad_hook(lambda p: None)),
        r"the parameter '2\.bias' has a post-accumulate-grad hook, \S+<lambda> \(test_kinds\.py:\d+\)",
    ),
    "a parameter hook in the forward": (
        lambda: Kind(clips_its_parameter),
        r"a hook is registered on the parameter 'w' in clips_its_parameter \(test_k",
    ),
    "saved tensors packed otherwise": (
        lambda: Kind(keeps_half),
        r"saved_tensors_hooks with keeps_half\.<lambda> .* are entered in keeps_half \(test_",
    ),
    "retain_grad": (
        lambda: Kind(retains),
        r"retain_grad\(\) is called in retains \(test_kinds\.py:\d+: h\.retain_grad\(\)\).*h = h \+ probe",
    ),
    "backward": (
        lambda: Kind(goes_backward),
        r"backward\(\) is called in goes_backward \(test_kinds\.py:\d+.*torch\.autograd\.grad instead",
    ),
    "requires_grad_ of an input": (
        lambda: Kind(asks_for_a_gradient),
        r"calls requires_grad_\(\) on its input 'x'.*x = x\.detach\(\)",
    ),
    "a buffer assigned anew": (
        lambda: Assigns(assigns_a_buffer),
        r"assigns a new tensor to the buffer 'seen', in assigns_a_buffer \(test_kinds\.py:\d+: self\.seen = self\.seen \+ 1\).*self\.seen\.copy_",
    ),
    "a plain tensor changed": (
        lambda: Assigns(changes_a_plain_tensor),
        r"the forward changes the attribute 'scale' in place, in changes_a_plain_t",
    ),
    "statistics in a list": (
        lambda: Assigns(lambda self, h: nn.functional.batch_norm(h, *self.stats, training=True)),
        r"the forward changes the attribute 'stats\[0\]' and the attribute 'stats\[1\]' in place, in <lambda> \(test_kinds.*register_buffer",
    ),
    "a tensor of a closure": (
        lambda: with_a_closure(),
        r"changes the closure's variable 'total' in place, in counts_calls \(test_kinds\.py:\d+: total \+= 1\)",
    ),
    "a global tensor": (
        lambda: Assigns(changes_a_global),
        r"the forward changes the global 'SHARED\[.mean.\]' in place, in changes_a_global \(test_",
    ),
    "a plain tensor that wants a gradient": (
        lambda: Assigns(lambda self, h: h * self.trained),
        r"uses the attribute 'trained', which requires a gradient",
    ),
    "a number changed": (
        lambda: Assigns(counts),
        r"output\[0\] is wrong: .*The forward changes 'calls', which a package does not store",
    ),
    "a decision by value": (
        lambda: Assigns(decides),
        r"in decides \(test_kinds\.py:\d+: if h\.sum\(\) > 0:\)\. It reads the value of a tensor.*torch\.where or torch\.cond",
    ),
    "a size of values": (
        lambda: Assigns(sums_by_group),
        r"in sums_by_group \(test_kinds\.py:\d+: groups = int\(index.*If this is a size, pass it as an argument, with one variant for each size",
    ),
    "a layer of PyTorch that decides": (
        lambda: nn.Sequential(nn.Linear(4, 4), torch.ao.quantization.MovingAverageMinMaxObserver()),
        r"; in forward of '1' \(MovingAverageMinMaxObserver\)\. It reads the value of a tensor",
    ),
    "a distribution that checks": (
        # Dynamo turns the default off
        lambda: Assigns(lambda self, h: torch.distributions.Normal(h, h.exp(), validate_args=True).rsample()),
        r"in <lambda> \(test_kinds\.py:\d+: .*\. torch\.distributions checks the range .*: pass validate_args=False",
    ),
    "numbers of Python's": (
        lambda: Kind(lambda self, x: x @ self.w if random.random() < 1 else x),
        r"the forward draws numbers with Python's random, .*draw them with torch",
    ),
    "a size by value": (
        lambda: Assigns(lambda self, h: h[h[:, 0] > 0]),
        r"aten\.index\.Tensor returns a result with a size that depends on.*it is called in <lambda> \(test_kinds\.py:\d+: lambda: Assigns",
    ),
    "a size read from values": (
        lambda: Assigns(lambda self, h: h.new_zeros(h.argmax(1).max().item() + 1, 4).index_add(0, h.argmax(1), h)),
        r"aten\._local_scalar_dense\.default returns a result with a size that depends .*pass such a size as an argument; it is called in <lambda>",
    ),
    "a number by value": (
        lambda: Assigns(lambda self, h: h * h.sum().item()),
        r"aten\._local_scalar_dense\.default returns a number that depends on the val",
    ),
    "a loop": (
        lambda: Kind(looped),
        r"while_loop_stack_output returns a result with a size that depends on the values",
    ),
    "sparse gradients": (
        lambda: Looked(),
        r"gradient of table\.weight: expected a dense tensor .*, got layout torch\.sparse_coo.*Omit sparse=True",
    ),
    "TorchScript within": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))),
        r"the submodule '0' is TorchScript, .*: use the original nn\.Module, without torch\.jit\.script",
    ),
    "TorchScript made by e3nn": (
        lambda: made_by("e3nn.o3._linear"),
        r"the submodule 'compiled' is TorchScript, .*: e3nn made it .*e3nn\.set_optimization_defaults\(jit_script_fx=False\) before you build",
    ),
    "TorchScript in a model of mace": (
        lambda: nn.Sequential(made_by("mace.modules.models")),
        r"'0\.compiled' is TorchScript.*its configuration, with mace net = type\(net\)\(\*\*mace\.tools\.scripts_utils\.extract_config_mace_model",
    ),
    "TorchScript": (lambda: torch.jit.script(nn.Linear(4, 4)), r"the module is TorchScript"),
    "a lazy module": (lambda: nn.Sequential(nn.LazyLinear(4)), r"0\.weight has no shape yet: call the module once"),
    "a subclass of Tensor": (lambda: doubled_parameter(), r"w is a TwoTensor; a package takes plain tensors"),
    "a wrapper": (
        lambda: nn.Sequential(nn.DataParallel(nn.Linear(4, 4))),
        r"the submodule '0' is a DataParallel: export the module that it wraps",
    ),
}


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long()[:, 0])


def doubled_parameter() -> nn.Module:
    from torch.testing._internal.two_tensor import TwoTensor

    module = Kind(lambda self, x: x @ self.w)
    module.w = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_place(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    module = make()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with pytest.raises(ExportError, match=message):
        ab.export_module(module, (X.clone().requires_grad_("input" not in case),), path=tmp_path / "no.pt2")
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(dict(module.named_buffers()), buffers)


def test_a_size_that_torch_geometric_reads_from_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub package has that name. The message says which argument its functions take."""
    (tmp_path / "torch_geometric").mkdir()
    (tmp_path / "torch_geometric" / "__init__.py").write_text(
        "def pool(x, index):\n"
        "    dim_size = int(index.max()) + 1 if index.numel() > 0 else 0\n"
        "    return x.new_zeros(dim_size, 4).index_add(0, index, x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)  # so that it is restored: other tests skip without it
    del sys.modules["torch_geometric"]
    pool = importlib.import_module("torch_geometric").pool
    message = r"in pool \(__init__\.py:2: dim_size = .*pass it as an argument \(torch_geometric takes it as dim_size, in global pooling as size, "
    with pytest.raises(ExportError, match=message):
        ab.export_module(Assigns(lambda self, h: pool(h, torch.tensor([0, 0, 1]))), (X,), path=tmp_path / "no.pt2")


def test_a_hook_on_every_module_is_refused(tmp_path: Path) -> None:
    handle = nn.modules.module.register_module_forward_hook(twice)
    try:
        with pytest.raises(
            ExportError, match=r"the hook twice \(test_kinds\.py:\d+\) is registered globally, for all modules"
        ):
            ab.export_module(nn.Linear(4, 4), (X,), path=tmp_path / "no.pt2")
    finally:
        handle.remove()


def test_hooks_are_left_as_they_were(tmp_path: Path) -> None:
    net, called = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    net[1].register_full_backward_hook(lambda m, inputs, outputs: called.append(1))
    with pytest.raises(ExportError, match="expected a gradient to be returned, got None"):
        ab.export_module(net, (X,), path=tmp_path / "no.pt2")
    called.clear()
    net(X).sum().backward()
    assert called == [1]
    (h := X.clone().requires_grad_() * 2).register_hook(lambda g: None)
    h.retain_grad()
    h.sum().backward()
    assert h.grad is not None


def test_parameter_hooks_on_the_loaded_module() -> None:
    """The refusal recommends these hooks; they run as in eager."""
    loaded = load(exports.module("mlp", dynamic=False)).module()
    plain, hooked_once = [], []
    x = torch.randn(3, 8)
    loaded(x).sum().backward()
    plain = [p.grad.clone() for p in loaded.parameters()]
    loaded.zero_grad()
    first = next(loaded.parameters())
    first.register_hook(lambda g: 2 * g)
    first.register_post_accumulate_grad_hook(lambda p: hooked_once.append(p.grad.clone()))
    loaded(x).sum().backward()
    torch.testing.assert_close([p.grad for p in loaded.parameters()], [2 * plain[0], *plain[1:]])
    assert len(hooked_once) == 1 and torch.equal(hooked_once[0], first.grad)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_grad_mode_around_the_export(mode: Callable[[], Any], tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    with mode():
        if mode is torch.inference_mode:
            with pytest.raises(ExportError, match=r"torch\.inference_mode\(\) is enabled.*Export outside of it"):
                ab.export_module(net, (X,), path=tmp_path / "net.pt2")
            return
        ab.export_module(net, (X,), path=tmp_path / "net.pt2")
    loaded = load(tmp_path / "net.pt2").module()
    loaded(X).sum().backward()
    net(X).sum().backward()
    torch.testing.assert_close(loaded.weight.grad, net.weight.grad)


def test_a_loss_that_closes_over_tensors_instead_of_modules(tmp_path: Path) -> None:
    weight, layers, linear = nn.Parameter(torch.ones(4)), [nn.Linear(4, 4)], nn.Linear(4, 4)
    for loss, name in ((lambda x: (x * weight).sum(), "weight"), (lambda x: layers[0](x).sum(), "layers")):
        with pytest.raises(
            ExportError,
            match=rf"the function closes over '{name}', and its tensors require gradients.*Close over the module",
        ):
            ab.export_grad(loss, (X,), path=tmp_path / "no.pt2")
    with pytest.raises(ExportError, match=r"closes over 'GLOBAL'"):
        ab.export_grad(lambda x: (x * GLOBAL).sum(), (X,), path=tmp_path / "no.pt2")
    # an attribute that is called like the global
    ab.export_grad(
        lambda x: (linear(x) + getattr(linear, "GLOBAL", 0) + (linear.GLOBAL if x.dim() > 9 else 0)).sum(),
        (X,),
        path=tmp_path / "g.pt2",
    )


GLOBAL = nn.Parameter(torch.ones(4))
