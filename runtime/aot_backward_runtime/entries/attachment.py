"""``LoadedModule.attach(net)``: a module of the caller's own whose ``forward`` is compiled code, over its own parameters and buffers."""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import torch_api
from ..errors import GradientError, InputError, WeightsError
from .compared_call import compare_call
from .dispatch import Entry
from .layers import differences, is_of_torch, setting_names
from .module_call import call_entry

Otherwise = Literal["error", "eager"]
OTHER_REASONS = "(other reasons)"
_REASONS = 64  # that are kept: a size that changes in each call is in the words of each
_AVERAGING = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_EXPORT_AGAIN = "Change it back, or export the module as it is now."


class Attachment:
    """What stands in the place of ``net.forward`` until :meth:`detach`; as a context manager, until the block ends.

    ``calls``: how many ran compiled; ``in_eager``: how many ran the module's own forward, by reason. Copies and pickles of ``net`` have that one.
    """

    def __init__(self, entry: Entry, net: nn.Module, otherwise: Otherwise = "error", strict: bool = False, compare: int = 0):
        if otherwise not in ("error", "eager"):
            raise InputError(f"otherwise: expected 'error' or 'eager', got {otherwise!r}")
        _refuse_other_forward(net)
        self.calls = 0
        self.in_eager: Counter[str] = Counter()
        self._entry, self._otherwise, self._to_compare = copy.deepcopy(entry), otherwise, compare
        self._net, self._own = weakref.ref(net), type(net).forward
        self.__signature__ = inspect.signature(net.forward)
        self._check_layers(net, unsure=_raise if strict else _warn)
        self._bind(net)
        current = self._current()
        self._entry.state.check(current)
        self._check_trained(current)
        net.__dict__["forward"] = self

    @torch_api.opaque_to_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        net = self._net()
        if net is None:
            raise InputError("the module that this forward belongs to no longer exists. Keep the module for as long as its forward is called.")
        try:
            self._check_unchanged(net)
            if self._to_compare > 0:
                self._to_compare -= 1
                compare_call(self._entry, net, self._mode, args, kwargs)
            current = self._current()
            averages = [t for i in self._averages if (t := current[i]) is not None]
            with torch_api.keeping_versions(averages) if averages else nullcontext():
                result = call_entry(self._entry, current, self._mode, args, kwargs)
        except (InputError, WeightsError, GradientError) as error:  # nothing has run
            if self._otherwise == "error":
                raise
            reason = str(error)
            self.in_eager[reason if reason in self.in_eager or len(self.in_eager) < _REASONS else OTHER_REASONS] += 1
            return self._own(net, *args, **kwargs)
        self.calls += 1
        return result

    def detach(self) -> None:
        """``net`` has its own forward again."""
        net = self._net()
        if net is not None and net.__dict__.get("forward") is self:
            del net.__dict__["forward"]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __reduce__(self) -> Any:
        """A copy of ``net`` gets the forward of its class, which is found on it as long as nothing else was copied to it."""
        return getattr, (self._net(), "forward")

    def _check_layers(self, net: nn.Module, unsure: Any) -> None:
        """:class:`InputError` where ``net`` has other layers than were exported. ``unsure``: what is done about differences that may mean nothing."""
        exported = self._entry.spec.layers
        if not exported:
            unsure("the package was written before packages held the layers of modules, and they cannot be compared. Export it again.")
            return
        if exported[0].hooks:
            raise InputError("the module was exported with hooks of its own, which are compiled, and would run twice. Export it without them.")
        found = list(differences(exported, net))
        for sure, words in sorted(found, key=lambda one: not one[0]):
            (_raise if sure else unsure)(f"{words}. {_EXPORT_AGAIN}")

    def _bind(self, net: nn.Module) -> None:
        """Notes where the tensors of ``net`` are looked up, and what of it the next calls must find as it is."""
        state = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
        if odd := sorted(state.keys() ^ set(self._entry.state.names)):
            raise InputError(
                f"expected the tensors of the exported module, got {'also' if odd[0] in state else 'none called'} {odd[0]}. {_EXPORT_AGAIN}"
            )
        self._slots = [_slot(net, name) for name in self._entry.state.names]
        self._parts = [(name, part) for name, part in net.named_modules(remove_duplicate=False) if name]  # not the module: it is not to be kept alive
        averages = {id(t) for part in net.modules() if isinstance(part, _AVERAGING) for t in (part.running_mean, part.running_var)}
        self._averages = [i for i, t in enumerate(self._current()) if id(t) in averages]  # eager writes these without autograd seeing it
        self._children = [children for part in (net, *(part for _, part in self._parts)) if (children := part._modules)]
        self._bound_children = [list(children.values()) for children in self._children]
        self._own_settings = _getter(net)
        self._settings = [(get, part) for _, part in self._parts if (get := _getter(part)) is not None]
        self._bound_settings = self._current_settings(net)
        self._check_hooks()
        self._bind_mode(net)

    def _current_settings(self, net: nn.Module) -> list[Any]:
        """Of PyTorch's layers, in an order of their own."""
        settings = [get(part) for get, part in self._settings]
        return settings if self._own_settings is None else [*settings, self._own_settings(net)]

    def _bind_mode(self, net: nn.Module) -> None:
        self._modes = self._current_modes(net)
        self._mode = "train" if net.training else "eval"
        apart = {name for name, part in self._parts if part.training != net.training}
        exported = [set(v.spec.set_apart) for v in self._entry.variants if v.spec.mode == self._mode]
        if exported and apart not in exported:  # of a mode that was not exported, the call says so
            name = min(apart ^ exported[0])
            self._modes = []  # looked at again in the next call
            expected = "another mode than" if name in exported[0] else "the same mode as"
            raise InputError(
                f"{name}: expected {expected} the whole module, which is in {self._mode} mode. Put it there, or export the module as it is now."
            )

    def _current_modes(self, net: nn.Module) -> list[bool]:
        return [net.training, *[part.training for _, part in self._parts]]

    def _check_unchanged(self, net: nn.Module) -> None:
        if [list(children.values()) for children in self._children] != self._bound_children:
            self._check_layers(net, unsure=lambda words: None)
            self._bind(net)
            return
        if self._current_settings(net) != self._bound_settings:
            self._check_layers(net, unsure=lambda words: None)
            raise InputError(f"settings of layers changed after the module was attached. {_EXPORT_AGAIN}")
        if RemovableHandle.next_id != self._handles:
            self._check_hooks()
        if self._current_modes(net) != self._modes:
            self._bind_mode(net)

    def _check_hooks(self) -> None:
        for name, part in self._parts:
            if hook := torch_api.call_hooks(part):
                raise InputError(
                    f"{name}: expected a submodule without hooks, got {hook}, which would never run. Put it on the module itself, or remove it."
                )
        self._handles = RemovableHandle.next_id  # a hook is a handle, of whatever kind

    def _check_trained(self, current: list[torch.Tensor]) -> None:
        served = frozenset[str]().union(*(v.covered for v in self._entry.variants))
        for i, target in self._entry.state.wrt:
            if current[i].requires_grad and target not in served:
                name = self._entry.state.names[i]
                raise GradientError(f"{name}: expected requires_grad=False, as when it was exported, got True. Freeze it, or export it unfrozen.")

    def _current(self) -> list[torch.Tensor]:
        try:
            return [tensors[name] for tensors, name in self._slots]
        except KeyError as error:
            raise InputError(f"expected the tensors of the exported module, got none called {error.args[0]}. {_EXPORT_AGAIN}") from error


