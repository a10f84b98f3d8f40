"""What a module computes with beside its tensors, as texts: classes, attributes, code that ran, globals that the code reads.

A compiled call is that of one such list of facts. They are compared when a live module is bound, and again whenever something may have changed.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .plain_values import NotPlain, Watch, code_digest, is_known, named, text_of

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has: tensors, submodules, hooks and the mode, which are looked at otherwise."""
CLASS, CODE, GLOBAL, OF_CLASS = "class of ", "code of ", "global ", "class attribute "
DEFAULT_DTYPE = "default dtype"
UNTOLD = "cannot be told: "


def attributes(module: nn.Module, read: Container[str] | None = None, watch: Watch | None = None) -> dict[str, str]:
    """The classes of all submodules, and the plain attributes of each: of PyTorch's layers all, of user code those whose names are in ``read``.
    :class:`NotPlain` names one that cannot be told. Without ``read``, all, and the text of one that cannot be told begins with :data:`UNTOLD`."""
    found: dict[str, str] = {}
    watch = watch if watch is not None else Watch()
    watch.parts.update((id(part), name) for name, part in module.named_modules() if name)  # not itself: nothing here may keep it alive
    for name, part in module.named_modules(remove_duplicate=False):
        kind = type(part)
        if part._modules:
            watch.add_submodules(part._modules)
        found[f"{CLASS}{name or 'the module'}"] = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(part, torch.jit.ScriptModule):
            raise NotPlain(f"{name or 'the module'} is TorchScript")
        # PyTorch's own code reads what its layers have
        wanted = None if any(is_known(k.__module__) for k in kind.__mro__ if k not in (nn.Module, object)) else read
        for key, value in vars(part).items():
            if key not in _OF_MODULES and (wanted is None or key in wanted):
                place = f"{name}.{key}" if name else key
                try:
                    found[place] = text_of(value, place, watch)
                except NotPlain as error:
                    if key.startswith("_") and is_known(kind.__module__):
                        continue  # PyTorch's own layers keep what they need, such as lists of weights
                    if read is not None:
                        raise
                    found[place] = f"{UNTOLD}{error}"
        for key, owner in _class_attributes(kind):
            place = f"{OF_CLASS}{owner.__module__}.{owner.__qualname__}.{key}"
            if place not in found and (wanted is None or key in wanted):
                value = vars(owner)[key]
                found[place] = text_of(_of_static(value), place, watch)
                watch.places.append((vars(owner), key, value))
    return found


def _class_attributes(kind: type) -> Iterator[tuple[str, type]]:
    """Plain attributes of the classes of user code, and functions that were defined elsewhere (``act = staticmethod(torch.relu)``): methods,
    properties and what Python makes itself are no such."""
    for owner in kind.__mro__:
        if is_known(owner.__module__):
            continue
        for key, value in vars(owner).items():
            if not (key.startswith("__") and key.endswith("__")) and (is_plain(value) or _is_from_elsewhere(_of_static(value), owner, key)):
                yield key, owner


def _of_static(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


def _is_from_elsewhere(value: Any, owner: type, key: str) -> bool:
    return _is_told_function(value) and value.__qualname__ != f"{owner.__qualname__}.{key}"


def is_plain(value: Any) -> bool:
    if isinstance(value, (type, staticmethod, classmethod, property, torch.Tensor)) or hasattr(type(value), "__get__"):
        return False
    try:
        text_of(value, "")
    except NotPlain:
        return False
    return True


def resolved(name: str) -> types.FunctionType:
    """The function whose code has that name, ``module:qualname``; :class:`NotPlain` where none is found."""
    module, _, qualname = name.partition(":")
    place: Any = sys.modules.get(module)
    outer = qualname.partition(".<locals>")[0]
    for part in outer.split("."):
        try:
            place = inspect.getattr_static(place, part)
        except AttributeError:
            raise NotPlain(f"the function {qualname} of {module} is not found by its name") from None
    for function in _wrapped(place):
        if function.__code__.co_qualname == outer:
            return function
    raise NotPlain(f"the function {qualname} of {module} is not found by its name: another one is there")


def _wrapped(place: Any) -> Iterator[types.FunctionType]:
    """The functions that a class or module has in a place, decorated ones with what they decorate."""
    pending, seen = [place], set[int]()
    while pending:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod)):
            pending.append(value.__func__)
        elif isinstance(value, property):
            pending += [f for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, types.FunctionType):
            yield value
            pending += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        if hasattr(value, "__wrapped__"):
            pending.append(value.__wrapped__)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def code_facts(names: Iterable[str], watch: Watch | None = None) -> dict[str, str]:
    """What the code of the functions of those names (``module:qualname``) is."""
    found = {}
    for name in names:
        function = resolved(name)
        found[f"{CODE}{name}"] = code_digest(function, watch)
        if watch is not None:
            watch.places.append(_place_of(name))
    return found


