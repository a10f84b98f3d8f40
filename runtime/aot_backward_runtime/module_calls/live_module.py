"""A module of the script and the compiled entry that serves it: when it does, and one call of it."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import torch_api
from ..entries.autograd_function import DifferentiableCall, differentiated
from ..entries.dispatch import Entry
from ..entries.module_call import bound_call, call_entry
from ..errors import InputError
from ..format.manifest import EntrySpec, ModuleSource, Tree
from . import interception
from .module_facts import CODE, DEFAULT_DTYPE, GLOBAL, attributes, code_facts, difference, global_facts, names_in
from .plain_values import NotPlain, Watch
from .recorded_speed import gain_of

_LEAST = 2
"""Of a size that was left open: sizes of 0 and 1 are another kind of call, for which a module may do something else, or raise."""


_UNPROVEN = 64
"""Calls that are audited before a backward has come, at most."""


NO_GRADIENTS = "it is called without gradients, and recorded were calls with them"


class OtherModule(InputError):
    """The module is another one than was recorded."""


def class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def why_uncallable(module: nn.Module) -> str:
    """Why a call of ``module`` is more than its forward, or ""."""
    for name, part in module.named_modules():
        if kind := torch_api.call_hooks(part):
            return f"{name or 'the module'} has {kind}"
    return ""


def why_not_here() -> str:
    """Why no call can be compiled, or recorded, where it is made now; or ""."""
    if not torch.is_grad_enabled():
        return NO_GRADIENTS
    if torch_api.in_a_mode() or (torch_api.in_a_function_mode() and any(not _is_of_cpu(m) for m in torch_api.function_modes())):
        return "it is called under a TorchFunctionMode or TorchDispatchMode, which sees each operation, and may change it"
    if torch_api.is_jit_traced():
        return "it is called while torch.jit traces, which would not see what compiled code does"
    if torch_api.in_backward():
        return "it is called within a backward pass, which computes a forward again"
    if torch_api.saved_tensors_hooks(False) is not None:
        return "it is called under saved-tensor hooks (checkpointing, offloading)"
    return ""


def _is_of_cpu(mode: Any) -> bool:
    """Whether a mode is ``torch.set_default_device("cpu")``."""
    return isinstance(mode, torch_api.DeviceContext) and mode.device.type == "cpu"


def facts_of(module: nn.Module, code: Sequence[str], names: Sequence[str], watch: Watch | None = None) -> dict[str, str]:
    """``code``, ``names``: functions and globals, ``module:qualname``. :class:`NotPlain` where one of the facts cannot be told."""
    facts = {DEFAULT_DTYPE: str(torch.get_default_dtype()), **code_facts(code, watch)}
    return {**attributes(module, names_in(code), watch), **facts, **global_facts(names, watch)}


def modes_of(module: nn.Module) -> tuple[str, frozenset[str]]:
    """``train`` or ``eval``, and the submodules that are not in that mode."""
    apart = frozenset(n for n, m in module.named_modules(remove_duplicate=False) if n and m.training != module.training)
    return "train" if module.training else "eval", apart


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones by each."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of the memory that strided tensors are in."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided} - {0}


class LiveModule:
    """A module that an entry serves. It holds no reference to the module, and is looked at anew (:meth:`bind`) where something may have changed."""

    def __init__(self, entry: Entry, module: nn.Module):
        self.entry = copy.deepcopy(entry)
        for variant in self.entry.variants:
            variant.of_script = True
        self.entry.types = dict(_types(entry.spec))
        source = entry.spec.source
        assert source is not None
        self.source: ModuleSource = source
        self._code = [n.removeprefix(CODE) for n in source.facts if n.startswith(CODE)]
        self._globals = [n.removeprefix(GLOBAL) for n in source.facts if n.startswith(GLOBAL)]
        self.lock = threading.RLock()
        self.calls = 0
        self.gain = gain_of(entry)
        self.ended = ""
        """Why no call is compiled any more."""
        self.proven = False
        """Whether a backward of a compiled call has been audited."""
        self._unversioned: set[int] = set()
        self._reading: weakref.WeakSet[DifferentiableCall] = weakref.WeakSet()
        """Calls whose backward reads a buffer, and may be to come."""
        self.bind(module)

    def bind(self, module: nn.Module) -> None:
        """:class:`InputError` says why the entry does not serve the module as it is now."""
        if reason := why_uncallable(module):
            raise InputError(reason)
        self._ids = frozenset(map(id, module.modules()))
        interception.watched |= self._ids
        self._noted, self._assignments = interception.noted[0], self._count(interception.assignments)  # what is assigned from here on is seen
        self._registrations, self._dtype = interception.registrations[0], torch.get_default_dtype()
        self._watch = Watch()
        try:
            found = facts_of(module, self._code, self._globals, self._watch)
        except NotPlain as error:
            raise OtherModule(str(error)) from error
        if words := difference(self.source.facts, found):
            raise OtherModule(words)
        state = state_of(module)
        if odd := sorted(state.keys() ^ set(self.entry.state.names)):
            raise OtherModule(f"{odd[0]} is {'new' if odd[0] in state else 'gone'}")
        self._slots = [_slot(module, name) for name in self.entry.state.names]
        read = {i for v in self.entry.variants if "backward" in v.plans for i in v.plans["backward"].reads}
        self._reads_buffers = any(not isinstance(t, nn.Parameter) for i, t in enumerate(self.current()) if i in read)
        self._bind_mode(module)

    def _bind_mode(self, module: nn.Module) -> None:
        self._switches = self._count(interception.switches)
        self.mode, apart = modes_of(module)
        served = [v.spec for v in self.entry.variants if v.spec.mode == self.mode]
        if not served:
            raise InputError(f"it is in {self.mode} mode; recorded were {', '.join(sorted({v.spec.mode for v in self.entry.variants}))}")
        if not any(frozenset(s.set_apart) == apart for s in served):
            raise InputError(f"{', '.join(sorted(apart)) or 'no submodule'} in another mode than the whole; recorded was another combination")

    def refresh(self, module: nn.Module) -> None:
        """:meth:`bind`, if something may have changed since."""
        before, self._noted = self._noted, interception.noted[0]
        noted = self._noted != before
        assigned = noted and self._count(interception.assignments) != self._assignments
        hooked, dtype = self._registrations != interception.registrations[0], torch.get_default_dtype()
        if assigned or hooked or dtype is not self._dtype or not self._watch.same():
            self.bind(module)
        elif noted and self._count(interception.switches) != self._switches:
            self._bind_mode(module)

    def _count(self, counts: Mapping[int, int]) -> int:
        """Of the module and its submodules."""
        return sum(counts[i] for i in self._ids & counts.keys())

    def is_unproven(self) -> bool:
        """Whether this call must be audited because no backward was: a layer may be called many times before the first comes."""
        return not self.proven and self.calls <= _UNPROVEN

    def current(self) -> list[torch.Tensor]:
        try:
            return [owner[name] for owner, name in self._slots]
        except KeyError as error:
            raise OtherModule(f"the parameter or buffer {error.args[0]!r} is gone") from error

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises what :meth:`call` would where the call does not fit, and runs nothing."""
        current = self.current()
        matched, _, _ = bound_call(self.entry, current, self.mode, args, kwargs, _LEAST)
        differentiated(self.entry, matched.variant, current, matched)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], made: Callable[[DifferentiableCall], None] | None = None) -> Any:
        """By compiled code; :class:`InputError` and others of ours where it does not fit, and nothing was done."""
        current, unseen = self.current(), self._unversioned
        if self._reads_buffers:
            unseen = unseen - {i for call in self._reading for i in call.differentiated.backward.reads}
            made = self._noting_readers(made)
        if not unseen:
            return call_entry(self.entry, current, self.mode, args, kwargs, made, _LEAST)
        with torch_api.keeping_versions([current[i] for i in unseen]):
            return call_entry(self.entry, current, self.mode, args, kwargs, made, _LEAST)

    def _noting_readers(self, made: Callable[[DifferentiableCall], None] | None) -> Callable[[DifferentiableCall], None]:
        def note(call: DifferentiableCall) -> None:
            self._reading.add(call)
            if made is not None:
                made(call)

        return note

    def written_unversioned(self, buffers: set[int]) -> None:
        """``buffers``: ``id`` of those that eager writes without autograd seeing it, as it does the averages of a batch normalization, which it also
        saves: another call of the layer, in eager, would raise where compiled code counted that it wrote them. It is counted all the same while the
        backward of a compiled call, as one in the other mode, is to read them."""
        self._unversioned |= {i for i, t in enumerate(self.current()) if id(t) in buffers}


def _slot(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last


def _types(spec: EntrySpec) -> Iterator[tuple[str, type]]:
    """The classes that results are made of: those of the script, which has imported them."""

    def named(tree: Tree) -> Iterator[str]:
        if tree.type_name:
            yield tree.type_name
        for child in tree.children:
            yield from named(child)

    for name in {n for v in spec.variants for n in named(v.out_tree)}:
        module, _, qualname = name.rpartition(".")
        kind = getattr(sys.modules.get(module), qualname, None)
        if not isinstance(kind, type):
            raise OtherModule(f"its result is a {name}, which this process does not have")
        yield name, kind
