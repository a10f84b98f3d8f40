"""``LoadedModule.attach(net)``: compiled code as the ``forward`` of your module, on its own parameters and buffers."""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
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
from .layers import differences, has_other_forward, is_of_torch, setting_names
from .module_call import call_entry
from .named_tensors import slot_of, state_of

Otherwise = Literal["error", "eager"]
OTHER_REASONS = "(other reasons)"
_REASONS = 64  # limit: a size that changes in each call makes a new reason each time
_AVERAGING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_EXPORT_AGAIN = "Change it back, or export the module as it is now."


class Attachment:
    """The replacement of ``net.forward`` until :meth:`detach`; as a context manager, until the block ends.

    Copies and pickles of ``net`` have its own forward.

    Attributes:
        calls: The number of calls that ran compiled.
        in_eager: The numbers of calls that ran the module's own forward, by reason.
    """

    def __init__(
        self, entry: Entry, net: nn.Module, otherwise: Otherwise = "error", strict: bool = False, compare: int = 0
    ):
        if otherwise not in ("error", "eager"):
            raise InputError(f"otherwise: expected 'error' or 'eager', got {otherwise!r}")
        if type(compare) is not int or compare < 0:
            raise InputError(f"compare: expected a number of calls, got {compare!r}")
        _refuse_other_forward(net)
        self.calls = 0
        self.in_eager: Counter[str] = Counter()
        self._entry, self._otherwise, self._to_compare = copy.deepcopy(entry), otherwise, compare
        self._net, self._own = weakref.ref(net), type(net).forward
        self._unsure = _raise if strict else _warn
        self.__signature__ = inspect.signature(net.forward)
        self._check_layers(net)
        bound = self._bind(net)
        self._bounds = {net.training: bound}  # keyed by mode, because some training loops set the mode in every step
        self._entry.state.check(bound.tensors())
        self._check_trained(bound.tensors())
        net.__dict__["forward"] = self

    @torch_api.opaque_to_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of ``net``. ``nn.Module.__call__`` calls this; you need not."""
        net = self._net()
        if net is None:
            raise InputError(
                "the module that this forward belongs to no longer exists. Keep the module for as long as its forward is called."
            )
        try:
            bound = self._bounds.get(net.training)
            if bound is None or not (bound.has_same_layers(net) and bound.has_same_modes(net)):
                if not any(other.has_same_layers(net) for other in self._bounds.values()):
                    self._check_layers(net)
                bound = self._bounds[net.training] = self._bind(net)
            if self._to_compare > 0:
                compare_call(self._entry, net, bound.mode, args, kwargs, self._count_compared)
            tensors = bound.tensors()
            averages = [t for i in bound.averages if (t := tensors[i]) is not None]
            with torch_api.keeping_versions(averages) if averages else nullcontext():
                result = call_entry(self._entry, tensors, bound.mode, args, kwargs)
            self.calls += 1
            return result
        except (InputError, WeightsError, GradientError) as error:  # nothing has run
            if self._otherwise == "error":
                raise
            reason = str(error)
        self.in_eager[reason if reason in self.in_eager or len(self.in_eager) < _REASONS else OTHER_REASONS] += 1
        return self._own(net, *args, **kwargs)

    def _count_compared(self) -> None:
        self._to_compare -= 1

    def detach(self) -> None:
        """Restore the forward of ``net``. Do nothing if it has been restored already."""
        net = self._net()
        if net is not None and net.__dict__.get("forward") is self:
            net.__dict__.pop("forward", None)  # another thread may have removed it

    def __enter__(self) -> Attachment:
        net = self._net()
        if net is None or net.__dict__.get("forward") is not self:
            raise InputError("expected an attachment that is in place, got one that was detached. Attach again.")
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __reduce__(self) -> Any:
        """Make a copy of ``net`` get the forward of its class: ``getattr`` runs before other attributes are copied."""
        return getattr, (self._net(), "forward")

    def _check_layers(self, net: nn.Module) -> None:
        """Raise :class:`InputError` if the layers of ``net`` differ from the exported ones. Warn, or raise with
        ``strict``, if the difference may be harmless."""
        spec = self._entry.spec
        if not spec.layers:
            self._unsure(
                "the package is from an older version, and stores no layers to compare with this module. Export it again."
            )
        elif spec.layers[0].hooks:
            raise InputError(
                "the module was exported with its own hooks: they are compiled, and would run twice. Export it without them."
            )
        else:
            for sure, words in sorted(differences(spec.layers, net), key=lambda pair: not pair[0]):
                (_raise if sure else self._unsure)(f"{words}. {_EXPORT_AGAIN}")

    def _bind(self, net: nn.Module) -> _Bound:
        """Return the state that later calls must find. Raise :class:`InputError` if no exported variant has the
        submodule modes of ``net``."""
        bound = _Bound(net, self._entry.state.names)
        set_apart = {name for name, part in bound.parts if part.training != net.training}
        exported = [set(v.spec.set_apart) for v in self._entry.variants if v.spec.mode == bound.mode]
        if exported and set_apart not in exported:  # if the mode was not exported, the call raises
            name = min(set_apart ^ exported[0])
            other = "eval" if bound.mode == "train" else "train"
            got, expected = (other, bound.mode) if name in set_apart else (bound.mode, other)
            raise InputError(
                f"{name}: expected {expected} mode, as when it was exported, got {got} mode. {_EXPORT_AGAIN}"
            )
        return bound

    def _check_trained(self, current: list[torch.Tensor]) -> None:
        served = frozenset[str]().union(*(v.covered for v in self._entry.variants))
        for i, target in self._entry.state.wrt:
            if current[i].requires_grad and target not in served:
                name = self._entry.state.names[i]
                raise GradientError(
                    f"{name}: expected requires_grad=False, as when it was exported, got True. Freeze it, or export it unfrozen."
                )


class _Bound:
    """A snapshot of a module: its tensors by the package's names, and the attributes that must stay unchanged. It does
    not keep the module alive."""

    def __init__(self, net: nn.Module, names: Sequence[str]):
        """``names``: names of the exported module's tensors."""
        self.parts = [(name, part) for name, part in net.named_modules(remove_duplicate=False) if name]
        self._handles = RemovableHandle.next_id  # every kind of hook takes a handle
        for name, part in self.parts:
            if hook := torch_api.call_hooks(part):
                raise InputError(
                    f"{name}: expected a submodule without hooks, got {hook}, which would never run. Register it on the module itself, or remove it."
                )
        state = state_of(net)
        if invalid := sorted(state.keys() ^ set(names)):
            raise InputError(
                f"expected the tensors of the exported module, got {'also' if invalid[0] in state else 'no'} {invalid[0]}. {_EXPORT_AGAIN}"
            )
        if invalid := [name for name in names if state[name].is_inference()]:
            raise InputError(
                f"{invalid[0]}: expected a tensor that autograd can track, got one made under torch.inference_mode(). Make the module outside of it."
            )
        self._slots = [slot_of(net, name) for name in names]
        modules = [net, *(part for _, part in self.parts)]
        averages = {
            id(t) for part in modules if isinstance(part, _AVERAGING) for t in (part.running_mean, part.running_var)
        }
        # Eager writes these without autograd noticing
        self.averages = [i for i, t in enumerate(self.tensors()) if id(t) in averages]
        self.mode = "train" if net.training else "eval"
        slots = [d for part in modules for d in (part._parameters, part._buffers, part._modules)]
        self._empty, self._names = [d for d in slots if not d], [(d, list(d)) for d in slots if d]
        self._absent = [(d, name) for d in slots for name, value in d.items() if value is None]
        self._children = [(part._modules, list(part._modules.values())) for part in modules if part._modules]
        self._classes, self._modes = self._forwards_and_classes(net), self._read_modes(net)
        self._own_settings = _getter(net)
        self._settings = [(get, part) for _, part in self.parts if (get := _getter(part)) is not None]
        self._values = copy.deepcopy(self._read(net))

    def tensors(self) -> list[torch.Tensor]:
        return [tensors[name] for tensors, name in self._slots]

    def has_same_layers(self, net: nn.Module) -> bool:
        """Return whether ``net`` is unchanged, apart from the tensors in its slots and the modes: no other names,
        submodules, classes, forwards, settings of PyTorch's layers, and no new hook."""
        return (
            RemovableHandle.next_id == self._handles
            and not any(self._empty)
            and all([list(d) == names for d, names in self._names])  # noqa: C419 # a generator takes twice as long
            and all([list(d.values()) == values for d, values in self._children])  # noqa: C419
            and all([d[name] is None for d, name in self._absent])  # noqa: C419
            and self._forwards_and_classes(net) == self._classes
            and self._has_same_settings(net)
        )

    def _forwards_and_classes(self, net: nn.Module) -> list[Any]:
        layers: list[Any] = [(part.__class__, part.__dict__.get("forward")) for _, part in self.parts]
        return [*layers, net.__class__]

    def has_same_modes(self, net: nn.Module) -> bool:
        return self._read_modes(net) == self._modes

    def _read_modes(self, net: nn.Module) -> list[bool]:
        return [net.training, *[part.training for _, part in self.parts]]

    def _read(self, net: nn.Module) -> list[Any]:
        settings = [get(part) for get, part in self._settings]
        return settings if self._own_settings is None else [*settings, self._own_settings(net)]

    def _has_same_settings(self, net: nn.Module) -> bool:
        try:
            return self._read(net) == self._values
        except (AttributeError, RuntimeError):  # a setting was removed, or is a tensor now
            return False


