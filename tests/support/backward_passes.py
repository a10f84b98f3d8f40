"""Backward passes of every kind that a script may run, each small: what recorded passes are compared on with eager.

A scenario makes fresh parameters and returns ``step(i)``, which runs forward and backward number ``i`` (most at another batch size for
``i == 2``) and returns what it saw: gradients (None where there is none), logs of hook calls, and the texts of errors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Seen = dict[str, object]
Step = Callable[[int], Seen]
SCENARIOS: dict[str, Callable[[], Step]] = {}


def scenario(make: Callable[[], Step]) -> Callable[[], Step]:
    """Registers ``make`` by its name, with the random numbers of the factory and of each step fixed."""

    def seeded() -> Step:
        torch.manual_seed(0)
        step = make()

        def run(i: int) -> Seen:
            torch.manual_seed(100 + i)
            seen = step(i)
            return {**seen, **{f"strides of {n}": strides(t) for n, t in seen.items() if isinstance(t, Tensor) and t.layout == torch.strided}}

        return run

    SCENARIOS[make.__name__] = seeded
    return make


def strides(tensor: Tensor) -> list[int]:
    """Those that an index is multiplied with: a gradient that the engine took over has the others of the kernel that made it, and a copy of it does
    not (a 1x1 convolution in channels_last: [4, 1, 4, 4] on one processor, [4, 1, 1, 1] on another)."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def batch(i: int) -> int:
    return 5 if i == 2 else 2


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def grads(*tensors: Tensor | nn.Module) -> Seen:
    """``.grad`` of each, copied, by position."""
    leaves = [p for t in tensors for p in (t.parameters() if isinstance(t, nn.Module) else [t])]
    return {f"grad {n}": None if p.grad is None else p.grad.clone() for n, p in enumerate(leaves)}


def clear(*tensors: Tensor | nn.Module) -> None:
    for t in tensors:
        if isinstance(t, nn.Module):
            t.zero_grad()
        else:
            t.grad = None


def named(values: Iterable[Tensor | None], name: str = "result") -> Seen:
    return {f"{name} {n}": v for n, v in enumerate(values)}


def error(call: Callable[[], object]) -> str:
    """The error of ``call``, in words."""
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def logging_hook(log: list[object], name: str, factor: float | None = None) -> Callable[[Tensor], Tensor | None]:
    def hook(grad: Tensor) -> Tensor | None:
        log.append(f"{name} {float(grad.detach().double().sum()):.17g}")
        return None if factor is None else grad * factor

    return hook


def sums(values: Sequence[Tensor | None]) -> list[tuple[float, list[int]] | None]:
    return [None if v is None else (float(v.detach().double().sum()), [*v.shape]) for v in values]


# -- what is asked of the engine


@scenario
def mlp() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 4)
        net(x).square().mean().backward()
        return grads(net, x)

    return step


@scenario
def accumulated_over_steps() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))

    def step(i: int) -> Seen:
        for _ in range(2):
            net(torch.randn(batch(i), 4)).sum().backward()
        return grads(net)

    return step


@scenario
def zeroed_in_place() -> Step:
    net = nn.Linear(4, 3)

    def step(i: int) -> Seen:
        net.zero_grad(set_to_none=False)
        net(torch.randn(batch(i), 4)).exp().sum().backward()
        return {**grads(net), "pointer": net.weight.grad is not None and net.weight.grad.data_ptr() % 4}

    return step


@scenario
def same_gradient_tensor_kept() -> Step:
    """Accumulation goes into the tensor that is there, and others who hold it see it."""
    w = leaf(3, 3)

    def step(i: int) -> Seen:
        held = w.grad
        (torch.randn(batch(i), 3) @ w).sum().backward()
        return {**grads(w), "same tensor": w.grad is held, "held": None if held is None else held.clone()}

    return step


@scenario
def inputs_leaf() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        (a * b * torch.randn(batch(i), 3)).sum().backward(inputs=[b])
        return grads(a, b)

    return step


@scenario
def inputs_non_leaf() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        log: list[object] = []
        h = (a * torch.randn(batch(i), 3)).sin()
        h.retain_grad()
        h.register_hook(logging_hook(log, "h"))
        (h * b).sum().backward(inputs=[h, b])
        return {**grads(a, b), "h": h.grad, "log": log}

    return step


@scenario
def retained_graph() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3))

    def step(i: int) -> Seen:
        clear(net)
        loss = net(torch.randn(batch(i), 4)).square().sum()
        loss.backward(retain_graph=True)
        first = {f"first {k}": v for k, v in grads(net).items()}
        loss.backward(retain_graph=True)
        loss.backward()
        return {**first, **grads(net)}

    return step


@scenario
def freed_graph() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        loss = (a * torch.randn(batch(i), 3)).exp().sum()
        loss.backward()
        return {"error": error(loss.backward), **grads(a)}

    return step


