"""The autograd engine's hook for compilers, held by one session at a time.

The setting is process-wide. Its holder sees every backward pass through :func:`_run`, which replaces
``torch.autograd.graph._engine_run_backward`` and sends passes to eager if the engine refuses them or if they run inside
another pass's hook.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .. import torch_api
from ..errors import AotBackwardError, MissError
from ..tapes.interpreter import MATERIALIZE

DATA_PARALLEL = (
    "passes of DistributedDataParallel, which averages gradients while eager's backward runs: "
    "wrap a module that was loaded from a package in it, or train with a step that was exported with distributed=True"
)
MIXED_PRECISION = (
    "DistributedDataParallel(…, mixed_precision=…) averages gradients from hooks within the pass, which record and replay cannot run "
    "like eager: run this script without them"
)
_hooks: list[Engine] = []
_eager: Callable[..., Any] = torch_api.engine_run_backward
_engine = torch_api.execution_engine
_set_materialize_grads = torch.autograd.function.FunctionCtx.set_materialize_grads
_modules = (torch.autograd, torch.autograd.graph)  # torch.autograd imports the function by name
_LEFT_BEHIND = 1024  # walks of the engine that ended without a program
_LEFT_NODES = 40_000  # ... or this many nodes of such walks (19 MB), but
_LEFT_LEAST = 64  # never fewer walks than this, because bound structures must then be bound again
"""After these the engine's cache is emptied. It keeps an entry for each node that it walks, even if the pass then runs
in eager: 470 bytes a node (torch 2.13). It compares the successors of a node one by one, because its hash ignores their
constants."""
UNSERVED = 1000
"""Unserved passes in a row after which a replay takes its hook out of the engine. Looking up the call site of a pass
takes 3 to 16 µs, so this costs 10 ms. With fewer, one phase of a script, such as some epochs with frozen layers, would
decide for all of it."""


class Handler(Protocol):
    """The interface that decides how the passes that an :class:`Engine` sees are run."""

    def recorder(self) -> Any:
        """Return the recorder for the present pass, which the engine's cache does not know."""

    def before(self, roots: Sequence[Any], inputs: Sequence[Any]) -> Callable[[float], None] | None:
        """Return None if the engine is to walk the next pass. Otherwise eager runs it, and the returned function gets
        its seconds."""

    def left_to_eager(self, reason: str) -> None:
        """Handle a pass that the engine or the recorder refused; eager runs it."""

    def ended(self) -> None:
        """Handle the end of a pass that the engine walked."""

    def forgot(self) -> None:
        """Prepare for emptying the engine's cache."""


