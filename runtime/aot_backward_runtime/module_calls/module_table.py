"""The recorded modules of a package, and the modules of the process that they serve."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

from ..entries.dispatch import Entry
from ..errors import InputError
from .live_module import LiveModule, OtherModule, class_name
from .recorded_speed import why_slower

_LONGEST = 64  # calls for which a module that did not fit is not looked at again


class ModuleTable:
    """By the module's class. A module that fits none is looked at again after 1, 2, 4, … 64 of its calls."""

    def __init__(self, entries: Iterable[Entry], left: Mapping[str, str] | None = None, *, always: bool = False):
        """``left``: entries, by name, that serve no call, each with the reason in words. ``always``: also those that were slower than eager."""
        left = left or {}
        self._entries: dict[str, list[Entry]] = {}
        self._slower: dict[str, str] = {}
        for entry in entries:
            source = entry.spec.source
            assert source is not None
            if words := left.get(entry.name, "") or ("" if always else why_slower(entry)):
                self._slower[source.module] = words
            else:
                self._entries.setdefault(source.module, []).append(entry)
        self._met: dict[int, _Met] = {}  # by the module's id: modules may be equal, and are others

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def left(self) -> list[str]:
        """What serves no call, each with its reason, in words."""
        return [f"{name}: {words}" for name, words in self._slower.items()]

    def has(self, module: nn.Module) -> bool:
        """Whether a module of its class was recorded."""
        name = class_name(module)
        return name in self._entries or name in self._slower

    def has_served(self, module: nn.Module) -> bool:
        """Whether an entry was bound to this module, and still is; with less looking than :meth:`has` takes."""
        met = self._met.get(id(module))
        return met is not None and met.live is not None and met.module() is module

    def may_serve(self, module: nn.Module) -> bool:
        """Whether it is of a class that an entry is for, which serves calls."""
        return class_name(module) in self._entries

    def why_not_served(self, module: nn.Module) -> str:
        """Of a module of a class that no entry is for."""
        name = class_name(module)
        return f"{name}: {self._slower.get(name, 'no module of that class was recorded')}"

    def waits(self, module: nn.Module) -> bool:
        """Whether it did not fit, and this call of it is not looked at either."""
        met = self._met.get(id(module))
        if met is None or met.module() is not module or not met.waits:
            return False
        met.waits -= 1
        return True

    def find(self, module: nn.Module) -> LiveModule:
        """What serves ``module`` as it is now; :class:`InputError` says why nothing does."""
        met = self._met.get(id(module))
        if met is None or met.module() is not module:
            met = self._met[id(module)] = _Met(module, self._met)
        if self.waits(module):
            raise InputError(met.reason)
        try:
            if met.live is None:
                met.live = self._bind(module)
            elif not met.live.ended:
                try:
                    met.live.refresh(module)
                except InputError as error:
                    raise InputError(f"{class_name(module)}: {error}") from None
        except InputError as error:
            self.refuse(module, str(error))
            met.live = met.live if met.live is not None and met.live.ended else None
            raise
        if met.live.ended:
            raise InputError(met.live.ended)
        met.next_wait = 0
        return met.live

    def refuse(self, module: nn.Module, reason: str) -> None:
        """``module`` is not looked at for its next calls."""
        met = self._met[id(module)]
        met.waits, met.reason = met.next_wait, reason
        met.next_wait = min(max(2 * met.next_wait, 1), _LONGEST)

    def _bind(self, module: nn.Module) -> LiveModule:
        name, reasons = class_name(module), list[InputError]()
        for entry in self._entries.get(name, ()):
            try:
                return LiveModule(entry, module)
            except InputError as error:
                reasons.append(error)
        reasons.sort(key=lambda error: isinstance(error, OtherModule))  # the others came nearer
        if reasons:
            raise InputError(f"{name}: {reasons[0]}")
        raise InputError(self.why_not_served(module))


class _Met:
    """What is known of a module of the process, for as long as it lives."""

    __slots__ = ("live", "module", "next_wait", "reason", "waits")

    def __init__(self, module: nn.Module, all_met: dict[int, _Met]) -> None:
        key = id(module)
        self.module = weakref.ref(module, lambda _: all_met.pop(key, None))
        self.live: LiveModule | None = None
        self.reason = ""
        self.waits = self.next_wait = 0