@scenario
def several_roots() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        x = torch.randn(batch(i), 3)
        h = (a * x).tanh()
        torch.autograd.backward([h * b, h.sum(), b.exp()], [torch.randn(batch(i), 3), None, torch.randn(3)])
        return grads(a, b)

    return step


@scenario
def root_that_is_also_inside() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        h = (a * torch.randn(batch(i), 3)).tanh()
        y = h * b
        torch.autograd.backward([h, y, h, a], [torch.randn_like(h), torch.randn_like(h), torch.randn_like(h), torch.randn(3)])
        return grads(a, b)

    return step


@scenario
def grad_of_unused() -> Step:
    a, b, c = leaf(3), leaf(3), leaf(2)

    def step(i: int) -> Seen:
        y = (a * b * torch.randn(batch(i), 3)).sum()
        first = torch.autograd.grad(y, [a, c, b], allow_unused=True, retain_graph=True)
        second = torch.autograd.grad(y, [c, a], materialize_grads=True, retain_graph=True)
        return {**named(first), **named(second, "materialized"), "error": error(lambda: torch.autograd.grad(y, [a, c])), **grads(a, b, c)}

    return step


@scenario
def grad_of_intermediate() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        log: list[object] = []
        h = a * torch.randn(batch(i), 3)
        h.register_hook(logging_hook(log, "h", 2.0))
        y = h.sin() * b + h
        return {**named(torch.autograd.grad(y, [h, b, a, y], torch.randn(batch(i), 3))), **grads(a, b), "log": log}

    return step


@scenario
def root_itself_is_a_leaf() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        a.backward(torch.randn(3))
        return grads(a)

    return step


@scenario
def not_a_scalar() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        y = a * torch.randn(batch(i), 3)
        text = error(y.backward)
        wrong = error(lambda: y.backward(torch.ones(7)))
        y.backward(torch.randn(batch(i), 3))
        return {"error": text, "wrong": wrong, **grads(a)}

    return step


@scenario
def incoming_gradient_of_odd_strides() -> Step:
    a, b = leaf(3, 3), leaf(3, 3)

    def step(i: int) -> Seen:
        clear(a, b)
        n = batch(i)
        x = torch.randn(n, 3)
        ones = torch.randn(1).expand(n, 3)
        across = torch.randn(3, n).t()
        torch.autograd.backward([x @ a, (x @ b) * 2, a + 0], [ones, across, torch.randn(3, 3).t()])
        return grads(a, b)

    return step


@scenario
def gradients_of_expanded_scalar() -> Step:
    a, b = leaf(2, 3), leaf(3)

    def step(i: int) -> Seen:
        x = torch.randn(batch(i), 2, 3)
        return named(torch.autograd.grad((a.sum() + b.sum() + x.sum() * a.mean()), [a, b]))

    return step


@scenario
def mixed_dtypes() -> Step:
    a, b, c = leaf(3), leaf(3, dtype=torch.float64), leaf(3, dtype=torch.bfloat16)

    def step(i: int) -> Seen:
        x = torch.randn(batch(i), 3)
        y = a * x + c * b
        (y.float() * c.float() + (a * c).double()).sum().backward()
        return grads(a, b, c)

    return step


@scenario
def broadcasting() -> Step:
    a, b, c = leaf(3), leaf(1, 3), leaf(4, 1, 1)

    def step(i: int) -> Seen:
        clear(a, b, c)
        x = torch.randn(1, batch(i), 3)
        (a * x + b / (c * c + 1) - a * c).pow(2).mean().backward()
        return grads(a, b, c)

    return step


@scenario
def python_scalars() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        x = a * torch.randn(batch(i), 3)
        y = x * 2 + x / 3 + x**2 + (1.5 - x) + 2 / (x * x + 1) + torch.clamp(x, -0.5, 0.5) + x**3.5j.real + 1.5**x
        (y.abs() * (1.0 + i)).sum().backward()
        return grads(a)

    return step


@scenario
def loss_scaling() -> Step:
    net = nn.Linear(4, 3)

    def step(i: int) -> Seen:
        clear(net)
        (net(torch.randn(batch(i), 4)).square().mean() * 65536.0 / (i + 1)).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad.mul_(1 / 65536.0)
        return grads(net)

    return step


@scenario
def empty_batch() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def step(i: int) -> Seen:
        clear(net)
        x = leaf([2, 0, 1][i], 4)
        net(x).sum().backward()
        return grads(net, x)

    return step


@scenario
def detached_branches() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        h = (a * torch.randn(batch(i), 3)).exp()
        with torch.no_grad():
            scale = h.mean()
        (h * h.detach() * b / scale).sum().backward()
        return grads(a, b)

    return step