def detach(net: nn.Module) -> None:
    """``net`` has its own forward again; :class:`InputError` where nothing is attached to it."""
    attachment = net.__dict__.get("forward")
    if not isinstance(attachment, Attachment):
        raise InputError(f"expected a module that compiled code is attached to, got a {type(net).__qualname__} with its own forward. Attach first.")
    attachment.detach()


def _refuse_other_forward(net: nn.Module) -> None:
    if not isinstance(net, nn.Module):
        raise InputError(f"expected an nn.Module to attach to, got a {type(net).__qualname__}. Pass the module that is called.")
    kind = type(net).__qualname__
    own = net.__dict__.get("forward")
    if isinstance(own, Attachment):
        raise InputError(f"expected a {kind} with its own forward, got one that compiled code is attached to. Call detach first.")
    if own is not None and getattr(own, "__func__", None) is not type(net).forward:
        raise InputError(f"expected a {kind} with the forward of its class, got one that was given another. Attach before other code replaces it.")
    if not inspect.isfunction(type(net).forward):
        raise InputError(f"expected a module whose forward is Python code, got a {kind}. Attach to the module that it was made of.")


def _getter(layer: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Reads the settings of a layer of PyTorch's; of other classes, attributes may change and mean nothing."""
    names = setting_names(layer) if is_of_torch(layer) else ()
    return attrgetter(*names) if names else None


def _slot(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last


def _raise(words: str) -> None:
    raise InputError(words)


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=5)
