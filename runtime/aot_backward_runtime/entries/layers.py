"""A module's description without its tensors: layer classes, their settings and hooks, and the source of classes
outside PyTorch."""

from __future__ import annotations

import hashlib
import inspect
import types
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from .. import torch_api
from ..format.manifest import LayerSpec

_PLAIN = bool, int, float, str, type(None), torch.dtype
_NAMED = type, types.FunctionType, types.BuiltinFunctionType
_NO_SETTINGS = "training", "forward"  # the mode, and the attached forward


def layers_of(module: nn.Module) -> tuple[LayerSpec, ...]:
    """Describe ``module`` (name "") and each submodule, under each of its names."""
    return tuple(
        LayerSpec(
            name,
            _kind(part),
            {setting: words for setting, value in _attributes(part) if (words := _words(value)) is not None},
            _source(type(part)),
            bool(torch_api.call_hooks(part)),
            has_other_forward(part),
        )
        for name, part in module.named_modules(remove_duplicate=False)
    )


def is_of_torch(layer: nn.Module) -> bool:
    """Return whether the layer's class is one of PyTorch's."""
    return type(layer).__module__.partition(".")[0] == "torch"


def setting_names(layer: nn.Module) -> list[str]:
    """Return a layer's attributes with a comparable text: ``p`` of a dropout, ``eps`` of a normalization, the
    activation of a transformer."""
    return [name for name, value in _attributes(layer) if _words(value) is not None]


def differences(exported: tuple[LayerSpec, ...], module: nn.Module) -> Iterator[tuple[bool, str]]:
    """Yield the differences between ``module`` and the exported one: whether each surely changes results, and a text.
    Layers that are new, gone, of another class or with a replaced forward are sure, and so are settings of PyTorch's
    layers. Attributes and source of other classes may differ harmlessly."""
    old_layers = {layer.name: layer for layer in exported}
    new_layers = {layer.name: layer for layer in layers_of(module)}
    for name in {**old_layers, **new_layers}:
        where = name or "the module"
        if name not in new_layers or name not in old_layers:
            yield True, f"{where} is {'gone' if name in old_layers else 'new'}"
            continue
        old, new = old_layers[name], new_layers[name]
        if old.kind != new.kind:
            kinds = [kind.rpartition(".")[2] for kind in (new.kind, old.kind)]
            new_kind, old_kind = kinds if kinds[0] != kinds[1] else (new.kind, old.kind)
            yield True, f"{where} is a {new_kind}, and was a {old_kind} when it was exported"
            continue
        sure = is_of_torch(module.get_submodule(name))
        for setting, value in old.settings.items():
            if (new_value := new.settings.get(setting, "nothing")) != value:
                yield sure, f"{setting} of {where} is {new_value}, and was {value} when it was exported"
        if old.source != new.source or not (sure or new.source):
            suffix = "" if old.source and new.source else ", or cannot be read"
            yield False, f"the source of {new.kind}, the class of {where}, is not the one that was exported{suffix}"
        if old.replaced or new.replaced:
            yield (
                True,
                f"the forward of {where} is {'' if new.replaced else 'no longer '}replaced on the instance, and cannot be compared",
            )


def has_other_forward(layer: nn.Module) -> bool:
    """Return whether the layer itself was given another ``forward`` than its class has, except by ``attach``."""
    own = vars(layer).get("forward")
    return (
        own is not None and not hasattr(own, "in_eager") and getattr(own, "__func__", None) is not type(layer).forward
    )


def _kind(layer: nn.Module) -> str:
    """Return the class name, with its module only for PyTorch's classes: yours may share a name with one, and move
    between ``__main__`` and other modules."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}" if is_of_torch(layer) else type(layer).__qualname__


def _attributes(layer: nn.Module) -> Iterator[tuple[str, object]]:
    return (
        (name, value) for name, value in vars(layer).items() if not name.startswith("_") and name not in _NO_SETTINGS
    )


def _words(value: object) -> str | None:
    if isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value)):
        return repr(value)
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, _NAMED) else None


_sources: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def _source(kind: type) -> str:
    """Return the SHA-256 of the source of a class and of its bases outside PyTorch; "" for PyTorch's classes, and if
    the source cannot be read."""
    if kind not in _sources:
        bases = [base for base in kind.__mro__ if base is not object and base.__module__.partition(".")[0] != "torch"]
        try:
            _sources[kind] = (
                hashlib.sha256("".join(map(inspect.getsource, bases)).encode()).hexdigest() if bases else ""
            )
        except (OSError, TypeError):  # typed at a prompt, or compiled
            _sources[kind] = ""
    return _sources[kind]