@scenario
def fan_in() -> Step:
    """Sums of many gradients round by the order in which they arrive."""
    a = leaf(16)

    def step(i: int) -> Seen:
        clear(a)
        x = torch.randn(batch(i), 16)
        h = a * x
        parts = [h.sin() * 1e3, h.exp(), h * h, a * 1e-3, (h + a).tanh(), h.cos() * 1e5, a.sigmoid() * x]
        (parts[3] + parts[0] * parts[1] + parts[6] + parts[2] * parts[4] + parts[5] + h + a).sum().backward()
        return grads(a)

    return step


@scenario
def residual_stack() -> Step:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def step(i: int) -> Seen:
        clear(layers)
        x = leaf(batch(i), 8)
        h = x
        for layer in layers:
            h = h + layer(functional.layer_norm(h, (8,))) + 0.1 * x
        h.square().sum().backward()
        return grads(layers, x)

    return step


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


@scenario
def structure_that_changes() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        x = torch.randn(2, 3)
        y = (a * x).sin() if i == 1 else (a * x * b).sin()
        b.requires_grad_(i != 0)
        y.sum().backward()
        return grads(a, b)

    return step


# -- gradients that are not there


class Halves(Function):
    """The first gradient is dropped, the second doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        return None, 2 * g * x + h


class Undefined(Function):
    """Sees which gradients are not there."""

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


class Materialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[0] + 1

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g * 2 + torch.cat([h[None], torch.zeros_like(g[1:])])


@scenario
def custom_returns_none() -> Step:
    a, b, c = leaf(3), leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b, c)
        u, v = Halves.apply(a * c, b * torch.ones(batch(i), 1))
        (u.sum() + v.exp().sum()).backward()
        return grads(a, b, c)

    return step


@scenario
def custom_undefined_gradients() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        Undefined.log = []
        g, h = Undefined.apply(a * torch.ones(batch(i), 1), 2.5)
        ([g, h, g + h][i]).sum().backward()
        return {**grads(a), "log": Undefined.log}

    return step


@scenario
def custom_materialized_gradients() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        clear(a)
        g, h = Materialized.apply(a * torch.randn(batch(i), 3))
        ([g, h, g.exp()][i]).sum().backward()
        return grads(a)

    return step


class Everything(Function):
    """Saves inputs, outputs and numbers; takes arguments that are no tensors; says what is not differentiable."""

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


@scenario
def custom_everything() -> Step:
    a, w = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, w)
        w.requires_grad_(i != 1)
        y, _, _ = Everything.apply(a * torch.randn(batch(i), 3), 3, w, "name", True)
        y.sum().backward()
        return grads(a, w)

    return step


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


@scenario
def custom_other_styles() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
        h = NewStyle.apply(a * torch.randn(batch(i), 3), b)
        h = InPlace.apply(h.clone())
        h.sin().sum().backward()
        return grads(a, b)

    return step


@scenario
def custom_of_a_wrong_shape() -> Step:
    """A gradient that must be summed, one of another dtype, and one that cannot be made to fit."""

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


# -- hooks


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


@scenario
def retained_gradients() -> Step:
    w = leaf(3, 3)

    def step(i: int) -> Seen:
        clear(w)
        log: list[object] = []
        h = torch.randn(batch(i), 3) @ w
        h.retain_grad()
        h.register_hook(logging_hook(log, "h", 2.0))
        y = h.exp()
        y.register_hook(logging_hook(log, "y", 2.0))
        y.retain_grad()
        y.sum().backward()
        return {**grads(w), "h": h.grad, "y": y.grad, "log": log}

    return step


@scenario
def many_hooks_on_one_node() -> Step:
    w, v = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, v)
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
        return {**grads(w, v), "y": y.grad, "log": log}

    return step


@scenario
def node_hooks() -> Step:
    w, v = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, v)
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
        return {**grads(w, v), "log": log}

    return step


@scenario
def hooks_of_accumulation_nodes() -> Step:
    w = leaf(3)
    node = w.expand_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    log: list[object] = []
    node.register_prehook(lambda gs: log.append(f"pre {sums(gs)}"))  # type: ignore[union-attr]
    node.register_hook(lambda gi, go: log.append(f"post {sums(gi)} {sums(go)} {None if w.grad is None else sums([w.grad])}"))  # type: ignore[union-attr]

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


@scenario
def post_accumulate_hook_of_a_tied_leaf() -> Step:
    w = leaf(3, 3)
    log: list[object] = []
    w.register_post_accumulate_grad_hook(lambda p: log.append(sums([p.grad])))
    w.register_hook(logging_hook(log, "w"))

    def step(i: int) -> Seen:
        log.clear()
        ((torch.randn(batch(i), 3) @ w).relu() @ w.t()).sum().backward()
        return {**grads(w), "log": [*log]}

    return step


@scenario
def multi_grad_hooks() -> Step:
    a, b = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b)
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
        return {**grads(a, b), "log": log}

    return step


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


@scenario
def saved_tensor_hooks() -> Step:
    w, b = leaf(4, 3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, b)
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
        return {**grads(w, b), "log": log}

    return step


@scenario
def saved_on_cpu() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def step(i: int) -> Seen:
        clear(net)
        with torch.autograd.graph.save_on_cpu():
            loss = net(torch.randn(batch(i), 4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return grads(net)

    return step


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


@scenario
def one_hook_in_two_graphs() -> Step:
    w = leaf(3)

    def step(i: int) -> Seen:
        clear(w)
        log: list[object] = []
        h = w * torch.randn(batch(i), 3)
        h.register_hook(logging_hook(log, "h", 2.0))
        first, second = h.sin().sum(), h.exp().sum()
        first.backward(retain_graph=True)
        second.backward()
        return {**grads(w), "log": log}

    return step


@scenario
def hook_removed_in_the_pass() -> Step:
    w, v = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, v)
        log: list[object] = []
        h = w * torch.randn(batch(i), 3)
        handle = h.register_hook(logging_hook(log, "h", 2.0))
        y = h * v
        y.register_hook(lambda g: log.append("y"))
        (y.sum() * 2).backward()
        handle.remove()
        return {**grads(w, v), "log": log}

    return step


@scenario
def queued_callbacks() -> Step:
    w = leaf(3)

    def step(i: int) -> Seen:
        clear(w)
        log: list[object] = []
        engine = torch.autograd.Variable._execution_engine

        def late() -> None:
            log.append(f"late {w.grad is not None}")
            engine.queue_callback(lambda: log.append("later"))

        h = w * torch.randn(batch(i), 3)
        h.register_hook(lambda g: engine.queue_callback(late))
        h.exp().sum().backward()
        log.append("after")
        return {**grads(w), "log": log}

    return step


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
        for wrong_pre in (lambda gs: (gs[0][:1],), lambda gs: (), lambda gs: 3, lambda gs: (None,), lambda gs: gs[0] * 2):
            clear(a)
            y = a.exp()
            y.grad_fn.register_prehook(wrong_pre)  # type: ignore[union-attr]
            texts.append(error(y.sum().backward))
        return {**grads(a), "errors": texts}

    return step


@scenario
def hooks_of_gradients_that_are_not_there() -> Step:
    a, b, c = leaf(3), leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, b, c)
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
        return {**grads(a, b, c), "x": x.grad, "log": log}

    return step


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


@scenario
def gradients_kept_by_hooks() -> Step:
    """What a hook was given stays as it was."""
    w = leaf(3, 3)

    def step(i: int) -> Seen:
        clear(w)
        held: list[Tensor] = []
        h = torch.randn(batch(i), 3) @ w
        w_hook = w.register_hook(held.append)
        y = h.view(-1)
        for t in (h, y):
            t.register_hook(held.append)
        (y.exp().sum() + h.sum()).backward()
        (w * 2).sum().backward()
        w_hook.remove()
        return {**grads(w), **named(held), "same": [t is w.grad for t in held]}

    return step


# -- views and in-place updates


@scenario
def in_place_updates() -> Step:
    w, v = leaf(4, 3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, v)
        h = (torch.randn(batch(i), 4) @ w).relu_().clone()
        h.mul_(2).add_(v)
        torch.sigmoid_(h)
        (h * h).sum().backward()
        return grads(w, v)

    return step


@scenario
def copy_slices() -> Step:
    w, v = leaf(4, 4), leaf(2)

    def step(i: int) -> Seen:
        clear(w, v)
        h = torch.randn(batch(i), 4) @ w
        h[:, 1:3] = v.exp() * 2
        h[0, 0] = v.sum()
        part = h[1:, 2:]
        part.mul_(3)
        part.t().add_(1).pow_(2)
        h.sin().sum().backward()
        return grads(w, v)

    return step


@scenario
def view_of_a_clone() -> Step:
    w, v = leaf(4, 4), leaf(4)

    def step(i: int) -> Seen:
        clear(w, v)
        c = w.clone()
        c[1].copy_(v)
        c.view(-1)[3:6].zero_()
        c.diagonal().mul_(2)
        (torch.randn(batch(i), 4) @ c).square().sum().backward()
        return grads(w, v)

    return step


@scenario
def update_with_hooks() -> Step:
    w = leaf(4, 4)

    def step(i: int) -> Seen:
        clear(w)
        log: list[object] = []
        h = w * torch.randn(4)
        h.register_hook(logging_hook(log, "before"))
        h[0].mul_(2)
        h.register_hook(logging_hook(log, "after", 2.0))
        view = h[1:]
        view.register_hook(logging_hook(log, "view"))
        (h.sum() + view.exp().sum()).backward()
        return {**grads(w), "log": log}

    return step


@scenario
def buffer_filled_in_slices() -> Step:
    net = nn.Linear(4, 3)

    def step(i: int) -> Seen:
        clear(net)
        out = torch.zeros(batch(i), 3, 2)
        for k in range(2):
            out[:, :, k] = net(torch.randn(batch(i), 4))
        out.square().sum().backward()
        return grads(net)

    return step


@scenario
def expanded_parameter() -> Step:
    w = leaf(1, 3)

    def step(i: int) -> Seen:
        clear(w)
        v = w.expand(batch(i), 3)
        log: list[object] = []
        v.register_hook(logging_hook(log, "view"))
        (v * torch.randn(batch(i), 3)).sin().sum().backward()
        return {**grads(w), "log": log}

    return step


@scenario
def views() -> Step:
    w = leaf(4, 6)

    def step(i: int) -> Seen:
        clear(w)
        n = batch(i)
        x = torch.randn(n, 4) @ w
        y = x.view(n, 2, 3).transpose(1, 2).reshape(n, 6).unflatten(1, (3, 2)).permute(2, 0, 1).flatten(1)
        z = x.as_strided((n, 3), (6, 2)).unsqueeze(0).squeeze() + x.narrow(1, 1, 3).flip(1) + x.chunk(2, 1)[1] + x.unfold(1, 2, 2).sum(-1)
        (y.sum() + z.exp().sum() + x.select(1, 2).sum() + x.movedim(0, 1).diagonal().sum()).backward()
        return grads(w)

    return step


@scenario
def transposed_leaf_gradient() -> Step:
    w = torch.randn(3, 4).t().requires_grad_()

    def step(i: int) -> Seen:
        if i != 1:
            clear(w)
        (torch.randn(batch(i), 4) @ w).exp().sum().backward()
        return grads(w)

    return step


@scenario
def update_through_a_view_of_another_type() -> Step:
    """The view cannot be made again from sizes and strides."""
    w = leaf(3, dtype=torch.complex64)

    def step(i: int) -> Seen:
        clear(w)
        h = w * torch.randn(batch(i), 3)
        torch.view_as_real(h).mul_(2)
        h.real.add_(1)
        h.abs().square().sum().backward()
        return grads(w)

    return step


@scenario
def jagged_tensors() -> Step:
    net = nn.Linear(4, 3)

    def step(i: int) -> Seen:
        clear(net)
        rows = torch.nested.nested_tensor([torch.randn(n, 4) for n in (2, batch(i))], layout=torch.jagged)
        net(rows).sin().values().sum().backward()
        return grads(net)

    return step


# -- operators


@scenario
def indexing() -> Step:
    w = leaf(6, 4)

    def step(i: int) -> Seen:
        clear(w)
        n = batch(i)
        index = torch.randint(0, 6, (n,))
        g = torch.gather(w, 0, torch.randint(0, 6, (n, 4)))
        s = torch.zeros(7, 4).scatter_add(0, torch.randint(0, 7, (n, 4)), w[index])
        t = torch.zeros(7, 4).index_add(0, index, w.index_select(0, index)) + w.new_zeros(7, 4).scatter(0, torch.randint(0, 7, (n, 4)), g)
        u = torch.where(w > 0, w, w * 0.1).masked_fill(w > 1, 0.0).take(index)
        (g.sin().sum() + s.exp().sum() + t.square().sum() + u.sum() + w[index, 1:3].sum() + w[w > 0].sum() + w[..., None, -1].sum()).backward()
        return grads(w)

    return step


@scenario
def as_many_outputs_as_rows() -> Step:
    """Of ``unbind`` and ``split``: the engine's cache does not tell how many there are."""
    w = leaf(1, 4)

    def step(i: int) -> Seen:
        clear(w)
        x = w * torch.randn(2 * [3, 5, 2][i], 4)
        first, second = x.unbind(0)[:2]
        third, fourth = x.split(2)[:2]
        (first.exp() * second + third.sin().sum() * fourth.sum() + x.unbind(0)[1]).sum().backward()
        return grads(w)

    return step


