"""Changes to a loaded module have the same effect as on an eager one, or raise an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import aot_backward as ab
from aot_backward_runtime import GradientError, InputError, load
from aot_backward_runtime.format.manifest import Tree
from aot_backward_runtime.native.pytree import flatten

from ..support import exports
from ..support.oracle import assert_same, run


class Net(nn.Module):
    """BatchNorm stays in eval mode. The gradients of ``x``, ``shift`` and ``flat`` are one tensor in three shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.shift, self.flat = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), x.sum(0) + self.shift + self.flat.view(3, 4).sum(0) + 0 * x[0]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return 2 * x + self.seen


class Two(nn.Module):
    """Heads that some inputs do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.near, self.far = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x) / torch.tensor(scale)
        return self.near(h), self.far(h.detach())


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * (x + self.a + self.b.view(3, 4))


def net() -> Net:
    torch.manual_seed(0)
    made = Net()
    made.body[1].eval()
    return made


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        x = torch.randn(1, 4).expand(3, 4).requires_grad_()
        entries = {
            "net": (net(), (x,)),
            "shares": (Shares(), (x,)),
            "two": (Two(), (x, 1.0)),
            "counts": (Counts(), (x,)),
        }
        ab.export(path, {n: ab.Module(m, [ab.Variant(args)]) for n, (m, args) in entries.items()})

    return exports.shared("changes", make)


def test_a_submodule_that_was_in_the_other_mode(package: Path) -> None:
    loaded = load(package).module("net")
    for _ in range(2):
        assert [m.training for m in loaded.modules()] == [m.training for m in net().modules()]
        loaded.train()
    loaded.get_submodule("body.1").eval()  # as exported
    x = torch.randn(3, 4, requires_grad=True)
    assert_same(run(loaded, (x,), 1), run(net(), (x,), 1))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "mode": (lambda m: m.body.eval(), "cannot be put into eval mode alone"),
    "number": (lambda m: setattr(m.get_submodule("body.2"), "p", 0.0), "'p' of a loaded module cannot be changed"),
    "replaced": (lambda m: setattr(m, "body", nn.Identity()), "'body' of a loaded module cannot be changed"),
    "replaced within": (lambda m: setattr(m.body, "1", nn.Identity()), "'1' of a loaded module cannot be changed"),
    "hook": (lambda m: m.body.register_forward_hook(print), "a hook on a submodule of a loaded module would never run"),
    "backward hook": (
        lambda m: m.body.register_full_backward_hook(print),
        "a hook on a submodule of a loaded module would never run",
    ),
    "called": (lambda m: m.body(torch.ones(3, 4)), "cannot be called: export it as its own entry"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_would_do_nothing_is_an_error(case: str, package: Path) -> None:
    change, message = CHANGES[case]
    with pytest.raises(InputError, match=message):
        change(load(package).module("net"))


def test_what_does_something_does_it(package: Path) -> None:
    loaded, eager = load(package).module("net"), net()
    for module in (loaded, eager):
        module.register_forward_hook(lambda m, args, out: (out[0], 3 * out[1]))
        module.get_submodule("body.0").weight = nn.Parameter(torch.eye(4))
        module.get_submodule("body.1").running_mean = torch.ones(4)
        module.note = "mine"
    x = torch.randn(3, 4, requires_grad=True)
    assert_same(run(loaded, (x,), 1), run(eager, (x,), 1))
    loaded.extra = nn.Linear(2, 2)  # not part of the compiled code
    assert loaded.eval().extra.training is False and loaded.train().extra.training is True


def test_gradients_share_no_memory(package: Path) -> None:
    """Autograd adds the next gradient into the first one's memory."""
    loaded, x = load(package).module("shares"), torch.zeros(3, 4, requires_grad=True)
    for _ in range(3):
        loaded(x).backward(torch.ones(3, 4))
    assert all(torch.equal(t.grad, torch.full_like(t, 6.0)) for t in (x, *loaded.parameters()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode uses it
def test_forward_mode_is_refused(package: Path) -> None:
    loaded, x = load(package).module("shares"), torch.randn(3, 4)
    with forward_ad.dual_level():
        assert torch.equal(loaded(x), Shares()(x))
        with pytest.raises(GradientError, match="has a tangent"):
            loaded(forward_ad.make_dual(x, x))


def test_other_memory_for_a_while(package: Path) -> None:
    """``.data = …`` between a forward and its backward, and back again: every later call uses the current memory."""
    loaded, x = load(package).module("net"), torch.randn(3, 4, requires_grad=True)
    weight = loaded.get_submodule("body.0").weight
    expected = {n: t if t is None else t.detach().clone() for n, t in run(loaded, (x,), 1).items()}
    loss, before = loaded(x)[0].sum(), weight.data
    weight.data = torch.zeros(4, 4)
    loaded(x)[0].sum().backward()
    loss.backward()
    weight.data = before
    assert_same(run(loaded, (x,), 1), expected)


def test_hooks_that_keep_copies(package: Path) -> None:
    loaded, x = load(package).module("net"), torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        actual = run(loaded, (x,), 1)
    assert_same(actual, run(net(), (x,), 1))


@pytest.mark.parametrize("frozen", [("body",), ("body", "far"), ("body", "near"), ("near", "far")])
def test_outputs_require_gradients_as_in_eager(frozen: tuple[str, ...], package: Path) -> None:
    loaded, eager, x = load(package).module("two"), Two(), torch.randn(3, 4)
    loaded.load_state_dict(eager.state_dict())
    for module in (loaded, eager):
        for name in frozen:
            module.get_submodule(name).requires_grad_(False)
    assert [o.requires_grad for o in loaded(x, 1.0)] == [o.requires_grad for o in eager(x, 1.0)]
    assert_same(run(loaded, (x, 1.0), 1), run(eager, (x, 1.0), 1))


@pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (complex(0, 0), complex(0, -0.0)), (1, True), (1, 1.0)])
def test_the_other_zero_is_another_number(value: Any, other: Any) -> None:
    tree = Tree("constant", value=value)
    flatten(tree, value, [], "scale")
    with pytest.raises(InputError, match=r"scale is .* export a variant for it"):
        flatten(tree, other, [], "scale")


