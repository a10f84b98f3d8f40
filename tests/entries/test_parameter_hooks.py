"""Gradient hooks on parameters, set before the export or on a loaded entry, run as in eager or are refused by name.
Your own parameters keep their hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import aot_backward as ab
from aot_backward_runtime import ExportError, InputError, WeightsError, load
from aot_backward_runtime.native.allocator import freed_at_once

from ..support import exports

SCALE = 8.0


class Tied(nn.Module):
    """A loss with a weight that is used twice, and a mutated buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.c(self.b(torch.tanh(self.a(x)))).square().mean()


def hooked(net: Tied) -> Tied:
    """Add nonlinear hooks that depend on their order, read buffers, constants and closures, and work in place."""
    closed = torch.tensor([1.0, 2.0, 3.0, 4.0])
    net.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    net.a.weight.register_hook(lambda g: g.mul_(2))
    net.a.bias.register_hook(lambda g: g * net.mask)
    net.b.bias.register_hook(lambda g: g * closed + torch.tensor(0.5))
    net.c.weight.register_hook(lambda g: g / g.norm().clamp(min=1e-3))
    net.c.bias.register_hook(lambda g: g * net.seen.clamp(max=1))  # 0 before the first call
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


X, Y = (torch.randn(3, 4, generator=torch.Generator().manual_seed(n)) for n in (0, 1))


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        net, trained = hooked(Tied()), hooked(Tied())
        step = ab.Step(trained, [ab.Variant((X,))], optimizer_of(trained), accumulate=True, loss_scale=SCALE)
        ab.export(path, {"loss": ab.Grad(net, [ab.Variant((X,))], wrt=["parameters", "x"]), "fit": step})

    return exports.shared("parameter-hooks", make)


def eager_gradients(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x if x.requires_grad else x.detach().requires_grad_()
    named = dict(net.named_parameters()) | {"x": x}
    return dict(zip(named, torch.autograd.grad(net(x), list(named.values())), strict=True))


def both(package: Path) -> tuple[Any, Tied]:
    """Return the loaded gradient function, and an eager module in the same state."""
    return load(package).grad(), hooked(Tied())


def test_hooks_from_before_the_export_are_traced(package: Path) -> None:
    loss, net = both(package)
    for x in (X, Y, X):
        torch.testing.assert_close(loss(x)[1], eager_gradients(net, x))
    with torch.no_grad():  # hooks read the program's buffers by reference
        for tensor in (loss.parameters["mask"], net.mask):
            tensor.copy_(torch.tensor([0.0, 1.0, 0.5, 2.0]))
    torch.testing.assert_close(loss(X)[1], eager_gradients(net, X))


def test_hooks_on_a_loaded_gradient_function(package: Path) -> None:
    """They run as under ``torch.autograd.grad``: in order, once. None keeps the gradient, and a handle removes the
    hook."""
    loss, net = both(package)
    kept: list[torch.Tensor] = []
    hooks: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
        ("b.bias", lambda g: g * 3),
        ("a.weight", lambda g: g.clamp(max=0.005)),
        ("b.weight", lambda g: g + 1),  # the tied tensor
        ("c.bias", lambda g: kept.append(g)),
        ("c.bias", lambda g: g.mul_(2)),
    ]
    for _ in range(2):  # again after all were removed
        loss(X)
        sides: list[Any] = [loss.parameters, dict(net.named_parameters(remove_duplicate=False))]
        handles = [torch.Tensor.register_hook(side[name], hook) for side in sides for name, hook in hooks]
        for x in (X, Y, Y):
            torch.testing.assert_close(loss(x)[1], eager_gradients(net, x))
        for handle in handles:
            handle.remove()
        for x in (X, Y):
            torch.testing.assert_close(loss(x)[1], eager_gradients(net, x))
    # Of X and of Y: a gradient that a hook keeps does not change
    assert len(kept) == 12 and not torch.equal(kept[0], kept[2])
    torch.testing.assert_close(kept[0], kept[1])


