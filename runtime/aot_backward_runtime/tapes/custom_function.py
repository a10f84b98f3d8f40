"""Check whether the backward of a custom ``autograd.Function`` can be compiled, and digest everything that its result
depends on.

A graph holds only the computation of the backward, without other reads or side effects. So a backward is compiled only
if it has none: one function without closure that only reads its gradients, saved tensors and plain numbers of its
context, and only calls torch's operators and the builtins listed here. Its code and those numbers are in the digest,
which is part of the tape's fingerprint. Every other custom function is called in its place, as in eager.
"""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from .interpreter import MATERIALIZE, backward_of

_BUILTINS = frozenset({
    "abs", "all", "any", "complex", "enumerate", "float", "int", "len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sum",
    "tuple", "zip",
})  # fmt: skip
_MODULES = ("torch", "math")
_STRUCTURE = frozenset(
    [
        "saved_tensors",
        "needs_input_grad",
        "shape",
        "dtype",
        "device",
        "ndim",
        "T",
        "mT",
        "H",
        "mH",
        "float",
        "double",
        "half",
        "bfloat16",
        "type_as",
        "nn",
        "functional",
        "special",
        "linalg",
        "fft",
        "pi",
        "e",
        "inf",
        "sqrt",
        "exp",
        "log",
        "append",
        "items",
    ]
)
"""Allowed attributes that are not operators."""
_REFUSED = frozenset(
    [
        "item",
        "data",
        "record_stream",
        "retain_grad",
        "requires_grad_",
        "set_",
        "resize_",
        "resize_as_",
        "from_file",
        "fill_diagonal_",
        "backward",
    ]
)
_RANDOM = (
    "rand",
    "bernoulli",
    "normal",
    "uniform",
    "dropout",
    "multinomial",
    "poisson",
    "exponential",
    "geometric",
    "cauchy",
    "seed",
)
_WRITES = frozenset({
    "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "IMPORT_NAME", "YIELD_VALUE", "SEND", "STORE_DEREF", "DELETE_DEREF",
})  # fmt: skip
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _Unplain(Exception):
    """Raised for code or data that a graph cannot hold."""


class PlainContext:
    """The part of a custom function's context that the digest covers: all but its tensors."""

    def __init__(self, context: Any):
        self.__dict__.update(context.__dict__)
        self._forward_cls, self.needs_input_grad = context._forward_cls, tuple(context.needs_input_grad)
        self._name, self._code = context.name(), _code_of(context._forward_cls)
        self._numbers = repr(context.__dict__)

    def name(self) -> str:
        return self._name

    def fits(self, context: Any) -> bool:
        """Return whether ``context`` has the same digest. This runs on every pass. ``repr`` distinguishes -0.0 from 0.0
        and 1 from True."""
        return (
            context._forward_cls is self._forward_cls
            and repr(context.__dict__) == self._numbers
            and context.needs_input_grad == self.needs_input_grad
            and _code_of(self._forward_cls) is self._code
        )


def digest_of(context: Any) -> str:
    """Return the SHA-256 of the backward's code and of the numbers that it reads, or "" if it cannot be compiled."""
    function = context._forward_cls
    try:
        if hasattr(function, "_aot_id"):
            raise _Unplain
        parts = [f"{function.__module__}.{function.__qualname__}", repr(tuple(context.needs_input_grad))]
        for name, value in sorted(context.__dict__.items()):
            parts.append(f"{name}={_plain(value) if name != MATERIALIZE else bool(value)}")
        parts += _read(backward_of(function), frozenset(context.__dict__) - {MATERIALIZE})
    except _Unplain:
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _code_of(function: Any) -> Any:
    return getattr(backward_of(function), "__code__", None)


def _read(function: Any, own: frozenset[str]) -> Iterator[str]:
    """Yield the contents of the digest for ``function``. ``own``: names of the context's numbers."""
    if (
        type(function) is not types.FunctionType
        or function.__code__.co_freevars
        or function.__defaults__
        or function.__kwdefaults__
    ):
        raise _Unplain
    for code in _nested(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _WRITES:
                raise _Unplain
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in own and not _is_allowed(step.argval):
                raise _Unplain
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield _global(step.argval, function.__globals__)
        yield code.co_code.hex()
        yield repr([c for c in code.co_consts if not isinstance(c, types.CodeType)])
        yield repr((code.co_names, code.co_varnames, code.co_flags))


def _global(name: str, names: dict[str, Any]) -> str:
    value = names.get(name)
    if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _MODULES:
        return f"{name}: {value.__name__}"
    if name in names or name not in _BUILTINS:
        raise _Unplain
    return name


@cache
def _is_allowed(name: str) -> bool:
    """Return whether an attribute of that name is allowed: a pure torch operator, a dtype, or one of the names
    above."""
    if name in _STRUCTURE or isinstance(getattr(torch, name, None), torch.dtype):
        return True
    if name in _REFUSED or name.startswith(("_", "is_", "get_", "set_")) or any(word in name for word in _RANDOM):
        return False
    return hasattr(torch.ops.aten, name)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, torch.Size)):
        return f"({', '.join(map(_plain, value))})"
    if type(value) in _PLAIN:
        return repr(value)
    raise _Unplain
