"""The calls of modules in a replay: compiled where an entry serves them, audited now and then, else eager's."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..entries.autograd_function import is_through_script
from ..errors import AotBackwardError, ExecutionError, InputError, MissError
from .audit import Grad, audited_call, is_audited
from .interception import Plain, depth, opened, unheard
from .live_module import NO_GRADIENTS, LiveModule, why_not_here
from .module_table import ModuleTable

Note = Callable[[str], None]


class ModuleCalls:
    """``compiled``, ``audits``: how many calls were. ``differed``: what audits found, in words."""

    def __init__(self, table: ModuleTable, eager: Note, grad: Grad, *, strict: bool = False):
        """``eager``: called with the reason of each call that is left to eager."""
        self.table, self.strict = table, strict
        self._eager, self._grad = eager, grad
        self.compiled = self.audits = 0
        self.saved = 0.0  # seconds, by what was timed when they were recorded
        self.auditing = 0.0  # seconds, eager's part included
        self.differed: list[str] = []
        self.since_backward = False
        """Whether a compiled call's backward may come with the next pass."""
        self._alone: dict[int, _LeftAlone] = {}  # by the module's id

    def call(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() and not depth() and (self.table.has_served(module) or _has_parameters(module)):
            self._eager(NO_GRADIENTS)
            return plain(module, *args, **kwargs)
        alone = self._alone.get(id(module))
        if alone is not None and alone.module() is module and alone.is_left(self.table, module):
            if alone.reason and (alone.known or not depth()):
                self._eager(alone.reason if torch.is_grad_enabled() else NO_GRADIENTS)
            return plain(module, *args, **kwargs)  # nor are the calls within it looked at
        served = self.table.has_served(module)
        known = served or self.table.has(module)
        # a layer of a module that is not served; a loss, an activation
        if not served and ((depth() and not known) or not _has_parameters(module)):
            return self._opened(module, plain, args, kwargs)
        if reason := why_not_here():  # nor would a call within this one be served
            self._eager(reason)
            return plain(module, *args, **kwargs)
        live, reason = None, ""
        try:
            live = self.table.find(module)
        except InputError as error:
            reason = str(error)
        if live is None:
            return self._by_eager(reason, known, module, plain, args, kwargs)
        live.calls += 1
        try:
            if is_audited(live.calls) or live.is_unproven():
                self.audits += 1
                start = time.perf_counter()
                with live.lock:  # another thread that calls the module must not see the copies of its buffers
                    result = audited_call(live, module, plain, args, kwargs, self._grad, lambda words: self._end(live, words))
                self.auditing += time.perf_counter() - start
            else:
                with live.lock:
                    result = live.call(args, kwargs)
                self.saved += live.gain
        except MissError:
            raise
        except ExecutionError as error:  # an index that is out of range, mostly: eager's error is the script's
            result = plain(module, *args, **kwargs)
            self._end(live, f"native code failed ({error}), the module itself did not")
            return result
        except AotBackwardError as error:  # it does not fit, and nothing was done
            live.calls -= 1
            reason = f"{live.source.module}: {error}"
        else:
            self.compiled += 1
            self.since_backward = True
            return result
        return self._by_eager(reason, known, module, plain, args, kwargs)

    def made_one_of(self, contexts: Iterable[Any]) -> bool:
        """Whether a compiled call made one of the contexts of a backward pass's custom functions."""
        return self.compiled > 0 and is_through_script(contexts)

    def _by_eager(self, reason: str, known: bool, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls of modules within it are served. The reason counts, unless the module was not recorded, but what it calls."""
        before = self.compiled
        try:
            return self._opened(module, plain, args, kwargs, reason)
        finally:
            if known or self.compiled == before:
                self._eager(reason)

    def _opened(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        """A call in eager, for that reason, and those within it by what serves them."""
        before = self.compiled
        result = opened(module, plain, args, kwargs)
        alone = self._alone.get(id(module))
        if alone is None or alone.module() is not module:
            self._alone[id(module)] = _LeftAlone(module, self._alone)  # of a module that is made for one call, nothing more
        else:
            alone.note(self.table, module, reason, compiled=self.compiled != before)
        return result

    def _end(self, live: LiveModule, words: str) -> None:
        if live.ended:  # calls that were made before the first backward
            return
        live.ended = f"{live.source.module}: call {live.calls} of the compiled module was not what the module itself computes: {words}"
        self.differed.append(live.ended)
        if self.strict:
            raise MissError(f"{live.ended} (replay was told to be strict)")


_SURE = 8
"""Calls in eager, one after the other and with nothing compiled within, after which a module of which nothing can be is left alone; one that an entry
did not fit, for as long as the table waits until it looks again."""
_AGAIN = 64
"""Of the calls of a module that is left alone, one in so many is looked at: it may have got another part by then, or call another module."""


class _LeftAlone:
    """A module whose calls are made in eager. ``known``: the package has entries for its class; ``reason``: why they do not serve it, or "" where
    that is not to be counted."""

    __slots__ = ("_calls", "_may_fit", "_sure", "known", "module", "reason")

    def __init__(self, module: nn.Module, every: dict[int, _LeftAlone]):
        key = id(module)

        def died(_: Any) -> None:
            every.pop(key, None)
            unheard.pop(key, None)

        self.module = weakref.ref(module, died)
        self.known, self.reason = False, ""
        self._may_fit = False
        self._calls, self._sure = 0, math.nan  # no number of calls is enough, nor where parts of it may be served

    def is_left(self, table: ModuleTable, module: nn.Module) -> bool:
        """Whether a call of ``module``, which this is of, is left alone."""
        if not self._calls >= self._sure:
            return False
        if self._may_fit:
            return table.waits(module)
        self._calls += 1
        if self._calls % _AGAIN == 0:
            self._sure = math.nan
            return False
        if not self.known and depth():
            unheard[id(module)] = _AGAIN
        return True

    def note(self, table: ModuleTable, module: nn.Module, reason: str, *, compiled: bool) -> None:
        """Of a call that was looked at: why it was made in eager, and whether one within it was compiled."""
        if math.isnan(self._sure):
            self._sure = math.inf
            with contextlib.suppress(AttributeError, TypeError):  # of a module that has something of its own by the name of modules or parameters
                self.known = table.has(module)
                self.reason = table.why_not_served(module) if _has_parameters(module) else ""
                self._may_fit = table.may_serve(module)
                if not any(table.may_serve(m) for m in module.modules() if m is not module):
                    self._sure = _SURE
        self.reason = reason or self.reason
        self._calls = 0 if compiled else self._calls + 1


def _has_parameters(module: nn.Module) -> bool:
    return next(nn.Module.parameters(module), None) is not None  # it may have something of its own by that name
