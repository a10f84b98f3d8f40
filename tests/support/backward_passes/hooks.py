"""Hooks on tensors, nodes, accumulators, modules and saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .custom_functions import Halves
from .scenario import Seen, Step, backward_of, batch, clear, error, grads, leaf, logging_hook, named, scenario, sums


@scenario
def tensor_hooks() -> Step:
    w, b = leaf(4, 3), leaf(3)
    log: list[object] = []
    w.register_hook(logging_hook(log, "w", 2.0))
    w.register_hook(logging_hook(log, "w again"))
    b.register_hook(logging_hook(log, "b"))

    def step(i: int) -> Seen:
        log.clear()
        clear(w, b)
        h = torch.randn(batch(i), 4) @ w
        h.register_hook(logging_hook(log, "h", 0.5))
        y = h.tanh() + b
        y.register_hook(logging_hook(log, "y"))
        y.register_hook(logging_hook(log, "y again", -1.0))
        y.square().sum().backward()
        return {**grads(w, b), "log": [*log]}

    return step


@scenario
def hook_changes_in_place() -> Step:
    w = leaf(3, 3)
    w.register_hook(lambda g: g.mul_(2).clamp(-1, 1))

    def step(i: int) -> Seen:
        clear(w)
        h = torch.randn(batch(i), 3) @ w

        def triple(g: Tensor) -> None:
            g.mul_(3)

        h.register_hook(triple)
        (h * 2).sin().sum().backward()
        return grads(w)

    return step


@backward_of(lambda: leaf(3, 3))
def retained_gradients(i: int, w: Any) -> Any:
    log: list[object] = []
    h = torch.randn(batch(i), 3) @ w
    h.retain_grad()
    h.register_hook(logging_hook(log, "h", 2.0))
    y = h.exp()
    y.register_hook(logging_hook(log, "y", 2.0))
    y.retain_grad()
    y.sum().backward()
    return {"h": h.grad, "y": y.grad, "log": log}


@backward_of(lambda: (leaf(3), leaf(3)))
def many_hooks_on_one_node(i: int, w: Any, v: Any) -> Any:
    log: list[object] = []
    y = w * torch.randn(batch(i), 3) * v
    z = y.sin()
    y.grad_fn.register_prehook(lambda gs: log.append(f"pre {sums(gs)}"))  # type: ignore[union-attr]
    y.register_hook(logging_hook(log, "tensor", 2.0))
    y.grad_fn.register_prehook(lambda gs: (gs[0] * 3,))  # type: ignore[union-attr]
    y.grad_fn.register_hook(lambda gi, go: (gi[0], gi[1] * 2))  # type: ignore[union-attr]
    y.retain_grad()
    y.register_hook(logging_hook(log, "tensor again"))
    y.grad_fn.register_hook(lambda gi, go: log.append(f"post {sums(gi)} {sums(go)}"))  # type: ignore[union-attr]
    (z + y * v).sum().backward()
    return {"y": y.grad, "log": log}


@backward_of(lambda: (leaf(3), leaf(3)))
def node_hooks(i: int, w: Any, v: Any) -> Any:
    log: list[object] = []
    h = w * torch.randn(batch(i), 3)
    y = h.unbind(0)[0] * v
    z = y.exp()
    for name, node in (("h", h.grad_fn), ("y", y.grad_fn), ("z", z.grad_fn)):
        assert node is not None
        node.register_prehook(lambda gs, n=name: log.append(f"pre {n} {sums(gs)}"))
        node.register_hook(lambda gi, go, n=name: log.append(f"post {n} {sums(gi)} {sums(go)}"))
    y.grad_fn.register_prehook(lambda gs: (gs[0] * 2,))
    z.grad_fn.register_hook(lambda gi, go: (gi[0] * 3,))
    z.sum().backward()
    return {"log": log}


@scenario
def hooks_of_accumulation_nodes() -> Step:
    w = leaf(3)
    node = w.expand_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    log: list[object] = []
    node.register_prehook(lambda gs: log.append(f"pre {sums(gs)}"))  # type: ignore[union-attr]
    node.register_hook(  # type: ignore[union-attr]
        lambda gi, go: log.append(f"post {sums(gi)} {sums(go)} {None if w.grad is None else sums([w.grad])}")
    )

    def step(i: int) -> Seen:
        log.clear()
        clear(w)
        (w * torch.randn(batch(i), 3)).sin().sum().backward()
        return {**grads(w), "log": [*log], "held": str(node.name())}  # type: ignore[union-attr]

    return step


@scenario
def post_accumulate_hooks() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    log: list[object] = []

    def update(name: str) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            assert p.grad is not None
            log.append(f"{name} {sums([p.grad])}")
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)
            p.grad = None

        return hook

    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(update(name))

    def step(i: int) -> Seen:
        log.clear()
        net(torch.randn(batch(i), 4)).square().sum().backward()
        return {**grads(net), **named([p.detach().clone() for p in net.parameters()]), "log": [*log]}

    return step


@backward_of(lambda: (leaf(3), leaf(3)))
def multi_grad_hooks(i: int, a: Any, b: Any) -> Any:
    log: list[object] = []
    h = a * torch.randn(batch(i), 3)
    z = b.exp()
    handles = [
        torch.autograd.graph.register_multi_grad_hook((h, b, z), lambda gs: log.append(f"all {sums(gs)}")),
        torch.autograd.graph.register_multi_grad_hook((h, b), lambda g: log.append(f"any {sums([g])}"), mode="any"),
    ]
    (h * b).sum().backward() if i == 1 else (h * b + z).sum().backward()
    for handle in handles:
        handle.remove()
    return {"log": log}


@scenario
def module_hooks() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    log: list[object] = []
    net[0].register_full_backward_hook(lambda m, gi, go: log.append(f"0 {sums(gi)} {sums(go)}"))
    net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    net[2].register_full_backward_pre_hook(lambda m, go: log.append(f"pre {sums(go)}"))
    net[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))

    def step(i: int) -> Seen:
        log.clear()
        clear(net)
        x = leaf(batch(i), 4)
        net(x).square().sum().backward()
        net(x * 2).sum().backward()
        return {**grads(net, x), "log": [*log]}

    return step


@backward_of(lambda: (leaf(4, 3), leaf(3)))
def saved_tensor_hooks(i: int, w: Any, b: Any) -> Any:
    log: list[object] = []

    def pack(t: Tensor) -> object:
        log.append(f"pack {[*t.shape]}")
        return ("packed", t.detach().clone())

    def unpack(packed: Any) -> Tensor:
        log.append(f"unpack {packed[0]} {[*packed[1].shape]}")
        return packed[1] * 1.5

    x = torch.randn(batch(i), 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = (x @ w).exp() * b
    y.sin().sum().backward()
    return {"log": log}


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
def saved_on_cpu(i: int, net: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = net(torch.randn(batch(i), 4)).square().sum()
    loss.backward(retain_graph=True)
    return loss


@scenario
def hooks_come_and_go() -> Step:
    w, log, handles = leaf(3), list[object](), list[Any]()

    def step(i: int) -> Seen:
        log.clear()
        clear(w)
        if i == 1:
            handles.append(w.register_hook(logging_hook(log, "w", 2.0)))
            handles.append(w.register_post_accumulate_grad_hook(lambda p: log.append("accumulated")))
        elif i == 2:
            for handle in handles:
                handle.remove()
        (w * torch.randn(2, 3)).sin().sum().backward()
        return {**grads(w), "log": [*log]}

    return step


@backward_of(lambda: leaf(3))
def one_hook_in_two_graphs(i: int, w: Any) -> Any:
    log: list[object] = []
    h = w * torch.randn(batch(i), 3)
    h.register_hook(logging_hook(log, "h", 2.0))
    first, second = h.sin().sum(), h.exp().sum()
    first.backward(retain_graph=True)
    second.backward()
    return {"log": log}


@backward_of(lambda: leaf(3))
def queued_callbacks(i: int, w: Any) -> Any:
    log: list[object] = []
    engine = torch.autograd.Variable._execution_engine

    def late() -> None:
        log.append(f"late {w.grad is not None}")
        engine.queue_callback(lambda: log.append("later"))

    h = w * torch.randn(batch(i), 3)
    h.register_hook(lambda g: engine.queue_callback(late))
    h.exp().sum().backward()
    log.append("after")
    return {"log": log}


@scenario
def hook_that_raises() -> Step:
    a, b, c = leaf(3), leaf(3), leaf(3)

    def fail(g: Tensor) -> None:
        raise ValueError("no more of this")

    def step(i: int) -> Seen:
        clear(a, b, c)
        h = (a * torch.randn(batch(i), 3)) * b
        k = h.sin()
        if i < 2:
            h.register_hook(fail)
        text = error((k * c).sum().backward)
        return {"error": text, **grads(a, b, c)}

    return step


@scenario
def custom_that_raises() -> Step:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if g.numel() == 6:
                raise KeyError("of a custom function")
            return g * 2

    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        y = Fails.apply(a * torch.randn(batch(i), 3)) * b
        return {"error": error(y.sum().backward), **grads(a, b)}

    return step


@scenario
def hooks_that_return_the_wrong_thing() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        texts = []
        for wrong in (lambda g: g.double(), lambda g: g[:1], lambda g: "text", lambda g: 1.0):
            clear(a)
            y = a * torch.randn(batch(i), 3)
            y.register_hook(wrong)
            texts.append(error(y.sum().backward))
        for wrong_post in (
            lambda gi, go: (gi[0].double(),),
            lambda gi, go: (),
            lambda gi, go: "text",
            lambda gi, go: (None,),
            lambda gi, go: gi[0] * 2,
        ):
            clear(a)
            y = a.exp()
            y.grad_fn.register_hook(wrong_post)  # type: ignore[union-attr]
            texts.append(error(y.sum().backward))
        for wrong_pre in (
            lambda gs: (gs[0][:1],),
            lambda gs: (),
            lambda gs: 3,
            lambda gs: (None,),
            lambda gs: gs[0] * 2,
        ):
            clear(a)
            y = a.exp()
            y.grad_fn.register_prehook(wrong_pre)  # type: ignore[union-attr]
            texts.append(error(y.sum().backward))
        return {**grads(a), "errors": texts}

    return step


@backward_of(lambda: (leaf(3), leaf(3), leaf(3)))
def hooks_of_gradients_that_are_not_there(i: int, a: Any, b: Any, c: Any) -> Any:
    log: list[object] = []
    x = a * c
    x.register_hook(lambda g: log.append(f"x {g is None}"))
    x.retain_grad()
    x.grad_fn.register_prehook(lambda gs: log.append(f"pre {sums(gs)}"))  # type: ignore[union-attr]
    x.grad_fn.register_hook(lambda gi, go: log.append(f"post {sums(gi)} {sums(go)}"))  # type: ignore[union-attr]
    u, v = Halves.apply(x, b * torch.ones(batch(i), 1))
    parts = v.unbind(1)
    parts[1].register_hook(lambda g: log.append(f"part {g is None}"))
    parts[0].register_hook(lambda g: log.append(f"used {g is None}"))
    (u.sum() + parts[0].exp().sum()).backward()
    return {"x": x.grad, "log": log}


@scenario
def hooks_of_what_is_asked_for() -> Step:
    a, b = leaf(3), leaf(3)
    log: list[object] = []
    a.register_hook(logging_hook(log, "a", 2.0))

    def step(i: int) -> Seen:
        log.clear()
        clear(a, b)
        h = a * torch.randn(batch(i), 3)
        h.register_hook(logging_hook(log, "h", 3.0))
        h.grad_fn.register_prehook(lambda gs: log.append(f"pre {sums(gs)}"))  # type: ignore[union-attr]
        k = h.sin() * b
        k.retain_grad()
        k.register_hook(logging_hook(log, "k", 5.0))
        y = k.exp().sum()
        y.register_hook(logging_hook(log, "y", 7.0))
        some = [
            *torch.autograd.grad(y, [h], retain_graph=True),
            *torch.autograd.grad(y, [k, h], retain_graph=True),
            *torch.autograd.grad(y, [a, h, k, y], retain_graph=True),
        ]
        y.backward(inputs=[h, b, a])
        return {**grads(a, b), **named(some), "h": h.grad, "k": k.grad, "log": [*log]}

    return step


@backward_of(lambda: leaf(3, 3))
def gradients_kept_by_hooks(i: int, w: Any) -> Any:
    """The gradient that a hook received does not change later."""
    held: list[Tensor] = []
    h = torch.randn(batch(i), 3) @ w
    w_hook = w.register_hook(held.append)
    y = h.view(-1)
    for t in (h, y):
        t.register_hook(held.append)
    (y.exp().sum() + h.sum()).backward()
    (w * 2).sum().backward()
    w_hook.remove()
    return {**named(held), "same": [t is w.grad for t in held]}