def detach(net: nn.Module) -> None:
    """Restore the forward of ``net``. Raise :class:`InputError` if nothing is attached to it."""
    attachment = net.__dict__.get("forward")
    if not isinstance(attachment, Attachment):
        raise InputError(
            f"expected a module that compiled code is attached to, got a {type(net).__qualname__} with its own forward. Attach first."
        )
    attachment.detach()


def _refuse_other_forward(net: nn.Module) -> None:
    if isinstance(net, torch.jit.ScriptModule):
        raise InputError(
            "expected a module with a forward in Python code, got TorchScript. Attach to the original nn.Module."
        )
    if not isinstance(net, nn.Module):
        raise InputError(
            f"expected an nn.Module to attach to, got a {type(net).__qualname__}. Pass the module that is called."
        )
    kind = type(net).__qualname__
    own = net.__dict__.get("forward")
    if isinstance(own, Attachment):
        raise InputError(
            f"expected a {kind} with its own forward, got one that compiled code is attached to. Call detach first."
        )
    if has_other_forward(net):
        raise InputError(
            f"expected a {kind} with the forward of its class, got one with a replaced forward. Attach before other code replaces it."
        )
    if not inspect.isfunction(type(net).forward):
        raise InputError(
            f"expected a module with a forward in Python code, got a {kind}. Attach to the original nn.Module."
        )


def _getter(layer: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return a function that reads the settings of a PyTorch layer. Attributes of other classes may change
    harmlessly."""
    names = setting_names(layer) if is_of_torch(layer) else ()
    return attrgetter(*names) if names else None


def _raise(words: str) -> None:
    raise InputError(words)


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=5)