@scenario
def cat_split_stack_pad() -> Step:
    w, v = leaf(4, 6), leaf(2, 6)

    def step(i: int) -> Seen:
        clear(w, v)
        x = torch.randn(batch(i), 6)
        a, b, c = torch.cat([w, v * 2, x, w[:1]], 0).split([2, 3, batch(i) + 2])
        s = torch.stack([a, a.exp(), w[:2]], 1)
        p = functional.pad(b, (1, 2), value=0.5) + functional.pad(b[None], (1, 2), mode="reflect")[0]
        (s.sum() + p.square().sum() + c.sin().sum() + torch.roll(w, 1, 0).repeat(2, 1).mul(0.1).sum() + w.unbind()[1].sum()).backward()
        return grads(w, v)

    return step


@scenario
def reductions_and_sorts() -> Step:
    w = leaf(4, 5)

    def step(i: int) -> Seen:
        clear(w)
        x = torch.randn(batch(i), 4) @ w
        y = x.max(1).values + x.min(1)[0] + x.sort(1).values[:, 1] + x.topk(2, 1).values.sum(1) + x.median(1).values + x.amax(1) + x.norm(dim=1)
        z = x.softmax(1).log_softmax(0).sum() + x.logsumexp(1).sum() + x.cumsum(1).prod(1).sum() + x.std(1).sum() + x.var() + x.cumprod(1).sum()
        (y.sum() + z + torch.einsum("ij,kj->ik", x, x).sum()).backward()
        return grads(w)

    return step


