"""Views and in-place updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .scenario import Seen, Step, backward_of, batch, clear, grads, leaf, logging_hook, scenario


@backward_of(lambda: (leaf(4, 3), leaf(3)))
def in_place_updates(i: int, w: Any, v: Any) -> Any:
    h = (torch.randn(batch(i), 4) @ w).relu_().clone()
    h.mul_(2).add_(v)
    torch.sigmoid_(h)
    return (h * h).sum()


@backward_of(lambda: (leaf(4, 4), leaf(2)))
def copy_slices(i: int, w: Any, v: Any) -> Any:
    h = torch.randn(batch(i), 4) @ w
    h[:, 1:3] = v.exp() * 2
    h[0, 0] = v.sum()
    part = h[1:, 2:]
    part.mul_(3)
    part.t().add_(1).pow_(2)
    return h.sin().sum()


@backward_of(lambda: (leaf(4, 4), leaf(4)))
def view_of_a_clone(i: int, w: Any, v: Any) -> Any:
    c = w.clone()
    c[1].copy_(v)
    c.view(-1)[3:6].zero_()
    c.diagonal().mul_(2)
    return (torch.randn(batch(i), 4) @ c).square().sum()


@backward_of(lambda: leaf(4, 4))
def update_with_hooks(i: int, w: Any) -> Any:
    log: list[object] = []
    h = w * torch.randn(4)
    h.register_hook(logging_hook(log, "before"))
    h[0].mul_(2)
    h.register_hook(logging_hook(log, "after", 2.0))
    view = h[1:]
    view.register_hook(logging_hook(log, "view"))
    (h.sum() + view.exp().sum()).backward()
    return {"log": log}


@backward_of(lambda: leaf(1, 3))
def expanded_parameter(i: int, w: Any) -> Any:
    v = w.expand(batch(i), 3)
    log: list[object] = []
    v.register_hook(logging_hook(log, "view"))
    (v * torch.randn(batch(i), 3)).sin().sum().backward()
    return {"log": log}


@backward_of(lambda: leaf(4, 6))
def views(i: int, w: Any) -> Any:
    n = batch(i)
    x = torch.randn(n, 4) @ w
    y = x.view(n, 2, 3).transpose(1, 2).reshape(n, 6).unflatten(1, (3, 2)).permute(2, 0, 1).flatten(1)
    z = (
        x.as_strided((n, 3), (6, 2)).unsqueeze(0).squeeze()
        + x.narrow(1, 1, 3).flip(1)
        + x.chunk(2, 1)[1]
        + x.unfold(1, 2, 2).sum(-1)
    )
    return y.sum() + z.exp().sum() + x.select(1, 2).sum() + x.movedim(0, 1).diagonal().sum()


@scenario
def transposed_leaf_gradient() -> Step:
    w = torch.randn(3, 4).t().requires_grad_()

    def step(i: int) -> Seen:
        if i != 1:
            clear(w)
        (torch.randn(batch(i), 4) @ w).exp().sum().backward()
        return grads(w)

    return step


@backward_of(lambda: leaf(3, dtype=torch.complex64))
def update_through_a_view_of_another_type(i: int, w: Any) -> Any:
    """The view cannot be recreated from sizes and strides."""
    h = w * torch.randn(batch(i), 3)
    torch.view_as_real(h).mul_(2)
    h.real.add_(1)
    return h.abs().square().sum()


@backward_of(lambda: nn.Linear(4, 3))
def jagged_tensors(i: int, net: Any) -> Any:
    rows = torch.nested.nested_tensor([torch.randn(n, 4) for n in (2, batch(i))], layout=torch.jagged)
    return net(rows).sin().values().sum()
