"""Custom ``autograd.Function``s, and undefined gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .scenario import Seen, Step, backward_of, batch, clear, error, grads, leaf, scenario


class Halves(Function):
    """Drops the first gradient and doubles the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        return None, 2 * g * x + h


class Undefined(Function):
    """Logs which incoming gradients are undefined."""

    log: list[object]

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.k = k
        return x * k, x + k

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> tuple[Tensor | None, None]:
        Undefined.log.append(f"{g is None} {h is None}")
        return g * ctx.k if g is not None else None, None


@backward_of(lambda: (leaf(3), leaf(3), leaf(3)))
def custom_returns_none(i: int, a: Any, b: Any, c: Any) -> Any:
    u, v = Halves.apply(a * c, b * torch.ones(batch(i), 1))
    return u.sum() + v.exp().sum()


@backward_of(lambda: leaf(3))
def custom_undefined_gradients(i: int, a: Any) -> Any:
    Undefined.log = []
    g, h = Undefined.apply(a * torch.ones(batch(i), 1), 2.5)
    ([g, h, g + h][i]).sum().backward()
    return {"log": Undefined.log}


class Everything(Function):
    """Saves inputs, outputs and numbers, takes non-tensor arguments, and marks outputs as non-differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, w: Tensor, name: str, flag: bool) -> tuple[Tensor, Tensor, str]:
        y = x.pow(power) * w
        ctx.save_for_backward(x, y, w, None)
        ctx.power, ctx.shape = power, x.shape
        order = y.argsort()
        ctx.mark_non_differentiable(order)
        return y, order, name

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any, __: Any) -> tuple[Any, ...]:
        x, _, w, nothing = ctx.saved_tensors
        assert nothing is None and ctx.shape == x.shape and ctx.needs_input_grad[0]
        gx = g * ctx.power * x.pow(ctx.power - 1) * w
        return gx, None, (g * x.pow(ctx.power)).sum(0) if ctx.needs_input_grad[2] else None, None, None


@backward_of(lambda: (leaf(3), leaf(3)))
def custom_everything(i: int, a: Any, w: Any) -> Any:
    w.requires_grad_(i != 1)
    y, _, _ = Everything.apply(a * torch.randn(batch(i), 3), 3, w, "name", True)
    return y.sum()


class NewStyle(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y.exp() * 2, g * x


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3.5


@backward_of(lambda: (leaf(3), leaf(3)))
def custom_other_styles(i: int, a: Any, b: Any) -> Any:
    h = NewStyle.apply(a * torch.randn(batch(i), 3), b)
    h = InPlace.apply(h.clone())
    return h.sin().sum()


@scenario
def custom_of_a_wrong_shape() -> Step:
    """Backward returns a gradient that must be summed, one of another dtype, and one that cannot fit."""

    class Odd(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
            ctx.kind = kind
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return [g.expand(4, *g.shape), g.double() * 2, g.new_ones(7)][ctx.kind], None

    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        texts = [error((Odd.apply(a, kind) * torch.randn(batch(i), 3) + b).sum().backward) for kind in range(3)]
        return {**grads(a, b), "errors": texts}

    return step


@scenario
def custom_of_wrong_count() -> Step:
    class Wrong(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
            ctx.kind = kind
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return [g, (g, None, None), (g, None, g), (g, g), ("text", None), [g, None]][ctx.kind]

    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        texts = [error(Wrong.apply(a * torch.randn(batch(i), 3), kind).sum().backward) for kind in range(6)]
        return {**grads(a), "errors": texts}

    return step