@scenario
def linear_algebra() -> Step:
    w = leaf(4, 4, dtype=torch.float64)

    def step(i: int) -> Seen:
        clear(w)
        a = w @ w.t() + 4 * torch.eye(4, dtype=torch.float64)
        x = torch.linalg.solve(a, torch.randn(4, batch(i), dtype=torch.float64))
        (x.sum() + torch.linalg.cholesky(a).sum() + torch.logdet(a) + torch.linalg.eigvalsh(a).prod() + a.inverse().trace()).backward()
        return grads(w)

    return step


@scenario
def complex_numbers() -> Step:
    w, v = leaf(4, dtype=torch.complex64), leaf(4)

    def step(i: int) -> Seen:
        clear(w, v)
        x = torch.randn(batch(i), 4, dtype=torch.complex64)
        y = (w * x + v).exp() * w.conj() + torch.fft.fft(v * w.real) + (2 - 1j) * w
        (y.abs().square().sum() + torch.view_as_real(w).sum() + y.imag.sum() + y.angle().sum()).backward()
        return grads(w, v)

    return step


@scenario
def sparse_embedding() -> Step:
    table, dense = nn.Embedding(10, 4, sparse=True), leaf(4)

    def step(i: int) -> Seen:
        if i != 1:
            clear(table, dense)
        x = table(torch.randint(0, 10, (batch(i), 3))) * dense
        (x.sum() + table(torch.randint(0, 10, (batch(i),))).exp().sum()).backward()
        return grads(table, dense)

    return step


