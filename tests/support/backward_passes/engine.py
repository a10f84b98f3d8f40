"""Uses of the engine: roots, inputs, retained graphs, accumulation, loss scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .scenario import Seen, Step, backward_of, batch, clear, error, grads, leaf, logging_hook, named, scenario


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh()))
def mlp(i: int, net: Any) -> Any:
    x = leaf(batch(i), 4)
    return net(x).square().mean(), x


@scenario
def same_gradient_tensor_kept() -> Step:
    """Accumulation writes into the existing tensor, and other holders of it see the change."""
    w = leaf(3, 3)

    def step(i: int) -> Seen:
        held = w.grad
        (torch.randn(batch(i), 3) @ w).sum().backward()
        return {**grads(w), "same tensor": w.grad is held, "held": None if held is None else held.clone()}

    return step


@backward_of(lambda: (leaf(3), leaf(3)))
def inputs_non_leaf(i: int, a: Any, b: Any) -> Any:
    log: list[object] = []
    h = (a * torch.randn(batch(i), 3)).sin()
    h.retain_grad()
    h.register_hook(logging_hook(log, "h"))
    (h * b).sum().backward(inputs=[h, b])
    return {"h": h.grad, "log": log}


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3)))
def retained_graph(i: int, net: Any) -> Any:
    loss = net(torch.randn(batch(i), 4)).square().sum()
    loss.backward(retain_graph=True)
    first = {f"first {k}": v for k, v in grads(net).items()}
    loss.backward(retain_graph=True)
    loss.backward()
    return first


@backward_of(lambda: leaf(3))
def freed_graph(i: int, a: Any) -> Any:
    loss = (a * torch.randn(batch(i), 3)).exp().sum()
    loss.backward()
    return {"error": error(loss.backward)}


@backward_of(lambda: (leaf(3), leaf(3)))
def several_roots(i: int, a: Any, b: Any) -> Any:
    x = torch.randn(batch(i), 3)
    h = (a * x).tanh()
    torch.autograd.backward([h * b, h.sum(), b.exp()], [torch.randn(batch(i), 3), None, torch.randn(3)])


@backward_of(lambda: (leaf(3), leaf(3)))
def root_that_is_also_inside(i: int, a: Any, b: Any) -> Any:
    h = (a * torch.randn(batch(i), 3)).tanh()
    y = h * b
    torch.autograd.backward(
        [h, y, h, a], [torch.randn_like(h), torch.randn_like(h), torch.randn_like(h), torch.randn(3)]
    )


@backward_of(lambda: (leaf(3), leaf(3), leaf(2)))
def grad_of_unused(i: int, a: Any, b: Any, c: Any) -> Any:
    y = (a * b * torch.randn(batch(i), 3)).sum()
    first = torch.autograd.grad(y, [a, c, b], allow_unused=True, retain_graph=True)
    second = torch.autograd.grad(y, [c, a], materialize_grads=True, retain_graph=True)
    return {**named(first), **named(second, "materialized"), "error": error(lambda: torch.autograd.grad(y, [a, c]))}


@backward_of(lambda: (leaf(3), leaf(3)))
def grad_of_intermediate(i: int, a: Any, b: Any) -> Any:
    log: list[object] = []
    h = a * torch.randn(batch(i), 3)
    h.register_hook(logging_hook(log, "h", 2.0))
    y = h.sin() * b + h
    return {**named(torch.autograd.grad(y, [h, b, a, y], torch.randn(batch(i), 3))), "log": log}


@backward_of(lambda: leaf(3))
def root_itself_is_a_leaf(i: int, a: Any) -> Any:
    a.backward(torch.randn(3))


@backward_of(lambda: leaf(3))
def not_a_scalar(i: int, a: Any) -> Any:
    y = a * torch.randn(batch(i), 3)
    text = error(y.backward)
    wrong = error(lambda: y.backward(torch.ones(7)))
    y.backward(torch.randn(batch(i), 3))
    return {"error": text, "wrong": wrong}


@backward_of(lambda: (leaf(3, 3), leaf(3, 3)))
def incoming_gradient_of_odd_strides(i: int, a: Any, b: Any) -> Any:
    n = batch(i)
    x = torch.randn(n, 3)
    ones = torch.randn(1).expand(n, 3)
    across = torch.randn(3, n).t()
    torch.autograd.backward([x @ a, (x @ b) * 2, a + 0], [ones, across, torch.randn(3, 3).t()])


@scenario
def mixed_dtypes() -> Step:
    a, b, c = leaf(3), leaf(3, dtype=torch.float64), leaf(3, dtype=torch.bfloat16)

    def step(i: int) -> Seen:
        x = torch.randn(batch(i), 3)
        y = a * x + c * b
        (y.float() * c.float() + (a * c).double()).sum().backward()
        return grads(a, b, c)

    return step


@backward_of(lambda: (leaf(3), leaf(1, 3), leaf(4, 1, 1)))
def broadcasting(i: int, a: Any, b: Any, c: Any) -> Any:
    x = torch.randn(1, batch(i), 3)
    return (a * x + b / (c * c + 1) - a * c).pow(2).mean()


@backward_of(lambda: leaf(3))
def python_scalars(i: int, a: Any) -> Any:
    x = a * torch.randn(batch(i), 3)
    y = x * 2 + x / 3 + x**2 + (1.5 - x) + 2 / (x * x + 1) + torch.clamp(x, -0.5, 0.5) + x**3.5j.real + 1.5**x
    return (y.abs() * (1.0 + i)).sum()


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
def empty_batch(i: int, net: Any) -> Any:
    x = leaf([2, 0, 1][i], 4)
    return net(x).sum(), x


@backward_of(lambda: (leaf(3), leaf(3)))
def detached_branches(i: int, a: Any, b: Any) -> Any:
    h = (a * torch.randn(batch(i), 3)).exp()
    with torch.no_grad():
        scale = h.mean()
    return (h * h.detach() * b / scale).sum()


@backward_of(lambda: leaf(16))
def fan_in(i: int, a: Any) -> Any:
    """The gradients' order of arrival determines the rounding of their sum."""
    x = torch.randn(batch(i), 16)
    h = a * x
    parts = [h.sin() * 1e3, h.exp(), h * h, a * 1e-3, (h + a).tanh(), h.cos() * 1e5, a.sigmoid() * x]
    return (parts[3] + parts[0] * parts[1] + parts[6] + parts[2] * parts[4] + parts[5] + h + a).sum()


@backward_of(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
def residual_stack(i: int, layers: Any) -> Any:
    x = leaf(batch(i), 8)
    h = x
    for layer in layers:
        h = h + layer(functional.layer_norm(h, (8,))) + 0.1 * x
    return h.square().sum(), x


@scenario
def tied_weights() -> Step:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight

    def step(i: int) -> Seen:
        clear(embedding)
        tokens = torch.randint(0, 10, (batch(i), 3))
        functional.cross_entropy(head(embedding(tokens)).flatten(0, 1), tokens.flatten()).backward()
        return grads(embedding, head)

    return step