class Engine:
    """The engine's hook, as a context. It serializes the threads and follows the engine's rules; the handler decides
    how passes run.

    With ``may_leave`` it takes the hook out for good after :data:`UNSERVED` unserved passes in a row. The backward of
    an MLP of 17 nodes then takes 70 µs, as in eager; it takes 85 µs if each pass is looked up by its call site.
    """

    def __init__(self, handler: Handler, *, may_leave: bool) -> None:
        self.handler, self.may_leave = handler, may_leave
        self._turn = threading.RLock()  # one pass at a time
        self._switch = threading.Lock()
        self._off = 0  # eager passes that keep the hook off
        self._prior: tuple[Any, bool] = (None, False)
        self._thread = 0
        self.running = False  # a pass of this session is being computed: errors from now on are errors of user code
        self.inside = False  # ... or recorded
        self.outside = False  # a hook or custom function of the pass is being called
        self.callbacks: list[Callable[[], None]] = []  # the callbacks that they queued (queue_callback)
        self.runs_in = 0  # the thread of the pass
        self.roots: Sequence[Any] = ()
        self.targets: Sequence[Any] = ()
        # Times: the pass was called, the engine called the bound code, that code returned
        self.began = self.reached = self.left = 0.0
        self.largest = 0  # nodes of the largest structure that was recorded
        self._left = 0  # walks since the engine's cache was empty that ended without a program
        self.unserved = 0  # passes since the last one that ran compiled
        self.has_left = False  # the hook is out of the engine for good
        self.not_looked_at = 0  # passes since then

    def clear_cache(self) -> None:
        """Unbind all structures; the next pass of each is a binding pass again."""
        self.handler.forgot()
        self._left = 0
        torch_api.clear_cache()

    # -- the context

    def __enter__(self) -> Engine:
        if _hooks and _hooks[-1]._thread != threading.get_ident():
            raise AotBackwardError(
                "another thread records or replays already; the engine's setting is process-wide: enter once, around everything that trains"
            )
        self._thread = threading.get_ident()
        self._prior = torch_api.set_autograd_compiler(self.handler.recorder, True)
        # PyTorch's own compiled autograd leaves its logger behind, which calls methods of a compiler that Recorder lacks
        torch_api.set_verbose_logger(None)
        self.clear_cache()  # an entry of the cache belongs to the session that recorded it
        if not _hooks:
            for module in _modules:
                module._engine_run_backward = _run  # type: ignore[attr-defined]
            torch.autograd.function.FunctionCtx.set_materialize_grads = _record_materialize_grads  # type: ignore[method-assign, assignment]
            torch_api.set_execution_engine(_Engine())
        _hooks.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if not _hooks or _hooks[-1] is not self:
            raise AotBackwardError(
                "record and replay contexts must be left in the reverse order in which they were entered"
            )
        _hooks.pop()
        if not _hooks:
            for module in _modules:
                module._engine_run_backward = _eager  # type: ignore[attr-defined]
            torch.autograd.function.FunctionCtx.set_materialize_grads = _set_materialize_grads  # type: ignore[method-assign]
            torch_api.set_execution_engine(_engine)
        self.clear_cache()
        torch_api.set_autograd_compiler(*self._prior)
        self._prior = (None, False)

    @contextlib.contextmanager
    def calling_out(self) -> Iterator[None]:
        """Return a context for calling a hook or custom function of the pass."""
        self.outside = True
        try:
            yield
        finally:
            self.outside = False

    def final_callbacks(self) -> None:
        """Run the queued callbacks in order; a callback may queue more. The engine runs none for compiled autograd."""
        while self.callbacks:
            with self.calling_out():
                self.callbacks.pop(0)()

    # -- one pass

    def run(self, roots: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a pass. ``args``: the engine's arguments (incoming gradients, keep_graph, create_graph, inputs)."""
        if self.has_left:
            self.not_looked_at += 1
            return _eager(roots, *args, **kwargs)
        if self.may_leave and self.unserved >= UNSERVED and not self.inside and not torch_api.in_backward():
            self.take_out()
            return self.run(roots, args, kwargs)
        self.unserved += 1
        if not args[2] and (after := self.handler.before(roots, args[3])) is not None:
            start = time.perf_counter()
            result = self._without(roots, args, kwargs)
            after(time.perf_counter() - start)
            return result
        if args[2]:
            return self._leave_to_eager(
                "create_graph=True: compiled passes cannot be differentiated again", roots, args, kwargs
            )
        if torch_api.in_functorch() or any(g is not None and torch_api.is_batched(g) for g in args[0]):
            return self._leave_to_eager(
                "batched gradients (is_grads_batched=True), or within a functorch transform", roots, args, kwargs
            )
        if torch_api.in_forward_mode():
            return self._leave_to_eager(
                "within forward-mode differentiation, whose tangents native code would drop", roots, args, kwargs
            )
        while not self._turn.acquire(timeout=0.02):
            if self.outside:  # the thread that has the turn may be waiting for this pass
                return self._leave_to_eager("ran while another thread's hook was called", roots, args, kwargs)
        try:
            if self.inside:
                return self._leave_to_eager(
                    "re-entrant: called by a hook or a custom function of another pass", roots, args, kwargs
                )
            if self._off:
                reason = (
                    "ran within a pass that ran in eager"
                    if torch_api.in_backward()
                    else "ran beside a pass of another thread"
                )
                return self._leave_to_eager(reason, roots, args, kwargs)
            if self._left >= _LEFT_LEAST and (self._left >= _LEFT_BEHIND or self._left * self.largest >= _LEFT_NODES):
                self.clear_cache()
            self.inside, self.running, self.runs_in = True, False, threading.get_ident()
            self.roots, self.targets, self.began = roots, args[3], time.perf_counter()
            try:
                result = _eager(roots, *args, **kwargs)
                self.handler.ended()
                return result
            except Exception as error:
                if self.running:
                    raise
                self._left += 1
                if isinstance(error, MissError):
                    raise
                reason = " ".join(str(error).split()) or type(error).__name__
            finally:
                self.inside = self.running = False
                self.roots = self.targets = ()
                self.callbacks.clear()
            result = self._without(roots, args, kwargs)  # raises eager's error if the pass itself is wrong
            for rest in (" You can disable", " Please ", " Exception raised from"):
                reason = reason.partition(rest)[0]
            if reason.startswith("Compiled autograd is not compatible with C++ DDP Reducer"):
                reason = DATA_PARALLEL
            self.handler.left_to_eager(reason)
            return result
        finally:
            self._turn.release()

    def take_out(self) -> None:
        """Take the hook out of the engine for the rest of the context: every pass runs in eager."""
        has_turn = self._take_turn()
        try:
            with self._switch:
                if not self.has_left:
                    self._off += 1
                    torch_api.set_autograd_compiler(None, False)
                    self.has_left = True
        finally:
            if has_turn:
                self._turn.release()

    def _take_turn(self) -> bool:
        """Wait until no other thread's pass is in the engine, which would crash if its compiler were removed. Do not
        wait for a pass that is calling a hook: the engine has its compiler's answer, and the hook may wait for this
        thread. Return whether the turn must be released."""
        while not self._turn.acquire(timeout=0.02):
            if self.outside:
                return False
        return True

    def _leave_to_eager(self, reason: str, roots: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.handler.left_to_eager(reason)  # before it runs: it may raise
        return self._without(roots, args, kwargs)

    def _without(self, roots: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the pass in eager. The hook stays off as long as any such pass runs."""
        has_turn = self._take_turn()
        try:
            with self._switch:
                self._off += 1
                if self._off == 1:
                    torch_api.set_autograd_compiler(None, False)
        finally:
            if has_turn:
                self._turn.release()
        outside, self.outside = self.outside, False  # the engine runs callbacks that its hooks queue
        try:
            return _eager(roots, *args, **kwargs)
        finally:
            self.outside = outside
            with self._switch:
                self._off -= 1
                if self._off == 0:
                    torch_api.set_autograd_compiler(self.handler.recorder, True)


def _run(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not _hooks:
        return _eager(roots, *args, **kwargs)
    return _hooks[-1].run(roots, args, kwargs)


class _Engine:
    """A stand-in for PyTorch's engine object: it keeps callbacks that are queued by hooks of our passes."""

    def __init__(self) -> None:
        self.run_backward = _engine.run_backward  # found without __getattr__

    def queue_callback(self, callback: Callable[[], None]) -> None:
        if _hooks and _hooks[-1].outside and _hooks[-1].runs_in == threading.get_ident():
            _hooks[-1].callbacks.append(callback)
        else:
            _engine.queue_callback(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(_engine, name)


def _record_materialize_grads(context: Any, value: bool) -> None:
    context.__dict__[MATERIALIZE] = value
    _set_materialize_grads(context, value)