@scenario
def sparse_and_dense_gradients() -> Step:
    table = nn.Embedding(10, 4, sparse=True)

    def step(i: int) -> Seen:
        x = table(torch.randint(0, 10, (batch(i), 3)))
        clear(table)
        (x.sum() + (table.weight * 2).exp().sum()).backward()
        return grads(table)

    return step


@scenario
def embedding_bags() -> Step:
    bags = nn.ModuleList(nn.EmbeddingBag(10, 4, mode=mode, padding_idx=pad) for mode, pad in (("sum", None), ("mean", 1), ("max", None)))
    renormed = nn.Embedding(10, 4, padding_idx=0, scale_grad_by_freq=True)

    def step(i: int) -> Seen:
        clear(bags, renormed)
        tokens = torch.randint(0, 10, (batch(i), 3))
        y = bags[0](tokens, per_sample_weights=torch.rand(batch(i), 3)) + bags[1](tokens) + bags[2](tokens) + renormed(tokens).sum(1)
        y.square().sum().backward()
        return grads(bags, renormed)

    return step


@scenario
def lstm() -> Step:
    net = nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True)

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 5, 4)
        y, (h, _) = net(x)
        (y.square().mean() + h.sum()).backward()
        return grads(net, x)

    return step


@scenario
def gru_and_packed_sequence() -> Step:
    net, cell = nn.GRU(4, 8, 2, dropout=0.1), nn.RNNCell(8, 8)

    def step(i: int) -> Seen:
        clear(net, cell)
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, batch(i), 4), [5] * (batch(i) - 1) + [3])
        y, h = net(packed)
        y, _ = nn.utils.rnn.pad_packed_sequence(y)
        (cell(h[0], h[1]).sum() + y.square().sum()).backward()
        return grads(net, cell)

    return step


@scenario
def convolutions() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1, groups=2), nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 4, 2, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 3, 10, 10)
        x = x if i < 2 else x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        up = functional.interpolate(x, scale_factor=0.5, mode="bilinear")
        (net(x).square().mean() + functional.avg_pool2d(up, 2).exp().sum()).backward()
        return {**grads(net, x), **named([b.clone() for b in net.buffers()])}

    return step


@scenario
def attention() -> Step:
    q, k, v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def step(i: int) -> Seen:
        clear(q, k, v)
        x = leaf(batch(i), 5, 8)
        heads = [f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (q, k, v)]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        z = functional.scaled_dot_product_attention(*heads, attn_mask=torch.randn(5, 5), dropout_p=0.1)
        (y.square().sum() + z.sum()).backward()
        return grads(q, k, v, x)

    return step


@scenario
def transformer_layer() -> Step:
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def step(i: int) -> Seen:
        clear(net)
        net(torch.randn(batch(i), 5, 8)).square().mean().backward()
        return grads(net)

    return step


