"""Special cases of the engine: double backward, batched gradients, threads, nested passes, compiled forwards."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .scenario import Seen, Step, backward_of, batch, clear, error, grads, leaf, logging_hook, named, scenario


@scenario
def double_backward() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 4)
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (g.square().sum() + net(x).mean()).backward()
        return {"g": g.detach(), **grads(net, x)}

    return step


@backward_of(lambda: leaf(3))
def batched_gradients(i: int, w: Any) -> Any:
    y = (w * torch.randn(batch(i), 3)).sin().sum(0)
    return named(torch.autograd.grad(y, w, torch.eye(3), is_grads_batched=True))


@backward_of(lambda: (leaf(3), leaf(3)))
def anomaly_mode(i: int, w: Any, v: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            y = (w * torch.randn(batch(i), 3)).square()
            text = error((y * 0 if i == 1 else y).sqrt().mul(v if i != 1 else v * 0).sum().backward)
    return {"error": text}


@scenario
def two_threads() -> Step:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]

    def step(i: int) -> Seen:
        clear(*nets)
        losses = [net(torch.randn(batch(i), 4)).square().sum() for net in nets]
        ready = threading.Barrier(2)

        def work(loss: Tensor) -> None:
            ready.wait()
            for _ in range(3):
                loss.backward(retain_graph=True)

        threads = [threading.Thread(target=work, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return grads(*nets)

    return step


class Nested(Function):
    """Runs backward passes within its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.inner = w
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (gx,) = torch.autograd.grad((y * w.detach()).sin().sum(), y)
            torch.autograd.backward((x.detach() * ctx.inner).cos(), g)
        return gx * g, None


@backward_of(lambda: (leaf(3), leaf(3)))
def backward_in_a_backward(i: int, a: Any, w: Any) -> Any:
    y = Nested.apply(a * torch.randn(batch(i), 3), w)
    return y.exp().sum()


@backward_of(lambda: (leaf(3), leaf(3)))
def backward_in_a_hook(i: int, a: Any, w: Any) -> Any:
    log: list[object] = []

    def hook(g: Tensor) -> None:
        with torch.enable_grad():
            inner = (w * 2).exp()
            inner.register_hook(logging_hook(log, "inner"))
            inner.sum().backward()

    h = a * torch.randn(batch(i), 3)
    h.register_hook(hook)
    h.sin().sum().backward()
    return {"log": log}


@scenario
def compiled_forward_dynamic() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    compiled = torch.compile(net, backend="aot_eager", dynamic=True)

    def step(i: int) -> Seen:
        clear(net)
        x = leaf([2, 3, 5][i], 4)
        compiled(x).square().sum().backward()
        return grads(net, x)

    return step


@backward_of(lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
def unused_parameters(i: int, net: Any) -> Any:
    return net["a" if i != 1 else "b"](torch.randn(batch(i), 4)).sum()


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
def frozen_parameters(i: int, net: Any) -> Any:
    net[0].requires_grad_(i == 1)
    return net(torch.randn(batch(i), 4)).sum()


@scenario
def nothing_requires_a_gradient() -> Step:
    def step(i: int) -> Seen:
        x = torch.randn(3)
        return {"error": error(x.sum().backward), "grad": error(lambda: torch.autograd.grad(x.sum(), x))}

    return step


@backward_of(lambda: leaf(3))
def saved_tensor_changed_in_place(i: int, w: Any) -> Any:
    """Replay must refuse as eager does, with the same message."""
    h = w * torch.randn(batch(i), 3)
    y = h.sin()
    h.add_(1)
    text = error(y.sum().backward)
    k = w * torch.randn(batch(i), 3)
    k.sin().sum().backward()
    return {"error": text}


@backward_of(lambda: leaf(3))
def gradients_by_edge(i: int, a: Any) -> Any:
    h = (a * torch.randn(batch(i), 3)).sin()
    edge = torch.autograd.graph.get_gradient_edge(h)
    y = h.exp().sum()
    return named(torch.autograd.grad(y, [edge, torch.autograd.graph.get_gradient_edge(a)]))


@backward_of(lambda: nn.Linear(4, 3))
def no_grad_region_and_inference_input(i: int, net: Any) -> Any:
    with torch.inference_mode():
        x = torch.randn(batch(i), 4)
    return net(x.clone()).square().sum()