def test_a_copy_keeps_what_was_added(package: Path) -> None:
    loaded = load(package).module("two")
    loaded.extra, loaded.note = nn.Linear(2, 2), ["mine"]
    loaded.register_forward_hook(lambda m, args, out: (3 * out[0], out[1]))
    loaded.near.weight.requires_grad_(False)
    copied, x = copy.deepcopy(loaded), torch.randn(3, 4)
    assert torch.equal(copied(x, 1.0)[0], loaded(x, 1.0)[0]) and not copied.near.weight.requires_grad
    assert copied.note == ["mine"] and copied.note is not loaded.note
    assert torch.equal(copied.extra.weight, loaded.extra.weight) and copied.extra is not loaded.extra


def test_what_cannot_take_part_says_so_and_does_no_harm(package: Path) -> None:
    loaded, x = load(package).module("shares"), torch.randn(3, 4)
    expected = loaded(x)
    with pytest.raises(InputError, match=r"torch\.func transform"):
        torch.func.grad(lambda a: torch.func.functional_call(loaded, {"a": a}, (x,)).sum())(torch.zeros(3, 4))
    with pytest.raises(InputError, match="FakeTensor"):
        torch.export.export(loaded, (x,))
    with pytest.raises(InputError, match="called during tracing"):
        make_fx(loaded)(x)
    assert torch.equal(loaded(x), expected)


def test_a_buffer_that_is_written_is_no_input(package: Path) -> None:
    loaded, eager = load(package).module("counts"), Counts()
    with pytest.raises(InputError, match="x shares memory with seen, which the call updates"):
        loaded(loaded.seen)
    for _ in range(2):
        assert torch.equal(loaded(loaded.seen.clone()), eager(eager.seen.clone()))