@scenario
def dropouts() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(8, 8), nn.RReLU(), nn.Dropout1d(0.3))

    def step(i: int) -> Seen:
        clear(net)
        net(torch.randn(batch(i), 4)).square().sum().backward()
        return grads(net)

    return step


@scenario
def autocast() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(x)
            loss = functional.mse_loss(y.float(), torch.randn(batch(i), 3)) + (net[0](x) @ net[3].weight.t()).sum()
        loss.backward()
        return grads(net, x)

    return step


@scenario
def losses() -> Step:
    w = leaf(4, 5)

    def step(i: int) -> Seen:
        clear(w)
        n = batch(i)
        x = torch.randn(n, 4) @ w
        target = torch.randint(0, 5, (n,))
        target[0] = -100
        other = torch.randn(n, 5)
        total = functional.cross_entropy(x, target, label_smoothing=0.1) + functional.nll_loss(x.log_softmax(1), target, weight=torch.rand(5))
        total = total + functional.huber_loss(x, other) + functional.kl_div(x.log_softmax(1), other.softmax(1), reduction="batchmean")
        total = total + functional.binary_cross_entropy_with_logits(x, other.sigmoid()) + functional.smooth_l1_loss(x, other, beta=0.5)
        total = (
            total + functional.cosine_similarity(x, other).sum() + functional.triplet_margin_loss(x, other, other * 2) + functional.l1_loss(x, other)
        )
        total = total + functional.cross_entropy(x, other.softmax(1)) + functional.margin_ranking_loss(x[:, 0], x[:, 1], torch.ones(n))
        total.backward()
        return grads(w)

    return step


@scenario
def ctc() -> Step:
    w = leaf(4, 6)

    def step(i: int) -> Seen:
        clear(w)
        n = batch(i)
        x = (torch.randn(7, n, 4) @ w).log_softmax(2)
        functional.ctc_loss(x, torch.randint(1, 6, (n, 3)), torch.full((n,), 7), torch.full((n,), 3)).backward()
        return grads(w)

    return step


@scenario
def normalizations_of_weights() -> Step:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.PReLU())

    def step(i: int) -> Seen:
        clear(net)
        net(torch.randn(batch(i), 4)).square().sum().backward()
        return grads(net)

    return step


@scenario
def checkpointed() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 4)
        y = checkpoint(net, x, use_reentrant=False)
        checkpoint(net, y, use_reentrant=False).square().sum().backward()
        return grads(net, x)

    return step


@scenario
def checkpointed_reentrant() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
    first = nn.Linear(4, 4)

    def step(i: int) -> Seen:
        clear(net, first)
        y = checkpoint(net, first(torch.randn(batch(i), 4)), use_reentrant=True)
        checkpoint(net, y, use_reentrant=True).square().sum().backward()
        return grads(net, first)

    return step


# -- what the engine has special words for


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


@scenario
def batched_gradients() -> Step:
    w = leaf(3)

    def step(i: int) -> Seen:
        y = (w * torch.randn(batch(i), 3)).sin().sum(0)
        return named(torch.autograd.grad(y, w, torch.eye(3), is_grads_batched=True))

    return step


@scenario
def jacobian() -> Step:
    net = nn.Linear(3, 2)

    def step(i: int) -> Seen:
        x = torch.randn(3)
        both = torch.autograd.functional.jacobian(lambda t: net(t).tanh(), x)
        return {"jacobian": both, "vectorized": torch.autograd.functional.jacobian(lambda t: net(t).tanh(), x, vectorize=True)}

    return step


@scenario
def anomaly_mode() -> Step:
    w, v = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, v)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                y = (w * torch.randn(batch(i), 3)).square()
                text = error((y * 0 if i == 1 else y).sqrt().mul(v if i != 1 else v * 0).sum().backward)
        return {"error": text, **grads(w, v)}

    return step


@scenario
def another_thread() -> Step:
    net = nn.Linear(4, 3)

    def step(i: int) -> Seen:
        clear(net)
        loss = net(torch.randn(batch(i), 4)).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return grads(net)

    return step


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
    """Its backward runs backward passes of its own."""

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


@scenario
def backward_in_a_backward() -> Step:
    a, w = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, w)
        y = Nested.apply(a * torch.randn(batch(i), 3), w)
        y.exp().sum().backward()
        return grads(a, w)

    return step


@scenario
def backward_in_a_hook() -> Step:
    a, w = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(a, w)
        log: list[object] = []

        def hook(g: Tensor) -> None:
            with torch.enable_grad():
                inner = (w * 2).exp()
                inner.register_hook(logging_hook(log, "inner"))
                inner.sum().backward()

        h = a * torch.randn(batch(i), 3)
        h.register_hook(hook)
        h.sin().sum().backward()
        return {**grads(a, w), "log": log}

    return step


