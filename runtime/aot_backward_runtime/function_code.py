"""Whether the backward of a custom ``autograd.Function`` may become part of a compiled graph, and a digest of all that its result depends on.

A graph holds what the backward computes, not what else it does. So it is taken in only where the code plainly does nothing else: it calls
torch's operators and a few builtins, reads plain numbers, and keeps nothing. All that it reads is in the digest, which is part of the tape's
fingerprint; everything else is called at its place, as eager would.
"""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from .interpreter import MATERIALIZE, backward_of

_BUILTINS = frozenset({
    "abs", "all", "any", "bool", "complex", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "map", "max", "min", "pow", "range",
    "reversed", "round", "slice", "sorted", "sum", "tuple", "zip", "ValueError", "RuntimeError", "TypeError", "AssertionError",
    "NotImplementedError", "staticmethod",
})  # fmt: skip
_MODULES = ("torch", "math", "operator")
_REFUSED = frozenset(
    [
        "backward",
        "grad",
        "item",
        "tolist",
        "numpy",
        "distributed",
        "cuda",
        "save",
        "load",
        "seed",
        "manual_seed",
        "get_rng_state",
        "set_rng_state",
        "random",
        "bernoulli",
        "bernoulli_",
        "dropout",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "autograd",
        "compile",
        "compiler",
        "jit",
        "fork",
        "wait",
        "queue_callback",
        "save_for_backward",
        "register_hook",
        "retain_grad",
        "requires_grad_",
        "set_",
        "resize_",
        "data",
        "share_memory_",
        "apply",
    ]
)
"""Names of attributes with an effect or a source that a graph would not have: other gradients, values, random numbers, other processes."""
_WRITES = frozenset(
    {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "IMPORT_NAME", "YIELD_VALUE", "SEND", "DELETE_DEREF"}
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEPEST = 8  # functions that call functions


class _Unplain(Exception):
    """Something that a graph could not hold."""


class PlainContext:
    """A custom function's context without its tensors: what of it the digest covers."""

    def __init__(self, context: Any):
        attributes = dict(context.__dict__)
        self.__dict__.update(attributes)
        self.attributes, self._forward_cls, self.needs_input_grad = attributes, context._forward_cls, tuple(context.needs_input_grad)
        self._name = context.name()

    def name(self) -> str:
        return self._name

    def fits(self, context: Any) -> bool:
        """Whether ``context`` has the same digest; a few comparisons, on every pass."""
        return context._forward_cls is self._forward_cls and context.__dict__ == self.attributes and context.needs_input_grad == self.needs_input_grad


def digest_of(context: Any) -> str:
    """SHA-256 of the backward's code and of what it reads, or "" where it must be called as it is."""
    function = context._forward_cls
    if hasattr(function, "_aot_id") or type(function).__module__ not in ("torch.autograd.function", "builtins"):
        return ""
    try:
        parts = [f"{function.__module__}.{function.__qualname__}", repr(tuple(context.needs_input_grad))]
        for name, value in sorted(context.__dict__.items()):
            parts.append(f"{name}={_plain(value)}" if name != MATERIALIZE else f"{name}={bool(value)}")
        parts += _code(backward_of(function), set(), 0)
    except _Unplain:
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _code(function: Any, seen: set[int], depth: int) -> Iterator[str]:
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or depth > _DEEPEST:
        raise _Unplain
    if id(function) in seen:
        return
    seen.add(id(function))
    yield from _instructions(function.__code__)
    yield _plain(function.__defaults__)
    yield _plain(tuple(sorted((function.__kwdefaults__ or {}).items())))
    for name in sorted({n for code in _nested(function.__code__) for n in _globals(code)}):
        if name in function.__globals__:
            yield from _reached(name, function.__globals__[name], seen, depth)
        elif name not in _BUILTINS:
            raise _Unplain
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield from _reached(name, cell.cell_contents, seen, depth)
        except ValueError:
            raise _Unplain from None


def _reached(name: str, value: Any, seen: set[int], depth: int) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        if value.__name__.partition(".")[0] not in _MODULES:
            raise _Unplain
        yield f"{name}: module {value.__name__}"
    elif isinstance(value, types.FunctionType) and not value.__module__.startswith("torch."):
        yield name
        yield from _code(value, seen, depth + 1)
    elif getattr(value, "__module__", "").partition(".")[0] in _MODULES and isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if getattr(value, "__name__", "") in _REFUSED:
            raise _Unplain
        yield f"{name}: {value.__module__}.{value.__qualname__}"
    else:
        yield f"{name}: {_plain(value)}"


def _instructions(code: types.CodeType) -> Iterator[str]:
    for nested in _nested(code):
        for step in dis.get_instructions(nested):
            if step.opname in _WRITES or (step.opname == "STORE_DEREF" and step.argval in nested.co_freevars):
                raise _Unplain
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in _REFUSED:
                raise _Unplain
        yield nested.co_code.hex()
        yield repr([c for c in nested.co_consts if not isinstance(c, types.CodeType)])
        yield repr((nested.co_names, nested.co_varnames, nested.co_freevars, nested.co_flags))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _globals(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, torch.Size)):
        return f"({', '.join(map(_plain, value))})"
    if type(value) in _PLAIN:
        return repr(value)
    raise _Unplain
