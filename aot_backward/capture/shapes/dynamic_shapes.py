"""Convert ``dynamic_shapes`` as callers write it to the one form that ``torch.export`` takes for every signature: by
argument name.

Other accepted forms: ``torch.export.ShapesCollection`` and ``AdditionalInputs``; for ``forward(self, *args)`` a tuple
that follows the arguments; for ``**kwargs`` the keywords' own names; dimensions counted from the last (-1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import AdditionalInputs, Dim, ShapesCollection
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError

from .symbolic_shapes import expression_of

_Hint = type(Dim.AUTO)


def normalized(
    shapes: Any, signature: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return ``shapes`` by argument name, or None if all sizes are fixed; raise :class:`ExportError` if they do not
    fit. ``args``, ``kwargs``: the caller's own objects, which a ShapesCollection finds by identity."""
    parameters = inspect.signature(signature)
    bound = parameters.bind(*args, **(kwargs or {})).arguments
    try:
        if isinstance(shapes, ShapesCollection | AdditionalInputs):
            shapes = shapes.dynamic_shapes(signature, args, dict(kwargs or {}))
        if shapes is None or (isinstance(shapes, Sequence | Mapping) and not len(shapes)):
            return None
        if not isinstance(shapes, dict | tuple | list):
            raise TypeError(f"it is a {type(shapes).__name__}")
        by_name = _by_name(shapes, parameters, bound)
        if by_name.keys() == bound.keys():
            by_name = dict(torch_api._tree_map_with_path(_sizes_of_tensor, bound, by_name, tree_name="inputs"))
        torch_api._check_dynamic_shapes(bound, by_name)
        return by_name
    # torch.export's own checks raise UserError, ValueError, AssertionError, TypeError, RuntimeError
    except Exception as error:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ExportError(
            f"dynamic_shapes does not fit the example: {cause}. Give sizes by argument, {{'x': {{0: Dim('batch', min=1, max=64)}}}}, and None for an "
            f"argument with fixed sizes. The example has {f'the arguments {list(bound)}' if bound else 'no arguments'}"
        ) from error


def _by_name(shapes: Any, signature: inspect.Signature, bound: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {name: signature.parameters[name].kind for name in bound}
    varargs = next((n for n, k in kinds.items() if k is inspect.Parameter.VAR_POSITIONAL), None)
    keywords = next((n for n, k in kinds.items() if k is inspect.Parameter.VAR_KEYWORD), None)
    names = list(bound)
    if isinstance(shapes, dict):
        if keywords is not None and keywords not in shapes:
            keyword_shapes = {n: v for n, v in shapes.items() if n in bound[keywords]}
            return {**{n: v for n, v in shapes.items() if n not in keyword_shapes}, keywords: keyword_shapes}
        return shapes
    elements = list(shapes)
    if varargs is not None:
        start, count = names.index(varargs), len(bound[varargs])
        grouped = len(elements) == len(names) and _is_group(elements[start], count)
        if not grouped and len(elements) == len(names) - 1 + count:
            elements[start : start + count] = [tuple(elements[start : start + count])]
    if len(elements) != len(names):
        raise ValueError(
            f"it has {len(elements)} elements for {len(names)} arguments{f' ({varargs!r} is a tuple, and counts as one)' if varargs else ''}"
        )
    return dict(zip(names, elements, strict=True))


def _is_group(shape: Any, count: int) -> bool:
    """Return whether ``shape`` stands for ``count`` arguments and not for the sizes of one tensor."""
    return (
        isinstance(shape, tuple | list)
        and len(shape) == count
        and all(s is None or isinstance(s, dict | tuple | list) for s in shape)
    )


def _sizes_of_tensor(path: Any, value: Any, shape: Any) -> Any:
    """Return the sizes of one tensor by dimension, counted from the first. Return other shapes unchanged."""
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(shape, dict | tuple | list)
        or (type(shape) is not dict and len(shape) != value.dim())
    ):
        return shape  # None, or invalid: torch.export refuses it
    out = {}
    for dim, size in shape.items() if isinstance(shape, dict) else enumerate(shape):
        if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
            raise ValueError(f"the tensor at {_written(path)} has {value.dim()} dimensions and no dimension {dim!r}")
        if dim % value.dim() in out:
            raise ValueError(f"dimension {dim % value.dim()} of the tensor at {_written(path)} is given twice")
        if isinstance(size, _Hint) and not (size.min or 0) <= value.shape[dim] <= (
            value.shape[dim] if size.max is None else size.max
        ):
            raise ValueError(
                f"dimension {dim} of the example at {_written(path)} is {value.shape[dim]}, not within {size!r}"
            )
        out[dim % value.dim()] = Dim.STATIC if size is None else size
    return out


def _written(path: Any) -> str:
    return str(pytree.keystr(path))


def declared(
    shapes: Mapping[str, Any] | None, signature: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[int, int, Any]]:
    """Return (index of the flat tensor, dimension, declared size). ``shapes``: from :func:`normalized`."""
    number = {
        id(v): i for i, v in enumerate(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
    }
    out: list[tuple[int, int, Any]] = []

    def note(path: Any, value: Any, shape: Any) -> None:
        if isinstance(value, torch.Tensor):
            out.extend((number[id(value)], dim, size) for dim, size in (shape or {}).items())

    if shapes:
        torch_api._tree_map_with_path(
            note, inspect.signature(signature).bind(*args, **kwargs).arguments, shapes, tree_name="inputs"
        )
    return out


def is_hint(size: Any) -> bool:
    """Return whether it is ``Dim.AUTO`` or ``Dim.DYNAMIC``, with or without bounds."""
    return isinstance(size, _Hint) and size.type != Dim.STATIC.type


def with_fixed(shapes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return ``shapes`` with the ``Dim`` of that name, and sizes that follow from it (``2 * Dim("half")``), fixed."""

    def one(size: Any) -> Any:
        return Dim.STATIC if isinstance(size, Dim) and getattr(size, "root", size).__name__ == name else size

    return dict(pytree.tree_map(one, dict(shapes)))


def left_fixed(
    declared_sizes: Sequence[tuple[int, int, Any]], names: Sequence[str], inputs: Sequence[torch.Tensor]
) -> list[str]:
    """Return dimension and value of each size that was left to the trace (``Dim.AUTO``) and came out fixed. ``inputs``:
    the trace's."""
    fixed_dims = [
        (i, d) for i, d, size in declared_sizes if is_hint(size) and expression_of(inputs[i].shape[d]).is_Integer
    ]
    return [f"{names[i]}.shape[{d}] = {inputs[i].shape[d]}" for i, d in fixed_dims]
