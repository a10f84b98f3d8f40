"""Values that can be told apart by text: numbers, texts, dtypes, functions, and containers and configurations of such."""

from __future__ import annotations

import abc
import argparse
import enum
import functools
import hashlib
import sys
import types
import typing
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(Ellipsis))
_NUMBERS_AND_TEXTS = int, float, complex, str, bytes  # of subclasses the value of that kind counts
_NAMESPACES = types.SimpleNamespace, argparse.Namespace
_EMPTY_BASES = object, abc.ABC, typing.Generic, typing.Protocol
PASSED_OVER = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "aot_backward", "aot_backward_runtime", "aot_backward_exporters"}
"""Packages whose code is taken as known."""
_DEEPEST = 12
_LONGEST = 200  # characters of a text that is kept as it is


class NotPlain(Exception):
    """Something whose changes could not be seen. The text says what and where."""


@dataclass
class Watch:
    """Containers as they were. :meth:`same` compares the objects in them by identity: what was put in the place of an equal one may be seen as a
    change, no change is seen as none."""

    mappings: list[tuple[Mapping[Any, Any], list[Any], list[Any]]] = field(default_factory=list)
    sequences: list[tuple[Any, list[Any]]] = field(default_factory=list)
    places: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    """A namespace, a name in it, and what it was."""
    submodules: list[tuple[Mapping[str, Any], list[str], list[weakref.ref[Any] | None]]] = field(default_factory=list)
    """The ``_modules`` of a module, which are also written into directly, such as by ``Sequential.insert``. It keeps none of them alive."""

    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    """Of functions with a closure: what was in each."""
    parts: dict[int, str] = field(default_factory=dict)
    """Names of the submodules, by ``id``: a closure may hold one."""

    def add_submodules(self, mapping: Mapping[str, Any]) -> None:
        self.submodules.append((mapping, list(mapping), [None if m is None else weakref.ref(m) for m in mapping.values()]))

    def same(self) -> bool:
        for mapping, keys, values in self.mappings:
            if len(mapping) != len(keys) or not all(map(is_, mapping.values(), values)) or list(mapping) != keys:
                return False
        for sequence, values in self.sequences:
            if len(sequence) != len(values) or not all(map(is_, sequence, values)):
                return False
        for mapping, keys, parts in self.submodules:
            if list(mapping) != keys or not all([m is (r and r()) for m, r in zip(mapping.values(), parts, strict=True)]):  # noqa: C419
                return False
        if not all([cell.cell_contents is value for cell, value in self.cells]):  # noqa: C419
            return False
        return all([names.get(name, _GONE) is value for names, name, value in self.places])  # noqa: C419 # a generator takes twice as long


_GONE = object()


def text_of(value: Any, where: str, watch: Watch | None = None, depth: int = 0) -> str:
    """``value`` as text, equal for equal values in every process. :class:`NotPlain` names what cannot be told, and ``where`` it is. Containers are
    added to ``watch``."""
    if depth > _DEEPEST:
        raise NotPlain(f"{where} is nested more than {_DEEPEST} deep, or holds itself")
    kind = type(value)
    if kind in _ATOMS:
        return shortened(repr(value))
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
    if isinstance(value, (tuple, list, set, frozenset)):
        parts = [text_of(v, f"{where}[{i}]", watch, depth + 1) for i, v in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            parts.sort()
        if watch is not None and not isinstance(value, tuple):
            watch.sequences.append((value, list(value)))
        return shortened(f"{kind.__name__}({', '.join(parts)})")
    if isinstance(value, (dict, types.MappingProxyType)):
        inner = [
            f"{text_of(k, f'a key of {where}', None, depth + 1)}: {text_of(v, f'{where}[{k!r:.40}]', watch, depth + 1)}" for k, v in value.items()
        ]
        if watch is not None:
            watch.mappings.append((value, list(value), list(value.values())))
        return shortened(f"{kind.__name__}({', '.join(inner)})")
    if isinstance(value, functools.partial):
        return shortened(f"partial({', '.join(text_of(v, where, watch, depth + 1) for v in (value.func, value.args, value.keywords))})")
    if isinstance(value, type) or kind in _FUNCTIONS:
        return named(value, where, watch, depth)
    if kind.__module__ == "numpy" and any(k.__name__ == "generic" for k in kind.__mro__) and kind.__name__ not in ("void", "object_"):
        return f"numpy.{kind.__name__}({value.item()!r})"  # a scalar, which nobody can change
    for base in _NUMBERS_AND_TEXTS:
        if isinstance(value, base):
            return shortened(f"{kind.__module__}.{kind.__qualname__}({base.__repr__(value)})")
    if not hasattr(value, "__dict__") or not _is_all_in_its_dict(kind):
        raise NotPlain(f"{where} is a {kind.__module__}.{kind.__qualname__}, whose changes could not be seen")
    own = vars(value)
    return shortened(f"{kind.__module__}.{kind.__qualname__}({text_of(own, where, watch, depth + 1)})")


def is_known(module: str | None) -> bool:
    """Whether code of a module of that name is taken as known: PyTorch's, numpy's, the standard library's."""
    return str(module).partition(".")[0] in PASSED_OVER


def _is_all_in_its_dict(kind: type) -> bool:
    """Whether objects of a class have no state but their ``__dict__``: no tensor, no generator of random numbers, nothing of a library in C."""
    return all(base in _NAMESPACES or base in _EMPTY_BASES or not is_known(base.__module__) for base in kind.__mro__)


_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType


def named(value: Any, where: str, watch: Watch | None = None, depth: int = 0) -> str:
    """A class or function by its name; a function of Python also by its code, and by what is in its closure: a submodule, or what is plain."""
    name = f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.FunctionType):
        held = [_held(n, c, where, watch, depth) for n, c in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)]
        return shortened(f"{name} {code_digest(value, watch)} {' '.join(held)}".rstrip())
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, (types.ModuleType, type, type(None))):
        raise NotPlain(f"{where} is {name} of a {type(value.__self__).__qualname__}, whose changes could not be seen")
    return name


def _held(name: str, cell: types.CellType, where: str, watch: Watch | None, depth: int) -> str:
    try:
        value = cell.cell_contents
    except ValueError:
        raise NotPlain(f"{where} has a closure in which {name} is nothing yet") from None
    if watch is not None:
        watch.cells.append((cell, value))
        if id(value) in watch.parts:
            return f"{name}=the submodule {watch.parts[id(value)]!r}"
    return f"{name}={text_of(value, f'{name}, in the closure of {where},', watch, depth + 1)}"


def shortened(text: str) -> str:
    """``text``; of a long one the beginning and its digest."""
    return text if len(text) <= _LONGEST else f"{text[:60]}… {hashlib.sha256(text.encode()).hexdigest()}"


def code_digest(function: types.FunctionType, watch: Watch | None = None) -> str:
    """SHA-256 of a function's code, with what is nested in it, and of its default arguments, which are added to ``watch``."""
    digest = hashlib.sha256()
    _add_code(digest, function.__code__)
    for value in (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())):
        try:
            digest.update(text_of(value, "a default argument", watch).encode())
        except NotPlain:
            digest.update(type(value).__qualname__.encode())
    return digest.hexdigest()


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code)
    constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
    # a frozenset's repr is in the order of its hashes, which differs from process to process
    words = [repr(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c) for c in constants]
    digest.update(repr((words, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
