"""Flatten nested arguments to tensors, and unflatten results, by a package's :class:`Tree`.

This does not use torch's pytree: a package names types but must not import them, and arguments are compared with the
exported ones leaf by leaf.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError, PackageError
from ..format.expressions import evaluate
from ..format.manifest import Tree

Types = Mapping[str, type]
"""Classes for results by "module.qualname", from ``load(types=…)``."""


def describe(tree: Tree) -> str:
    """Return the structure in one line, for messages: ``(Tensor, {'ids': Tensor}, None)``."""
    if tree.kind == "tensor":
        return "Tensor"
    if tree.kind == "constant":
        return repr(tree.value)
    if tree.kind == "size":
        return tree.expression
    inside = [describe(c) for c in tree.children]
    if tree.kind in ("dict", "object"):
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(tree.keys, inside, strict=True)) + "}"
    if tree.kind == "namedtuple":
        return f"{tree.type_name.rpartition('.')[2]}({', '.join(f'{k}={v}' for k, v in zip(tree.keys, inside, strict=True))})"
    return (
        f"[{', '.join(inside)}]" if tree.kind == "list" else f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    )


def flatten(tree: Tree, value: Any, out: list[torch.Tensor], where: str) -> None:
    """Append the tensors of ``value`` to ``out``. Raise :class:`InputError` with the path if ``value`` has another
    structure."""
    kind = tree.kind
    if kind == "tensor":
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{where} is {_short(value)}; expected a tensor")
        out.append(value)
    elif kind == "constant":
        # repr distinguishes 0.0 from -0.0, and NaN equals NaN
        if type(value) is not type(tree.value) or (
            repr(value) != repr(tree.value) if isinstance(value, (float, complex)) else value != tree.value
        ):
            raise InputError(
                f"{where} is {_short(value)}; the package was exported with {tree.value!r} there: export a variant for it"
            )
    elif kind in ("tuple", "list"):
        if not isinstance(value, (tuple, list)) or len(value) != len(tree.children):
            raise InputError(f"{where} is {_short(value)}; expected {describe(tree)}")
        for i, (child, v) in enumerate(zip(tree.children, value, strict=True)):
            flatten(child, v, out, f"{where}[{i}]")
    elif kind == "dict" or (kind == "object" and isinstance(value, Mapping)):
        if not isinstance(value, Mapping) or value.keys() != set(tree.keys):
            raise InputError(f"{where} is {_short(value)}; expected {describe(tree)}")
        for key, child in zip(tree.keys, tree.children, strict=True):
            flatten(child, value[key], out, f"{where}[{key!r}]")
    else:
        for key, child in zip(tree.keys, tree.children, strict=True):
            if not isinstance(key, str) or key not in dir(value):
                raise InputError(f"{where} is {_short(value)}; expected {describe(tree)}")
            flatten(child, getattr(value, key), out, f"{where}.{key}")


def unflatten(tree: Tree, tensors: Sequence[Any], sizes: Mapping[str, int], types: Types) -> Any:
    """Return the nested value that ``tree`` describes, with ``tensors`` at its leaves."""
    kind = tree.kind
    if kind == "tensor":
        return tensors[tree.index]
    if kind == "constant":
        return tree.value
    if kind == "size":
        return evaluate(tree.expression, sizes)
    children = [unflatten(c, tensors, sizes, types) for c in tree.children]
    if kind == "tuple":
        return tuple(children)
    if kind == "list":
        return children
    if kind == "namedtuple":
        return namedtuple_of(tree, types)(*children)
    if kind == "object" and tree.type_name in types:
        return types[tree.type_name](**dict(zip(map(str, tree.keys), children, strict=True)))
    if kind in ("dict", "object"):
        return dict(zip(tree.keys, children, strict=True))
    raise PackageError(f"a tree of unknown kind {kind!r}")


_NAMEDTUPLES: dict[tuple[str, tuple[str | int, ...]], type] = {}


def namedtuple_of(tree: Tree, types: Types) -> Callable[..., Any]:
    """Return the class given for ``tree.type_name``, else a namedtuple with that name and these fields, always the same
    one."""
    if tree.type_name in types:
        return types[tree.type_name]
    key = (tree.type_name, tree.keys)
    if key not in _NAMEDTUPLES:
        _NAMEDTUPLES[key] = collections.namedtuple(tree.type_name.rpartition(".")[2], [str(k) for k in tree.keys])
    return _NAMEDTUPLES[key]


def arguments(
    tree: Tree, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``args`` and ``kwargs`` as exported: move keyword arguments to their positions, or the reverse."""
    positional, keywords = tree.children
    if len(args) == len(positional.children) and kwargs.keys() == set(keywords.keys):
        return args, kwargs
    new_kwargs = dict(kwargs)
    new_args = list(args[: len(positional.children)])
    for name in names[len(new_args) : len(positional.children)]:
        if name not in new_kwargs:
            break
        new_args.append(new_kwargs.pop(name))
    for key, value in zip(
        [k for k in keywords.keys if k not in new_kwargs], args[len(positional.children) :], strict=False
    ):
        new_kwargs[str(key)] = value
    if (
        len(new_args) != len(positional.children)
        or new_kwargs.keys() != set(keywords.keys)
        or len(args) + len(kwargs) != len(new_args) + len(new_kwargs)
    ):
        expected = signature(tree, names)
        got = f"{len(args)} positional argument{'' if len(args) == 1 else 's'} and {f'the keywords {sorted(kwargs)}' if kwargs else 'no keywords'}"
        raise InputError(f"{got} do not fit; expected {expected}: export a variant for others")
    return tuple(new_args), new_kwargs


def signature(tree: Tree, names: Sequence[str]) -> str:
    """Return the arguments as text: ``(x=Tensor, mask=None)``."""
    positional, keywords = tree.children
    labels = [*names, *(f"args[{i}]" for i in range(len(names), len(positional.children)))]
    parts = [f"{n}={describe(c)}" for n, c in zip(labels, positional.children, strict=False)]
    parts += [f"{k}={describe(c)}" for k, c in zip(keywords.keys, keywords.children, strict=True)]
    return f"({', '.join(parts)})"


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else f"a {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        text += f" of {len(value)}"
    elif isinstance(value, Mapping):
        text += f" with the keys {sorted(map(str, value))}" if value else " without keys"
    return text[:120]