def _place_of(name: str) -> tuple[Mapping[str, Any], str, Any]:
    """Where a function is looked up, and what is there."""
    module, _, qualname = name.partition(":")
    *path, last = qualname.partition(".<locals>")[0].split(".")
    owner: Any = sys.modules[module]
    for part in path:
        owner = inspect.getattr_static(owner, part)
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        if last in vars(holder):
            return vars(holder), last, vars(holder)[last]
    raise NotPlain(f"the function {qualname} of {module} is not found by its name")


def global_facts(names: Iterable[str], watch: Watch | None = None) -> dict[str, str]:
    """Values of globals, ``module:name`` or ``module:name.attribute``; :class:`NotPlain` where one is gone, or is of another kind now."""
    found = {}
    for name in names:
        module, _, path = name.partition(":")
        place: Any = sys.modules.get(module)
        first, _, attribute = path.partition(".")
        names_there = vars(place) if place is not None else {}
        if first not in names_there:
            raise NotPlain(f"the global {path} of {module} is gone")
        value = names_there[first]
        if watch is not None:
            watch.places.append((names_there, first, value))
        if attribute:
            if attribute not in vars(value):
                raise NotPlain(f"the global {path} of {module} is gone")
            if watch is not None:
                watch.places.append((vars(value), attribute, vars(value)[attribute]))
            value = vars(value)[attribute]
        found[f"{GLOBAL}{name}"] = text_of(value, f"the global {path}", watch)
    return found


def globals_read(function: types.FunctionType) -> list[str]:
    """Names of the plain globals that a function's code may read. :class:`NotPlain` where it reads a tensor or a module, whose changes could not be
    seen."""
    found = []
    where, module = function.__globals__, function.__module__
    names = set(_names(function.__code__))
    for name in sorted(set(_loaded(function.__code__)) & where.keys()):
        value = where[name]
        if isinstance(value, (torch.Tensor, nn.Module)):
            raise NotPlain(f"{function.__qualname__} reads the global {name}, a {type(value).__qualname__}, whose changes could not be seen")
        if isinstance(value, types.ModuleType):
            if not is_known(value.__name__):
                found += [f"{module}:{name}.{a}" for a in sorted(names & vars(value).keys()) if is_plain(vars(value)[a])]
        elif not (name.startswith("__") and name.endswith("__")) and (is_plain(value) or _is_told_function(value)):
            found.append(f"{module}:{name}")
        elif type(value) in (dict, list, tuple, set) or type(value).__module__ == "numpy":
            raise NotPlain(f"{function.__qualname__} reads the global {name}, a {type(value).__qualname__}, whose changes could not be seen")
    return found


def _is_told_function(value: Any) -> bool:
    """Whether ``value`` is a function that can be told from another one: a global may name one of several."""
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    try:
        named(value, "")
    except NotPlain:
        return False
    return True


def names_in(functions: Iterable[str]) -> set[str]:
    """Every name and text in the code of functions (``module:qualname``): an attribute that is not among them is read and written by none of them,
    unless its name is put together. Of a function that was made in another one, what is nested in that counts, and not the whole."""
    found: set[str] = set()
    for name in functions:
        code = resolved(name).__code__
        for part in [code] if ".<locals>" not in name else [c for c in code.co_consts if isinstance(c, types.CodeType)]:
            found.update(_names(part), _texts(part))
    return found


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _loaded(code: types.CodeType) -> Iterator[str]:
    """Names that are looked up among the globals, and not those of attributes."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loaded(constant)


def difference(recorded: Mapping[str, str], found: Mapping[str, str]) -> str:
    """In words, the first fact that is another one now."""
    for name, text in recorded.items():
        if name not in found:
            return f"{name} is gone; recorded was {text:.80}"
        if found[name] != text:
            return f"{name} is another one than was recorded" if name.startswith(CODE) else f"{name} is {found[name]:.80}; recorded was {text:.80}"
    added = next((name for name in found if name not in recorded), None)
    return f"{added} is {found[added]:.80}; when it was recorded there was none" if added is not None else ""
