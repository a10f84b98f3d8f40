"""Derivatives of a function at any number of points: ``derivatives``, and transforms of ``torch.func`` in the caller's
own program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import aot_backward as ab
from aot_backward_runtime import load

from ..support import exports

# torch's own rules for forward mode are scripted
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

KINDS = ["value", "jacobian", "vjp", "jvp", "hessian", "hvp"]


class Dynamics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.net(torch.cat([x, u], -1))


def dynamics(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    return Dynamics().to(dtype)


def pendulum(x: torch.Tensor, u: torch.Tensor) -> dict[str, Any]:
    """Take one point."""
    return {"rate": torch.stack([x[1], u[0] - x[0].sin() * x[2]]), "sum": [(x[1:] * x[1:].exp()).sum(), u[0] * 2]}


def energy(x: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return a number for each point; all points share ``mass``."""
    return (mass * x.square()).sum(-1).cos()


def inputs(points: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(points)
    return torch.randn(points, 3, dtype=dtype), torch.randn(points, 2, dtype=dtype)


def of_torch(
    kind: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    cotangent: Any,
    tangents: tuple[Any, ...],
    at: Callable[..., Any] = vmap,
) -> Any:
    """Return what ``torch.func`` gives for a function of one point, by argument in order. ``at``: ``vmap``, or nothing
    for one point."""

    def weighted(*args: Any) -> torch.Tensor:
        *args, cotangent = args  # type: ignore[assignment]
        values, weights = torch.utils._pytree.tree_leaves(f(*args)), torch.utils._pytree.tree_leaves(cotangent)
        return sum((v * w).sum() for v, w in zip(values, weights, strict=True))  # type: ignore[return-value]

    n = tuple(range(len(args)))
    if kind == "value":
        return at(f)(*args)
    if kind == "jacobian":
        return at(jacrev(f, n))(*args)
    if kind == "vjp":
        return at(lambda c, *args: vjp(f, *args)[1](c))(cotangent, *args)
    if kind == "jvp":
        return at(lambda t, *args: jvp(f, args, t)[1])(tangents, *args)
    if kind == "hessian":
        return at(hessian(weighted, n))(*args, cotangent)
    return at(lambda t, c, *args: jvp(lambda *a: grad(weighted, n)(*a, c), args, t)[1])(tangents, cotangent, *args)


def by_order(value: Any, names: tuple[str, ...]) -> Any:
    """Return dicts by argument as tuples."""
    if isinstance(value, dict) and set(value) == set(names):
        return tuple(by_order(value[n], names) for n in names)
    if isinstance(value, dict):
        return {k: by_order(v, names) for k, v in value.items()}
    return [by_order(v, names) for v in value] if isinstance(value, list) else value


def close(actual: Any, expected: Any) -> None:
    expected = torch.utils._pytree.tree_map(torch.Tensor.detach, expected)
    torch.testing.assert_close(actual, expected, rtol=None, atol=None)


def extras(kind: str, y: Any, args: tuple[torch.Tensor, ...]) -> tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Return a cotangent, tangents, and the arguments that an entry takes after those of the function."""
    cotangent = torch.utils._pytree.tree_map(torch.randn_like, y)
    tangents = tuple(map(torch.randn_like, args))
    used = {"vjp": (cotangent,), "jvp": tangents, "hessian": (cotangent,), "hvp": (cotangent, *tangents)}.get(kind, ())
    return cotangent, tangents, used


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of", ["module", "point"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_program_of_an_entry_equals_torch_func(kind: str, of: str, dtype: torch.dtype) -> None:
    """A module, and a function of one point with a nested result."""
    point: Callable[..., Any] = dynamics(dtype) if of == "module" else pendulum
    args = inputs(4, dtype)
    (entry,) = ab.derivatives(point if of == "module" else vmap(point), args, [kind]).values()
    cotangent, tangents, used = extras(kind, vmap(point)(*args), args)
    close(by_order(entry.fn(*args, *used), ("x", "u")), of_torch(kind, point, args, cotangent, tangents))
    assert entry.metadata == {"derivative": kind, "arguments": ["x", "u"], "batched": ["x", "u"], "wrt": ["x", "u"]}


@pytest.mark.parametrize("kind", KINDS)
def test_one_point(kind: str) -> None:
    args = tuple(t[0] for t in inputs(2, torch.float64))
    (entry,) = ab.derivatives(pendulum, args, [kind], batch=None).values()
    assert entry.variants[0].dynamic_shapes is None
    cotangent, tangents, used = extras(kind, pendulum(*args), args)
    close(
        by_order(entry.fn(*args, *used), ("x", "u")),
        of_torch(kind, pendulum, args, cotangent, tangents, at=lambda f: f),
    )


def test_shared_arguments_and_results_that_do_not_depend_on_one() -> None:
    x, mass = torch.randn(4, 3), torch.rand(3)
    entries = ab.derivatives(energy, (x, mass), ["jacobian", "hessian"], batch=[0, None], metadata={"unit": "J"})
    close(entries["jacobian"].fn(x, mass), {"x": vmap(jacrev(energy), (0, None))(x, mass)})
    close(entries["hessian"].fn(x, mass, torch.ones(4)), {"x": {"x": vmap(hessian(energy), (0, None))(x, mass)}})
    assert entries["jacobian"].metadata == {
        "unit": "J",
        "derivative": "jacobian",
        "arguments": ["x", "mass"],
        "batched": ["x"],
        "wrt": ["x"],
    }

    (entry,) = ab.derivatives(lambda x, y: (x + 1, y * 0 + 2), (x, x), ["hessian"], wrt=["y"]).values()
    close(entry.fn(x, x, (x, x)), {"y": {"y": torch.zeros(4, 3, 3)}})
    (entry,) = ab.derivatives(lambda x, y: (x + 1).detach(), (x, x), ["jvp"], wrt="x").values()
    close(entry.fn(x, x, x), torch.zeros(4, 3))


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        entries = ab.derivatives(dynamics(torch.float64), inputs(3, torch.float64), KINDS)
        pointwise = ab.derivatives(vmap(pendulum), inputs(3, torch.float32), ["jacobian", "hvp"])
        ab.export(
            path, entries | {f"pendulum_{kind}": entry for kind, entry in pointwise.items()}, runtime="standalone"
        )

    return exports.shared("derivatives", make)


@pytest.mark.parametrize("points", [1, 3, 40])
def test_any_number_of_points(package: Path, points: int) -> None:
    loaded, f = load(package), dynamics(torch.float64)
    assert len({s.weight for spec in loaded.manifest.entries.values() for s in spec.state}) == 4
    for name in loaded.entries:
        kind, one = name.rpartition("_")[2], pendulum if "_" in name else f
        args = inputs(points, torch.float32 if "_" in name else torch.float64)
        cotangent, tangents, used = extras(kind, vmap(one)(*args), args)
        function = loaded.function(name)
        assert function.metadata["derivative"] == kind
        close(by_order(function(*args, *used), ("x", "u")), of_torch(kind, one, args, cotangent, tangents))


def test_names_of_arguments_and_results(package: Path) -> None:
    entries = load(package).manifest.entries
    names = {kind: [t.name for t in entries[kind].variants[0].inputs] for kind in KINDS}
    assert names["jacobian"] == ["x", "u"] and names["hessian"] == ["x", "u", "cotangent"]
    assert names["hvp"] == ["x", "u", "cotangent", "tangent_x", "tangent_u"]
    assert [t.name for t in entries["hessian"].variants[0].outputs] == ["x.x", "x.u", "u.x", "u.u"]
    assert [s.name for s in entries["jacobian"].state] == [
        f"f.net.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    ]


X, U = inputs(3, torch.float32)


@pytest.mark.parametrize(
    ("f", "args", "options", "message"),
    [
        (
            energy,
            (X, X),
            {"kinds": ["gradient"]},
            r"kinds: expected some of \['value', .*, each once, got \['gradient'\]",
        ),
        (
            energy,
            (X,),
            {},
            "args: expected the positional arguments of f, got 1 tensors: missing a required argument: 'mass'",
        ),
        (energy, (X, 3.0), {}, "argument mass: expected a tensor, got a float. Close over it instead"),
        (energy, (X, X), {"batch": 1}, "batch: expected 0, None, or one of them for each of the 2 arguments, got 1"),
        (energy, (X, X[:2]), {}, r"expected the same number of points .* got \{'x': 3, 'mass': 2\}"),
        (energy, (X[:1], X[:1]), {}, "at least 2, got"),
        (
            energy,
            (X, X),
            {"wrt": "y"},
            r"wrt: expected some of \['x', 'mass'\], the batches of floating-point numbers, got \['y'\]",
        ),
        (energy, (X, X[0]), {"batch": [0, None], "wrt": "mass"}, r"wrt: expected some of \['x'\]"),
        (pendulum, (X, U), {}, "Wrap a function of one point in torch.vmap"),
        (
            lambda x: x - x.mean(0),
            (X,),
            {},
            "expected the same for point 0 alone and in the batch, got a difference of .* mix points",
        ),
        (
            lambda x: x.sum(0),
            (X,),
            {},
            r"result of f: expected the 3 points in dimension 0, got shape \(3,\)|expected the same for point 0",
        ),
        (
            lambda x: x.T,
            (torch.randn(4, 3),),
            {},
            r"result of f: expected the 4 points in dimension 0, got shape \(3, 4\)",
        ),
        (
            lambda x: {"n": x > 0},
            (X,),
            {},
            r"result\['n'\] of f: expected a tensor of floating-point numbers, got torch.bool",
        ),
        (lambda cotangent: cotangent, (X,), {}, "argument cotangent of f: expected another name"),
    ],
)
def test_what_is_wrong_is_named(
    f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ab.ExportError, match=message):
        ab.derivatives(f, args, **options)


def test_the_check_of_the_points_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before, state = {n: t.clone() for n, t in net.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(
        ab.ExportError, match=r"mix points|f failed on 1 point: ValueError: Expected more than 1 value per channel"
    ):
        ab.derivatives(net, (X,))
    ab.derivatives(net.eval(), (X,), ["value"])
    torch.testing.assert_close(dict(net.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), state)


class Transformed(nn.Module):
    """Each transform of one point under ``vmap``, and forward mode of the whole batch, as a caller writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dynamics(torch.float64)

    def forward(self, x: torch.Tensor, u: torch.Tensor) -> dict[str, Any]:
        def weighted(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return (self.net(x, u) * x).sum() + (x[1] * x[2:]).sum()

        return {
            "jacrev": vmap(jacrev(self.net, (0, 1)))(x, u),
            "jacfwd": vmap(jacfwd(self.net, (0, 1)))(x, u),
            "hessian": vmap(hessian(weighted, (0, 1)))(x, u),
            "jacrev of grad": vmap(jacrev(grad(weighted)))(x, u),
            "jvp": jvp(self.net, (x, u), (x.cos(), u.sin()))[1],
            "hvp": jvp(grad(lambda x, u: self.net(x, u).square().sum(), (0, 1)), (x, u), (x.cos(), u.sin()))[1],
        }


def test_transforms_in_the_program_keep_the_batch_open(tmp_path: Path) -> None:
    module, points = Transformed(), {0: torch.export.Dim("points", min=1)}
    ab.export_function(
        module, inputs(3, torch.float64), dynamic_shapes=(points, points), path=tmp_path / "transformed.pt2"
    )
    function = load(tmp_path / "transformed.pt2").function()
    for n in (1, 3, 7):
        args = inputs(n, torch.float64)
        close(function(*args), module(*args))


BESIDE_A_CONSTANT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda x, u: torch.cat([u, x.square()], 1),
    "cat of integers": lambda x, u: torch.cat([x.exp(), (u > 0).long(), u > 0], 1),
    "stack": lambda x, u: torch.stack([x[:, :2].sin(), u], 2),
    "where": lambda x, u: torch.where(u[:, :1] > 0, x * x, u[:, :1]),
    "mm": lambda x, u: u.T @ x.exp(),
    "bmm": lambda x, u: torch.bmm(x[:, :, None].sin(), u[:, None]),
    "div": lambda x, u: u[:, :1] / (1 + x * x) + x / (1 + u[:, :1] ** 2),
    "mul": lambda x, u: x * u[:, :1],
    "atan2": lambda x, u: torch.atan2(x[:, :2], u),
    "lerp": lambda x, u: torch.lerp(u, x[:, :2].exp(), 0.3),
    "index_put": lambda x, u: u.index_put((torch.tensor([0]),), x[:1, :2].sin()),
    "mse_loss": lambda x, u: nn.functional.mse_loss(x[:, :2], u),
}


def along_x(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the derivative by ``x`` alone, in the direction of ones."""
    return lambda x, u: jvp(lambda x: f(x, u), (x,), (torch.ones_like(x),))[1]


class Partial(nn.Module):
    """First and second derivatives by one of two arguments, as in physics-informed networks: the other argument has no
    tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dynamics(torch.float64)

    def forward(self, x: torch.Tensor, u: torch.Tensor) -> dict[str, Any]:
        functions = BESIDE_A_CONSTANT | {"net": self.net}
        return {name: (along_x(f)(x, u), along_x(along_x(f))(x, u)) for name, f in functions.items()}


def test_forward_mode_by_one_of_two_arguments_keeps_the_batch_open(tmp_path: Path) -> None:
    module, points = Partial(), {0: torch.export.Dim("points", min=1)}
    x, u = inputs(3, torch.float64)
    ab.export_module(module, (x.requires_grad_(), u), dynamic_shapes=(points, points), path=tmp_path / "partial.pt2")
    loaded = load(tmp_path / "partial.pt2").module()
    for n in (1, 3, 7):
        args = inputs(n, torch.float64)
        gradients = []
        for of in (module, loaded):
            x = args[0].clone().requires_grad_()
            values = of(x, args[1])
            sum(v.square().sum() for v in torch.utils._pytree.tree_leaves(values)).backward()
            gradients.append([x.grad, *(p.grad for p in of.parameters())])
            for p in of.parameters():
                p.grad = None
        close(values, module(*args))
        close(gradients[1], gradients[0])


@pytest.mark.parametrize("rule", ["layer_norm", "sort"])
def test_a_transform_that_fixes_the_batch_is_named(tmp_path: Path, rule: str) -> None:
    """Also if only its backward reads the size."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return vmap(jacrev(lambda x: nn.functional.layer_norm(x, (3,)) if rule == "layer_norm" else x.sort().values))(x)

    with pytest.raises(
        ab.ExportError, match=r"reads it as a number: call aot_backward\.derivatives, or sum over the batch"
    ) as caught:
        ab.export_function(
            rows, (X,), dynamic_shapes=({0: torch.export.Dim("points", min=1)},), path=tmp_path / "refused.pt2"
        )
    text = str(caught.value)
    assert "is valid only for 3" in text and "mark_dynamic" not in text
    assert rule == "sort" or "test_derivatives.py" in text
    entry = ab.derivatives(
        lambda x: nn.functional.layer_norm(x, (3,)) if rule == "layer_norm" else x.sort().values, (X,), ["jacobian"]
    )["jacobian"]
    close(entry.fn(X), {"x": rows(X)})
