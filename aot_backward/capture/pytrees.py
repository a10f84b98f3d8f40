"""Convert PyTorch's pytrees to the package's own :class:`Tree`, and name the leaves for error messages."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Tree


def describe(value: Any, leaf: Callable[[Any, str], Tree], path: str = "") -> Tree:
    """Return ``value`` as a :class:`Tree`; ``leaf(x, path)`` makes the tree of each leaf, in PyTorch's flattening
    order."""
    kind = type(value)
    if kind in (tuple, list):
        return Tree(kind.__name__, children=tuple(describe(v, leaf, f"{path}[{i}]") for i, v in enumerate(value)))
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise ExportError(
                    f"{path or 'the structure'}: a dict key is a {type(key).__name__}; a package supports str and int keys"
                )
        return Tree(
            "dict", keys=tuple(value), children=tuple(describe(v, leaf, f"{path}[{k!r}]") for k, v in value.items())
        )
    if isinstance(value, tuple) and pytree.is_namedtuple_class(kind):
        fields = kind._fields
        children = tuple(describe(getattr(value, f), leaf, f"{path}.{f}") for f in fields)
        return Tree("namedtuple", type_name=f"{kind.__module__}.{kind.__qualname__}", keys=fields, children=children)
    if kind in pytree.SUPPORTED_NODES:
        flatten = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
        if flatten is None:
            raise ExportError(
                f"{path or 'the structure'} is a {kind.__name__}, registered as a pytree without key names; return a dict instead"
            )
        pairs, _ = flatten(value)
        keys = tuple(_key(k) for k, _ in pairs)
        children = tuple(describe(v, leaf, f"{path}.{k}") for k, (_, v) in zip(keys, pairs, strict=True))
        return Tree("object", type_name=f"{kind.__module__}.{kind.__qualname__}", keys=keys, children=children)
    return leaf(value, path)


def constant(value: Any, path: str) -> Tree:
    """Return the tree of a leaf that is not a tensor."""
    if type(value) is float and not math.isfinite(value):
        raise ExportError(
            f"{path or 'a leaf'} is {value}, which a package cannot hold as a constant; pass it as a tensor"
        )
    if value is None or type(value) in (bool, int, float, str):
        return Tree("constant", value=value)
    raise ExportError(
        f"{path or 'a leaf'} is a {type(value).__name__}; a package takes tensors, None, bool, int, float and str"
    )


def input_names(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the name of each leaf of ``(args, kwargs)`` in flattening order (``x``, ``batch['ids']``), and the
    positional parameters' names."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(len(args) - len(names))]
    leaves: list[str] = []

    def note(_: Any, path: str) -> Tree:
        leaves.append(path)
        return Tree("constant")

    for name, value in zip(names, args, strict=False):
        describe(value, note, name)
    for name, value in kwargs.items():
        describe(value, note, name)
    return leaves, tuple(names[: len(args)])


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def _key(key: Any) -> str | int:
    if isinstance(key, pytree.MappingKey):
        return key.key
    if isinstance(key, pytree.GetAttrKey):
        return key.name
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    raise ExportError(f"a pytree key of type {type(key).__name__} cannot be written into a package")
