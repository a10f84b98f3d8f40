"""What a module is beside its tensors: the classes of its layers, their settings, their hooks, and the source of classes that are not PyTorch's."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator

from torch import nn

from .. import torch_api
from ..format.manifest import LayerSpec

_PLAIN = bool, int, float, str, type(None)
_NO_SETTINGS = "training", "forward"  # the mode; what is attached
_NOTHING = "nothing"


def layers_of(module: nn.Module) -> tuple[LayerSpec, ...]:
    """Of ``module`` (name "") and each submodule, by each of its names."""
    digests: dict[type, str] = {}
    return tuple(
        LayerSpec(
            name,
            type(part).__qualname__,
            {setting: repr(vars(part)[setting]) for setting in setting_names(part)},
            _source(type(part), digests),
            bool(torch_api.call_hooks(part)),
        )
        for name, part in module.named_modules(remove_duplicate=False)
    )


def is_of_torch(layer: nn.Module) -> bool:
    """Whether a layer is of a class of PyTorch's."""
    return type(layer).__module__.partition(".")[0] == "torch"


def setting_names(layer: nn.Module) -> list[str]:
    """The attributes of a layer that are plain values: ``p`` of a dropout, ``eps`` and ``momentum`` of a normalization."""
    return [n for n, v in vars(layer).items() if not n.startswith("_") and n not in _NO_SETTINGS and _is_plain(v)]


def differences(exported: tuple[LayerSpec, ...], module: nn.Module) -> Iterator[tuple[bool, str]]:
    """Where ``module`` is not what was exported: whether it surely computes something else, and the words. Sure are layers that are new, gone or of
    another class, and settings of PyTorch's own layers; attributes and source of other classes may differ and mean the same."""
    before, now = {layer.name: layer for layer in exported}, {layer.name: layer for layer in layers_of(module)}
    for name in {**before, **now}:
        where = name or "the module"
        if name not in now or name not in before:
            yield True, f"{where} is {'gone' if name in before else 'new'}"
            continue
        old, new = before[name], now[name]
        if old.kind != new.kind:
            yield True, f"{where} is of the class {new.kind}, and was of {old.kind} when it was exported"
            continue
        sure = is_of_torch(module.get_submodule(name))
        for setting, value in old.settings.items():
            if (found := new.settings.get(setting, _NOTHING)) != value:
                yield sure, f"{setting} of {where} is {found}, and was {value} when it was exported"
        if old.source and new.source and old.source != new.source:
            yield False, f"the source of {new.kind}, the class of {where}, is not the one that was exported"


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))


def _source(kind: type, known: dict[type, str]) -> str:
    """SHA-256 of the source of a class and of its bases that are not PyTorch's; "" of PyTorch's own, and where there is no source to read."""
    if kind not in known:
        bases = [base for base in kind.__mro__ if base is not object and base.__module__.partition(".")[0] != "torch"]
        try:
            known[kind] = hashlib.sha256("".join(map(inspect.getsource, bases)).encode()).hexdigest() if bases else ""
        except (OSError, TypeError):  # typed at a prompt, or compiled
            known[kind] = ""
    return known[kind]