def test_hooks_on_arguments_and_on_several_tensors(package: Path) -> None:
    loss, net = both(package)
    for leaf in (True, False):
        x = X.clone().requires_grad_() if leaf else X.clone().requires_grad_() * 1
        for _ in range(2):
            torch.testing.assert_close(loss(x)[1], eager_gradients(net, x))
        x.register_hook(lambda g: g * 5)
        torch.testing.assert_close(loss(x)[1]["x"], loss(X)[1]["x"] * 5)
        torch.testing.assert_close(loss(x)[1], eager_gradients(net, x))
    for side in (loss.parameters, dict(net.named_parameters())):  # autograd.grad does not support it
        register_multi_grad_hook([side["a.bias"], side["c.bias"]], lambda grads: None)
    for call in (lambda: loss(X), lambda: eager_gradients(net, X)):
        with pytest.raises(RuntimeError, match=r"currently running autograd\.grad"):
            call()


def test_a_hook_that_fails_is_the_callers_error(package: Path) -> None:
    loss, _ = both(package)
    expected = loss(X)
    for hook, error in ((lambda g: {}["no"], KeyError), (lambda g: g[0], RuntimeError), (lambda g: 3, TypeError)):
        handle = loss.parameters["c.bias"].register_hook(hook)
        with pytest.raises(error):
            loss(X)
        handle.remove()
        torch.testing.assert_close(loss(X), expected)
    with pytest.raises(InputError, match=r"post-accumulate-grad hook would never run.*Use register_hook"):
        loss.parameters["c.bias"].register_post_accumulate_grad_hook(print)


def test_a_copy_of_a_loaded_gradient_function(package: Path) -> None:
    loss, net = both(package)
    loss.parameters["a.bias"].register_hook(lambda g: 0 * g)
    other = copy.deepcopy(loss)
    torch.testing.assert_close(other(X)[1], eager_gradients(net, X))  # a copied Parameter has no hook
    with torch.no_grad():
        other.parameters["c.bias"].add_(1)
    assert not torch.equal(other(X)[0], loss(X)[0]) and other.parameters["b.weight"] is other.parameters["a.weight"]
    assert type(copy.deepcopy(loss.parameters["a.bias"])) is nn.Parameter


