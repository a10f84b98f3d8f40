"""Derivatives of a function at many points as entries of a package, over one set of weights.

Each entry is built by reverse mode: a row of a Jacobian is the gradient of one result, summed over the points. A
point's result depends on that point only, so the gradient of the sum holds each point's own row. No batch dimension is
mapped by ``torch.func.vmap``, some of whose rules read sizes as numbers, so that the number of points stays open.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError

from .capture import preserve
from .capture.program_module import FunctionModule, forward_of
from .entries import Function, Variant

KINDS = ("value", "jacobian", "vjp", "jvp", "hessian", "hvp")


def derivatives(
    f: Callable[..., Any],
    args: Sequence[torch.Tensor],
    kinds: Iterable[str] = ("value", "jacobian"),
    *,
    batch: int | Sequence[int | None] | None = 0,
    wrt: str | Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Function]:
    """Return entries for :func:`export` that compute a function and its derivatives at any number of points.

    ``f`` takes a batch of points and returns a batch of results: dimension 0 of each argument and of each result counts
    the points, and a result depends on its own point only. Most modules are such functions. Wrap a function of one
    point: ``torch.vmap(f)``.

    The entries are named by their kind. Below, ``y`` is the result of ``f``, a tensor or tensors in any nesting, and
    ``x`` and ``u`` are arguments of ``f``. Derivatives have the shapes that ``torch.func`` gives under ``vmap``, and
    are dicts by argument: ``jacobian(x, u)["x"]`` has the shape (points, \\*y, \\*x).

    - "value", called as ``(x, u)``: ``y``.
    - "jacobian", ``(x, u)``: the derivative of ``y`` by each argument, as ``jacrev(f)``.
    - "vjp", ``(x, u, cotangent)``: ``cotangent`` times the Jacobian by each argument, as ``vjp(f, x, u)``.
    - "jvp", ``(x, u, tangent_x, tangent_u)``: the Jacobian times the tangents, nested like ``y``, as ``jvp(f, …)``.
    - "hessian", ``(x, u, cotangent)``: the second derivatives of the sum of ``cotangent`` times ``y``, as ``hessian``;
      ``["x"]["u"]`` has the shape (points, \\*x, \\*u).
    - "hvp", ``(x, u, cotangent, tangent_x, tangent_u)``: that Hessian times the tangents, by argument, as
      ``jvp(grad(…), …)``.

    ``cotangent`` is nested like ``y``. If ``f`` gives one number a point, ones give the Hessian of ``f`` itself. There
    is one ``tangent_NAME`` for each differentiated argument, of its shape. An entry's metadata states its kind
    ("derivative"), the names of the arguments of ``f`` ("arguments"), those that are batches ("batched") and those that
    it is differentiated by ("wrt").

    The graph of a Jacobian grows with the number of elements of ``y`` at a point, that of a Hessian with the number of
    elements of the arguments.

    Args:
        f: The function or module, as for :class:`Function`. A module's mode is its present one.
        args: Example arguments: tensors, with at least two points.
        kinds: The derivatives, from "value", "jacobian", "vjp", "jvp", "hessian" and "hvp".
        batch: The dimension of the points in each argument: 0, or one for each argument, where None is an argument that
            all points share. None for all: ``f`` is a function of one point; no shape has a dimension for points, and
            no size is open.
        wrt: The names of the arguments to differentiate by. The default is every batch of floating-point numbers.
        metadata: A JSON object of your own, for each entry.

    Returns:
        The entries, by kind.

    Raises:
        ExportError: An argument is invalid, or a result of ``f`` is not one of its point only.

    Examples:
        >>> entries = ab.derivatives(net, (torch.randn(4, 8),), ["value", "jacobian"])
        >>> package = ab.load(ab.export("net.pt2", entries))
        >>> package.function("jacobian")(torch.randn(100, 8))["input"].shape
        torch.Size([100, 1, 8])
    """
    chosen = _kinds(kinds)
    call = _Call.of(f, tuple(args), batch, wrt)
    y = call.example_results(float_only=chosen != ["value"])
    cotangent = pytree.tree_map(torch.ones_like, y)
    tangents = [torch.ones_like(args[i]) for i in call.wrt]
    open_points = {0: Dim("points", min=1)}
    entries = {}
    for kind in chosen:
        extra = [("cotangent", cotangent)] if kind in ("vjp", "hessian", "hvp") else []
        extra += (
            [(f"tangent_{call.names[i]}", t) for i, t in zip(call.wrt, tangents, strict=True)]
            if kind in ("jvp", "hvp")
            else []
        )
        names, values = [*call.names, *(n for n, _ in extra)], (*args, *(v for _, v in extra))
        flags = [*call.batched, *(call.any_batched for _ in extra)]
        shapes = tuple(
            pytree.tree_map(lambda _, f=flag: open_points if f else None, v)
            for v, flag in zip(values, flags, strict=True)
        )
        variant = Variant(values, dynamic_shapes=shapes if call.any_batched else None)
        entries[kind] = Function(
            _program(call, kind, names), [variant], metadata=dict(metadata or {}) | call.facts(kind)
        )
    return entries


def _kinds(kinds: Iterable[str]) -> list[str]:
    chosen = [kinds] if isinstance(kinds, str) else list(kinds)
    if not chosen or not set(chosen) <= set(KINDS) or len(set(chosen)) < len(chosen):
        raise ExportError(f"kinds: expected some of {list(KINDS)}, each once, got {chosen}")
    return chosen


@dataclass(frozen=True)
class _Call:
    """The function and how it is called. ``f``: a module. ``batched``: by argument. ``wrt``: places of the
    differentiated arguments."""

    f: nn.Module
    args: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    batched: tuple[bool, ...]
    wrt: tuple[int, ...]

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        batch: int | Sequence[int | None] | None,
        wrt: str | Sequence[str] | None,
    ) -> _Call:
        program = f if isinstance(f, nn.Module) else FunctionModule(f)
        names = _names(forward_of(program), args)
        for name, value in zip(names, args, strict=True):
            if not isinstance(value, torch.Tensor):
                raise ExportError(
                    f"argument {name}: expected a tensor, got a {type(value).__name__}. Close over it instead"
                )
        dims = list(batch) if isinstance(batch, Sequence) else [batch] * len(args)
        if len(dims) != len(args) or any(d is not None and (type(d) is not int or d != 0) for d in dims):
            raise ExportError(
                f"batch: expected 0, None, or one of them for each of the {len(args)} arguments, got {batch!r}"
            )
        batched = tuple(d == 0 for d in dims)
        counts = {n: len(t) if t.dim() else 0 for n, t, b in zip(names, args, batched, strict=True) if b}
        if counts and (len(set(counts.values())) > 1 or min(counts.values()) < 2):
            raise ExportError(
                f"args: expected the same number of points in dimension 0 of each, and at least 2, got {counts}. Give batch=[0, None] if all points "
                "share the second argument, and batch=None for one point"
            )
        floats = [
            n for n, t, b in zip(names, args, batched, strict=True) if t.is_floating_point() and (b or not any(batched))
        ]
        chosen = [wrt] if isinstance(wrt, str) else floats if wrt is None else list(wrt)
        if not chosen or not set(chosen) <= set(floats) or len(set(chosen)) < len(chosen):
            raise ExportError(f"wrt: expected some of {floats}, the batches of floating-point numbers, got {chosen}")
        return cls(program, args, names, batched, tuple(names.index(n) for n in chosen))

    @property
    def any_batched(self) -> bool:
        return any(self.batched)

    def facts(self, kind: str) -> dict[str, Any]:
        """Return the metadata of an entry."""
        batched = [n for n, b in zip(self.names, self.batched, strict=True) if b]
        return {
            "derivative": kind,
            "arguments": list(self.names),
            "batched": batched,
            "wrt": [self.names[i] for i in self.wrt],
        }

    def example_results(self, float_only: bool) -> Any:
        """Return the results at the example. Raise :class:`ExportError` if they are not a batch of results that depend
        on their own points only."""
        with (
            preserve.slots_kept(self.f),
            preserve.attributes_kept(self.f),
            preserve.values_kept(self.f.buffers()),
            torch.no_grad(),
        ):
            y = self._run(slice(None))
            flat = pytree.tree_flatten_with_path(y)[0]
            for path, value in flat:
                name = f"result{pytree.keystr(path)}"
                if not isinstance(value, torch.Tensor) or (float_only and not value.is_floating_point()):
                    got = f"{value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                    raise ExportError(
                        f"{name} of f: expected a tensor{' of floating-point numbers' * float_only}, got {got}"
                    )
                if self.any_batched and (not value.dim() or len(value) != self._points):
                    raise ExportError(
                        f"{name} of f: expected the {self._points} points in dimension 0, got shape {tuple(value.shape)}. Wrap a function of one "
                        "point in torch.vmap, or say batch=None"
                    )
            for i in range(2) if self.any_batched else ():
                for (path, whole), alone in zip(flat, pytree.tree_leaves(self._run(slice(i, i + 1))), strict=True):
                    if alone.shape[1:] != whole.shape[1:] or not _close(alone[0], whole[i]):
                        raise ExportError(
                            f"result{pytree.keystr(path)} of f: expected the same for point {i} alone and in the batch, got "
                            f"{_differ(alone, whole[i])}. f must neither mix points nor be random: call eval(), or wrap a function of one point in "
                            "torch.vmap"
                        )
        return y

    def _run(self, points: slice) -> Any:
        try:
            with preserve.random_state_kept():
                return self.f(*(t[points] if b else t for t, b in zip(self.args, self.batched, strict=True)))
        except ExportError:
            raise
        except Exception as error:  # from the user's program
            cause = str(error).strip().partition("\n")[0]
            count = len(range(*points.indices(self._points))) if self.any_batched else 1
            raise ExportError(
                f"f failed on {count} {'points' if count > 1 else 'point'}: {type(error).__name__}: {cause}. "
                "Wrap a function of one point in torch.vmap"
            ) from error

    @property
    def _points(self) -> int:
        return next((len(t) for t, b in zip(self.args, self.batched, strict=True) if b), 1)


def _names(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    try:
        bound = inspect.signature(function).bind(*args).arguments
    except TypeError as error:
        raise ExportError(f"args: expected the positional arguments of f, got {len(args)} tensors: {error}") from error
    names = []
    for name, value in bound.items():
        variadic = inspect.signature(function).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}{i}" for i in range(len(value))] if variadic else [name]
    for name in names:
        if name == "cotangent" or name.startswith("tangent_"):
            raise ExportError(
                f"argument {name} of f: expected another name, because derivatives add arguments of that name. Rename it"
            )
    return tuple(names)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether they are equal up to the rounding of another order of sums."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps
    return torch.allclose(
        a, b, rtol=1e4 * eps, atol=1e3 * eps * max(1.0, float(b.abs().max()) if b.numel() else 0.0), equal_nan=True
    )


def _differ(alone: torch.Tensor, expected: torch.Tensor) -> str:
    if alone.shape[1:] != expected.shape:
        return f"the shapes {tuple(alone.shape[1:])} and {tuple(expected.shape)}"
    return f"a difference of {float((alone[0].double() - expected.double()).abs().max()):.1e}"


def _program(call: _Call, kind: str, names: Sequence[str]) -> Callable[..., Any]:
    """Return the function of an entry. It closes over ``f``, so that the parameters of all entries are the same, as
    "f.NAME"."""
    f, count, wrt, batched = call.f, len(call.args), call.wrt, call.any_batched
    keys = [call.names[i] for i in wrt]

    def value(*args: torch.Tensor) -> Any:
        return f(*args)

    def derivative(*args: Any) -> Any:
        xs = [args[i].detach().requires_grad_() for i in wrt]
        at = list(args[:count])
        for i, x in zip(wrt, xs, strict=True):
            at[i] = x
        with torch.enable_grad():
            ys, spec = pytree.tree_flatten(f(*at))
            if kind == "jacobian":
                return pytree.tree_unflatten([_by_key(keys, _rows(y, xs, batched)) for y in ys], spec)
            if kind == "jvp":
                return pytree.tree_unflatten(_pushed(ys, xs, args[count:]), spec)
            seeds = pytree.tree_leaves(args[count])
            pulled = _pulled(ys, xs, seeds, create_graph=kind != "vjp")
            if kind == "vjp":
                return _by_key(keys, pulled)
            if kind == "hvp":
                return _by_key(keys, _pulled(pulled, xs, args[count + 1 :]))
            return {key: _by_key(keys, _rows(g, xs, batched)) for key, g in zip(keys, pulled, strict=True)}

    program: Any = value if kind == "value" else derivative
    program.__name__ = program.__qualname__ = kind
    program.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    return program


def _by_key(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: t.detach() for key, t in zip(keys, tensors, strict=True)}


def _pulled(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], *, create_graph: bool = False
) -> list[torch.Tensor]:
    """Return the gradients of the sum of ``ys`` times ``seeds`` by ``xs``: zeros where there is no dependence."""
    pairs = [(y, seed) for y, seed in zip(ys, seeds, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    outputs, weights = zip(*pairs, strict=True)
    return list(
        torch.autograd.grad(
            outputs,
            xs,
            weights,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    )


def _rows(y: torch.Tensor, xs: Sequence[torch.Tensor], batched: bool) -> list[torch.Tensor]:
    """Return the Jacobian of ``y`` by each of ``xs``, a backward for each element of a point's ``y``."""
    points, shape = (y.shape[:1], y.shape[1:]) if batched else ((), y.shape)
    count = math.prod(shape)
    columns = y.reshape(*points, count)
    rows = [_pulled([c], xs, [torch.ones_like(c)]) for c in (columns[..., k] for k in range(count))]
    return [
        torch.stack([row[i] for row in rows], len(points)).reshape(*points, *shape, *x.shape[len(points) :])
        for i, x in enumerate(xs)
    ]


def _pushed(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the Jacobian of ``ys`` times ``tangents``: the gradient, by the seed, of the pulled-back seed times
    ``tangents``."""
    seeds = [torch.zeros_like(y).requires_grad_() for y in ys]
    pulled = _pulled(ys, xs, seeds, create_graph=True)
    return [t.detach() for t in _pulled(pulled, seeds, tangents)]