@scenario
def compiled_forward() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    first = nn.Linear(4, 4)
    compiled = torch.compile(net, backend="aot_eager", dynamic=False)

    def step(i: int) -> Seen:
        clear(net, first)
        compiled(first(torch.randn(2, 4)).relu()).square().sum().backward()
        return grads(net, first)

    return step


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


@scenario
def unused_parameters() -> Step:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def step(i: int) -> Seen:
        clear(net)
        net["a" if i != 1 else "b"](torch.randn(batch(i), 4)).sum().backward()
        return grads(net)

    return step


@scenario
def frozen_parameters() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def step(i: int) -> Seen:
        clear(net)
        net[0].requires_grad_(i == 1)
        net(torch.randn(batch(i), 4)).sum().backward()
        return grads(net)

    return step


@scenario
def nothing_requires_a_gradient() -> Step:
    def step(i: int) -> Seen:
        x = torch.randn(3)
        return {"error": error(x.sum().backward), "grad": error(lambda: torch.autograd.grad(x.sum(), x))}

    return step


@scenario
def saved_tensor_changed_in_place() -> Step:
    """Eager refuses; so must we, in the same words."""
    w = leaf(3)

    def step(i: int) -> Seen:
        clear(w)
        h = w * torch.randn(batch(i), 3)
        y = h.sin()
        h.add_(1)
        text = error(y.sum().backward)
        k = w * torch.randn(batch(i), 3)
        k.sin().sum().backward()
        return {"error": text, **grads(w)}

    return step


@scenario
def optimizer_in_the_loop() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(i: int) -> Seen:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(batch(i), 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return {**grads(net), **named([p.detach().clone() for p in net.parameters()])}

    return step


@scenario
def gradients_by_edge() -> Step:
    a = leaf(3)

    def step(i: int) -> Seen:
        h = (a * torch.randn(batch(i), 3)).sin()
        edge = torch.autograd.graph.get_gradient_edge(h)
        y = h.exp().sum()
        return named(torch.autograd.grad(y, [edge, torch.autograd.graph.get_gradient_edge(a)]))

    return step


@scenario
def no_grad_region_and_inference_input() -> Step:
    net = nn.Linear(4, 3)

    def step(i: int) -> Seen:
        clear(net)
        with torch.inference_mode():
            x = torch.randn(batch(i), 4)
        net(x.clone()).square().sum().backward()
        return grads(net)

    return step


# -- what is easily forgotten


@scenario
def splits() -> Step:
    w = leaf(6, 4)

    def step(i: int) -> Seen:
        clear(w)
        n = [3, 7, 4][i]
        x = w.repeat(2, 1)[:n] * 1.5
        parts = [x.split(2)[0], x.chunk(2)[-1], x.split(n)[0], x.unbind(-1)[1], x.t().unbind(1)[2], x.unsafe_chunk(2)[0], x[:0].split(2)[0]]
        parts += [x.split([1, n - 1])[1], x.tensor_split(3)[1], x.split(3, -1)[0]]
        torch.stack([(t.sin() * (j + 1)).sum() for j, t in enumerate(parts)]).sum().backward()
        return grads(w)

    return step


@scenario
def unpacking_that_fails() -> Step:
    w = leaf(3)

    def step(i: int) -> Seen:
        clear(w)

        def unpack(packed: Any) -> Any:
            if i == 1:
                raise OSError("gone")
            return packed if i == 0 else 3

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
            y = (w * torch.randn(3)).exp()
        return {"error": error(y.sum().backward), **grads(w)}

    return step


@scenario
def custom_zeros_of_every_kind() -> Step:
    """Gradients that are not there, of no dimensions and of another dtype."""

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


@scenario
def hook_that_replaces_nothing() -> Step:
    """A gradient that is not there cannot be replaced."""
    w, c = leaf(3), leaf(3)

    def step(i: int) -> Seen:
        clear(w, c)
        x = w * c
        x.register_hook(lambda g: torch.ones(3))
        u, v = Halves.apply(x, c)
        return {"error": error((u + v).sum().backward), **grads(w, c)}

    return step


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
    """Whether gradients are recorded, and autocast, as hooks and custom functions see them."""
    w, log = leaf(3), list[object]()

    def note(what: str) -> None:
        log.append(f"{what} {torch.is_grad_enabled()} {torch.is_autocast_enabled('cpu')} {threading.current_thread().name}")

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


@scenario
def outputs_that_nobody_uses() -> Step:
    w = leaf(4, 4, dtype=torch.float64)

    def step(i: int) -> Seen:
        clear(w)
        _, r = torch.linalg.qr(w * (i + 1))
        _, s, _ = torch.linalg.svd(w, full_matrices=False)
        (r.sum() + s.sum()).backward()
        return grads(w)

    return step


@scenario
def nothing_in_reach() -> Step:
    """Eager calls the hooks of a sole root even where nothing follows, but not those of several."""
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