def eager_step(net: Tied, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    for x in inputs:
        (net(x) * SCALE).backward()
    for p in net.parameters():
        p.grad /= SCALE
    optimizer.step()


def test_hooks_on_a_loaded_step(package: Path) -> None:
    """They see each call's gradient of the scaled loss, also under accumulation."""
    step, net = load(package).step(), hooked(Tied())
    optimizer = optimizer_of(net)

    def same() -> None:
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(step.parameters[name].detach(), parameter.detach(), msg=name)

    def train() -> None:
        for _ in range(2):
            step(X)
            eager_step(net, optimizer, X)
        step(X, update=False)
        step(Y, update=False)
        step(X)
        eager_step(net, optimizer, X, Y, X)
        step(Y, update=False)
        step.step()
        eager_step(net, optimizer, Y)
        same()

    train()
    sides: list[Any] = [step.parameters, dict(net.named_parameters(remove_duplicate=False))]
    hooks = [
        ("b.weight", lambda g: g.clamp(max=0.02)),
        ("c.bias", lambda g: None),
        ("c.bias", lambda g: g.clamp_(-0.3, 0.3)),
    ]
    handles = [side[name].register_hook(hook) for side in sides for name, hook in hooks]
    train()

    def fails(gradient: torch.Tensor) -> None:
        raise KeyError("mine")

    before = {n: p.detach().clone() for n, p in step.parameters.items()}
    step(X, update=False)
    failing = step.parameters["c.bias"].register_hook(fails)
    for update in (True, False):
        with pytest.raises(KeyError, match="mine"):
            step(Y, update=update)
    assert step.accumulated == 1 and all(torch.equal(before[n], p) for n, p in step.parameters.items())
    failing.remove()
    with torch.no_grad():
        net.seen.add_(2)  # the failed calls ran their forward
    net.seen.sub_(2)
    step.buffers["seen"].sub_(2)
    step(Y)
    eager_step(net, optimizer, X, Y)
    for handle in handles:
        handle.remove()
    train()
    with pytest.raises(InputError, match="post-accumulate-grad hook would never run"):
        step.parameters["c.bias"].register_post_accumulate_grad_hook(print)


MOVES: dict[str, Callable[[Any], object]] = {
    "Tensor.set_": lambda w: torch.Tensor.set_(w, torch.rand(w.shape)),
    "set_": lambda w: w.set_(torch.rand(w.shape)),
    "aten.set_": lambda w: torch.ops.aten.set_(w, torch.rand(w.shape)),
    "data": lambda w: setattr(w, "data", torch.rand(w.shape)),
    "Tensor.data": lambda w: torch.Tensor.data.__set__(w, torch.rand(w.shape)),
    "set_data": lambda w: torch.ops.aten.set_data(w, torch.rand(w.shape)),
    "an alias of its own": lambda w: w.detach().set_(torch.rand(w.shape)),
    "share_memory_": lambda w: w.share_memory_(),
    "a larger storage": lambda w: w.untyped_storage().resize_(4096),
    "a storage shrunk and grown": lambda w: (
        w.untyped_storage().resize_(0),
        w.untyped_storage().resize_(4096),
        w.fill_(0.5),
    ),
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: torch.Tensor.transpose_(w, 0, 1),
    "as_strided_": lambda w: torch.as_strided_(w, w.shape, (1, w.shape[0])),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "shrunk": lambda w: w.untyped_storage().resize_(16),
}


@pytest.mark.parametrize("kind", ["loss", "fit", "module"])
def test_other_memory_and_other_forms_are_never_stale(kind: str, package: Path) -> None:
    """A call uses the parameter's current value or raises an error that it does not fit, and later calls work."""
    if kind == "module":
        loaded: Any = load(exports.module("mlp", dynamic=False)).module()
        weight, x = next(p for p in loaded.parameters() if p.dim() == 2 and len(set(p.shape)) == 2), torch.randn(3, 8)
        call = lambda: loaded(x)  # noqa: E731
    else:
        loaded = load(package).grad() if kind == "loss" else load(package).step()
        weight, call = loaded.parameters["c.weight"], lambda: loaded(X)
    size = weight.shape
    value = torch.linspace(-1, 1, size.numel()).view(size)
    call()
    for name, move in MOVES.items():
        with torch.no_grad():
            move(weight)
            fits = (
                weight.shape == size
                and weight.is_contiguous()
                and weight.untyped_storage().nbytes() >= 4 * size.numel()
            )
        if not fits:
            with pytest.raises(WeightsError, match=r"has strides|has shape|its storage holds"):
                call()
        expected = weight.detach().clone() if fits else value
        with torch.no_grad():  # memory that can be resized, unlike a package's
            if not fits or name == "share_memory_":
                weight.data = expected.clone()
        got = call()
        if kind == "loss":
            net = hooked(Tied())
            with torch.no_grad():
                net.c.weight.copy_(expected)
            torch.testing.assert_close(got[0], net(X).detach(), msg=name)
        elif kind == "fit":
            assert not torch.equal(weight, expected), name  # it was trained in its new memory
    if kind == "fit":
        with pytest.raises(InputError, match="fixed in the compiled step"):
            weight.requires_grad = False
        torch.Tensor.requires_grad_(weight, False)
        with pytest.raises(InputError, match=r"c\.weight\.requires_grad was changed"):
            call()


# Bytes: inside freed_at_once() the allocator maps this much anew each time, and Linux reuses the address of the last
# unmapped block
LARGE = 1 << 26
TRIES = 25


@pytest.mark.parametrize("size", [16, LARGE])
@pytest.mark.parametrize("kind", ["loss", "fit", "module"])
def test_new_memory_where_a_resized_storage_lay(kind: str, size: int, package: Path) -> None:
    """Compiled code holds the old storage, whose former address the new one has. Operators that it calls would read the
    old one."""
    if kind == "module":
        loaded: Any = load(exports.module("mlp", dynamic=False)).module()
        x = torch.randn(3, 8)
        weights, call = [p for p in loaded.parameters() if p.dim() == 2], lambda: loaded(x)
    else:
        loaded = load(package).grad() if kind == "loss" else load(package).step()
        weights, call = (
            [loaded.parameters["c.weight"]],
            lambda: loaded(X, **({"update": False} if kind == "fit" else {})),
        )
    with torch.no_grad(), freed_at_once(LARGE):
        for weight in weights:
            value = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
            weight.data = value.clone()
            expected, kept = call(), []
            for _ in range(TRIES):
                old = weight.untyped_storage()
                old.resize_(LARGE)
                weight.add_(1)
                call()
                address = weight.data_ptr()
                old.resize_(16)
                new = torch.empty(LARGE // 4)
                kept += new, old  # otherwise each try would get the same gap elsewhere
                old.resize_(size)
                weight.data = new[: value.numel()].view(value.shape).copy_(value)
                torch.testing.assert_close(call(), expected, rtol=0, atol=0)
                if weight.data_ptr() == address != old.data_ptr():
                    break
            else:
                pytest.fail(f"in {TRIES} tries the allocator always gave other memory: this shows nothing")


def test_a_parameter_that_is_none() -> None:
    loaded = load(exports.module("mlp", dynamic=False)).module()
    name, weight = next(iter(loaded.named_parameters()))
    owner, last = loaded.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    x = torch.randn(3, 8)
    expected = loaded(x)
    setattr(owner, last, None)
    for use in (lambda: loaded(x), lambda: copy.deepcopy(loaded)):
        with pytest.raises(WeightsError, match=rf"{name} is None, and compiled code reads it"):
            use()
    setattr(owner, last, weight)
    assert torch.equal(loaded(x), expected)


def entries(net: nn.Module, kind: str) -> dict[str, Any]:
    variants = [ab.Variant((X,))]
    made: dict[str, Any] = {
        "grad": lambda: ab.Grad(net, variants),
        "step": lambda: ab.Step(net, variants, optimizer_of(net)),
    }
    return {kind: made.get(kind, lambda: ab.Module(net, variants))()}


def attached(net: Tied, how: str) -> Any:
    node = get_gradient_edge(net.c.weight).node
    if how == "before":
        node.register_prehook(lambda grads: (grads[0] * 3,))
    elif how == "after":
        node.register_hook(lambda inputs, outputs: None)
    elif how == "accumulated":
        net.c.weight.register_post_accumulate_grad_hook(lambda p: None)
    elif how == "nothing":
        net.c.weight.register_hook(lambda g: None)
    elif how == "writes":
        count = torch.zeros(())
        net.c.weight.register_hook(lambda g: (count.add_(1), g)[1])
        return count
    elif how == "decides":
        net.c.weight.register_hook(lambda g: g if g.norm() > 1 else 2 * g)
    elif how == "shape":
        net.c.weight.register_hook(lambda g: g[0])
    else:
        net.c.weight.register_hook(lambda g: g.clamp(max=0.01))
    return node


REFUSED = {
    (
        "before",
        "module",
    ): r"the AccumulateGrad node of the parameter 'c\.weight' has a hook.*attached.*on the loaded one, module\(\)\.get_parameter",
    (
        "before",
        "grad",
    ): r"the AccumulateGrad node of the parameter 'c\.weight' has a hook.*on the loaded one, grad\(\)\.parameters\['c\.weight'\]",
    (
        "before",
        "step",
    ): r"the AccumulateGrad node of the parameter 'c\.weight' has a hook.*on the loaded one, step\(\)\.parameters\['c\.weight'\] of a",
    ("after", "grad"): r"the AccumulateGrad node of the parameter 'c\.weight' has a hook",
    (
        "accumulated",
        "module",
    ): r"'c\.weight' has a post-accumulate-grad hook, .*module\(\)\.get_parameter\('c\.weight'\)",
    ("accumulated", "step"): r"'c\.weight' has a post-accumulate-grad hook, .*Export without it$",
    (
        "clamp",
        "module",
    ): r"'c\.weight' has a gradient hook, attached.*once, on the sum over all uses of the parameter.*module\(\)\.get_parameter",
    (
        "nothing",
        "grad",
    ): r"on the parameter 'c\.weight': expected a gradient to be returned, got None.*or export without it.*grad\(\)\.parameters\['c\.weight'\]",
    (
        "writes",
        "grad",
    ): r"on the parameter 'c\.weight' changes a tensor in place: this would happen once, while tracing",
    ("decides", "step"): r"could not be traced: .*it reads a tensor's value in Python: use torch\.where",
    ("shape", "grad"): r"returns torch\.float32 \(4,\); expected torch\.float32 \(4, 4\)",
}


@pytest.mark.parametrize(("how", "kind"), REFUSED)
def test_what_could_not_run_is_refused_and_stays_where_it_is(how: str, kind: str, tmp_path: Path) -> None:
    net = Tied()
    held = attached(net, how)

    def slope() -> torch.Tensor:
        net.zero_grad()
        net(X).backward()
        assert net.c.weight.grad is not None
        return net.c.weight.grad.clone()

    before = None if how == "shape" else slope()
    with pytest.raises(ExportError, match=REFUSED[how, kind]):
        ab.export(tmp_path / "no.pt2", entries(net, kind))
    if how == "writes":
        assert float(held) == 1  # from the backward above: tracing did not write
    if before is not None:
        assert torch.equal(slope(), before)


@pytest.mark.parametrize("kind", ["module", "grad", "step", "failing"])
def test_an_export_leaves_the_callers_parameters_as_they_were(kind: str, tmp_path: Path) -> None:
    """This covers their ``.grad``, the accumulation nodes, a graph that is not yet differentiated and weak references,
    also if the export fails."""
    pytest.importorskip("onnxruntime")

    class Counts(Tied):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    net = Counts() if kind == "failing" else Tied()
    if kind == "grad" or kind == "step":
        net.c.bias.register_hook(lambda g: g.clamp(max=0.01))
    nodes = [get_gradient_edge(p).node for p in net.parameters()]
    graph = net(X)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = [(id(p), p.data_ptr(), p._version, p.grad, p.requires_grad, p._backward_hooks) for p in net.parameters()]
    values = [p.detach().clone() for p in net.parameters()]
    if kind == "failing":
        with pytest.raises(ExportError, match=r"is wrong.*changes 'calls'"):
            ab.export_onnx(tmp_path / "net.onnx", entries(net, "module"))
    else:
        ab.export_onnx(tmp_path / "net.onnx", entries(net, kind))
    for p, (i, address, version, grad, required, hooks), value in zip(net.parameters(), before, values, strict=True):
        assert (
            id(p) == i
            and p.data_ptr() == address
            and p.grad is grad
            and p.requires_grad == required
            and p._backward_hooks is hooks
        )
        assert (
            torch.equal(p, value)
            and torch.equal(p.grad, torch.ones_like(p))
            and (kind == "step" or p._version == version)
        )
    fired: list[int] = []
    for i, node in enumerate(nodes):
        node.register_prehook(lambda grads, i=i: fired.append(i))
    for loss in (graph, net(X)) if kind != "step" else (net(X),):  # a step's check trains in place
        fired.clear()
        loss.backward()
        assert sorted(fired) == list(range(len(nodes)))


def test_what_hangs_on_a_node_in_other_ways_is_found_by_a_real_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check does not rely on finding hooks by name."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("aot_backward.capture.user_code.hooks.on_accumulation", lambda parameter: [])
    for kind in ("module", "grad"):
        net = Tied()
        node = attached(net, "before")
        with pytest.raises(
            ExportError,
            match=r"the gradient of c\.weight that backward\(\) leaves in \.grad differs by .* from the result of torch\.autograd\.grad",
        ):
            ab.export_onnx(tmp_path / "net.onnx", entries(net, kind))
        del node
