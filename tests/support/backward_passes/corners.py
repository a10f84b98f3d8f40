"""Corner cases: splits, failing hooks, modes within a pass, unused outputs."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .custom_functions import Halves
from .scenario import Seen, Step, backward_of, batch, clear, error, grads, leaf, logging_hook, named, scenario


@backward_of(lambda: leaf(6, 4))
def splits(i: int, w: Any) -> Any:
    n = [3, 7, 4][i]
    x = w.repeat(2, 1)[:n] * 1.5
    parts = [
        x.split(2)[0],
        x.chunk(2)[-1],
        x.split(n)[0],
        x.unbind(-1)[1],
        x.t().unbind(1)[2],
        x.unsafe_chunk(2)[0],
        x[:0].split(2)[0],
    ]
    parts += [x.split([1, n - 1])[1], x.tensor_split(3)[1], x.split(3, -1)[0]]
    return torch.stack([(t.sin() * (j + 1)).sum() for j, t in enumerate(parts)]).sum()


@backward_of(lambda: leaf(3))
def unpacking_that_fails(i: int, w: Any) -> Any:
    def unpack(packed: Any) -> Any:
        if i == 1:
            raise OSError("gone")
        return packed if i == 0 else 3

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = (w * torch.randn(3)).exp()
    return {"error": error(y.sum().backward)}


@scenario
def custom_zeros_of_every_kind() -> Step:
    """Undefined gradients, 0-d gradients and gradients of another dtype."""

    class Three(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
            return x.sum(), x * 2, x.double()

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return a + b + c.float()

    w = leaf(3)

    def step(i: int) -> Seen:
        clear(w)
        Three.apply(w * torch.randn(batch(i), 3))[i].sum().backward()
        return grads(w)

    return step


@backward_of(lambda: (leaf(3), leaf(3)))
def hook_that_replaces_nothing(i: int, w: Any, c: Any) -> Any:
    """An undefined gradient cannot be replaced."""
    x = w * c
    x.register_hook(lambda g: torch.ones(3))
    u, v = Halves.apply(x, c)
    return {"error": error((u + v).sum().backward)}


@scenario
def anomaly_in_a_custom_function() -> Step:
    class Spoils(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * float("nan")

    w = leaf(3)

    def step(i: int) -> Seen:
        clear(w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True):
                return {"error": error(Spoils.apply(w).sum().backward), **grads(w)}

    return step


@scenario
def modes_within_the_pass() -> Step:
    """Grad mode and autocast, as hooks and custom functions see them."""
    w, log = leaf(3), list[object]()

    def note(what: str) -> None:
        log.append(
            f"{what} {torch.is_grad_enabled()} {torch.is_autocast_enabled('cpu')} {threading.current_thread().name}"
        )

    class Looks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            note("custom")
            return g * 2

    w.register_post_accumulate_grad_hook(lambda p: note("accumulated"))

    def step(i: int) -> Seen:
        log.clear()
        clear(w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = Looks.apply(w * 2)
            y.register_hook(lambda g: note("hook"))
            y.grad_fn.register_hook(lambda gi, go: note("post"))
            y.sum().backward()
        return {**grads(w), "log": [*log]}

    return step


@scenario
def incoming_gradient_that_requires_one() -> Step:
    w = leaf(3)

    def step(i: int) -> Seen:
        g = leaf(3)
        (w * torch.randn(3)).backward(g)
        assert w.grad is not None
        return {**grads(w, g), "requires": w.grad.requires_grad}

    return step


@backward_of(lambda: leaf(4, 4, dtype=torch.float64))
def outputs_that_nobody_uses(i: int, w: Any) -> Any:
    _, r = torch.linalg.qr(w * (i + 1))
    _, s, _ = torch.linalg.svd(w, full_matrices=False)
    return r.sum() + s.sum()


@scenario
def nothing_in_reach() -> Step:
    """Eager calls the hooks of a sole root even if nothing follows it, but not the hooks of several roots."""
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        log: list[object] = []
        y, z = a * torch.randn(3), a.exp()
        for name, t in (("y", y), ("z", z)):
            t.register_hook(logging_hook(log, name))
        first = torch.autograd.grad(y.sum(), [b], allow_unused=True, retain_graph=True)
        second = torch.autograd.grad([y, z], [b], [torch.ones(3)] * 2, allow_unused=True, retain_graph=True)
        third = torch.autograd.grad(y, [b], torch.ones(3), allow_unused=True)
        return {**named((*first, *second, *third)), "log": log}

    return step
