"""``load(path).step()``: forward, backward and optimizer in one native call, on state that the step owns."""

from __future__ import annotations

import copy
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..entries.bound_parameter import BoundParameter, StepParameter, Watch, bound, has_hooks, resizable
from ..entries.call_cache import CachedCall
from ..entries.dispatch import Entry, MatchedCall
from ..entries.pickling import pickled, refuse_shallow_copy, restore
from ..errors import AotBackwardError, ExecutionError, InputError, StateError, WeightsError
from ..native import allocator
from ..native.library import Binding, reason_of
from ..native.memory import Ranges
from ..native.plan import Runnable
from . import checkpoint_contents, eager_state, rng_state
from .gradient_hooks import add_through_hooks, refuse_hooks_that_never_run
from .loss_scale import LossScale
from .state import Change, TrainingState

if TYPE_CHECKING:
    from .distributed import Replicas

_MODULE = "module."
_CACHED = 8  # cached calls, so that each of several alternating kinds needs only a check in C; a guess
_OPTIMIZER = "optimizer."
# The properties of a step return these tensors, and a caller may give them other memory
_PUBLIC = (_MODULE, _OPTIMIZER)


class LoadedStep(torch.optim.Optimizer):
    """A training step: ``loss = step(x, y)`` runs forward, backward and optimizer in one native call, on state that the
    step owns.

    It implements as much of ``torch.optim.Optimizer`` as ``torch.optim.lr_scheduler`` needs: ``param_groups`` holds the
    numbers that a schedule changes, and the next call uses them. You can copy it with ``copy.deepcopy``; to store it,
    call :meth:`save`.

    Attributes:
        grad_norm: The norm of the gradients in the last update, before clipping, a 0-d tensor; None without
            ``clip_norm`` or before an update.
        defaults: The optimizer's default options.

    Examples:
        >>> step = load("step.pt2").step()
        >>> schedule = torch.optim.lr_scheduler.StepLR(step, step_size=10)
        >>> for x, y in batches:
        ...     loss = step(x, y)
        ...     schedule.step()
        >>> step.save("training.safetensors", extra={"epoch": 1})
    """

    def __init__(self, entry: Entry, tensors: Mapping[str, torch.Tensor], digest: str, shared: bool):
        """``tensors``: the weights by key, which the step then owns. ``digest``: the package's. ``shared``: whether
        other entries hold them too."""
        # torch.optim.Optimizer.__init__ is not called: it expects parameters that an eager step changes, and imports
        # Dynamo
        spec = entry.spec.step
        assert spec is not None
        self._entry, self._tensors, self._digest = entry, dict(tensors), digest
        self._watch = Watch()  # watches the tensors that a caller holds
        self._watched = False
        self._touched = self._watch.touched  # also set while numbers are being written
        self._shared = shared
        # Whether user code may hold a parameter in an autograd graph: then each write increments its version
        self._exposed = shared
        by_weight: dict[str, torch.Tensor] = {}
        for s in entry.spec.state:
            if s.weight not in by_weight:
                is_public = s.name.startswith(_PUBLIC)
                by_weight[s.weight] = (
                    bound(StepParameter, tensors[s.weight], s.requires_grad, self._watch)
                    if is_public
                    else tensors[s.weight]
                )
        self._held = [by_weight[s.weight] for s in entry.spec.state]
        # Makes torch.utils.swap_tensors refuse
        self._weak = [weakref.ref(t) for t in self._held if isinstance(t, BoundParameter)]
        own = [s for s in entry.spec.state if s.name.startswith(_MODULE)]
        parameters = {s.name.removeprefix(_MODULE): by_weight[s.weight] for s in own if s.parameter}
        buffers = {s.name.removeprefix(_MODULE): by_weight[s.weight] for s in own if not s.parameter}
        persistent = [s.name.removeprefix(_MODULE) for s in own if s.persistent]
        others = {s.name: by_weight[s.weight] for s in entry.spec.state}
        self._state = TrainingState(spec, parameters, buffers, persistent, others, self._expose, self._touched)
        self._has_norm, self._may_skip = spec.norm, spec.finite
        refuse_hooks_that_never_run(parameters, self._state.gradients)
        self._update = Runnable(spec.update, entry.libraries) if spec.update is not None else None
        self._writes: Sequence[torch.Tensor] = [*parameters.values(), *buffers.values()]
        self._replicas: Replicas | None = None
        self._mode = "train" if entry.spec.training else "eval"
        # The last call; None while gradients are accumulated, or if they are averaged
        self._last: _StepCall | None = None
        self._cached: list[_StepCall] = []  # the last calls of different kinds, including accumulating ones
        self._binding: Binding | None = None
        self._run_update: Callable[..., list[torch.Tensor]] | None = None
        self._inconsistent = ""
        self._lock = threading.RLock()
        self.defaults: dict[str, Any] = json.loads(spec.defaults)
        self.grad_norm: torch.Tensor | None = None
        if shared and any(map(resizable, self._held)):
            self._expose()

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry, given at export; {} if there is none."""
        return self._entry.spec.json_metadata

    # calling

    def __call__(self, *args: Any, update: bool = True, **kwargs: Any) -> Any:
        """Make one update with the gradients of these arguments, or only accumulate them.

        Args:
            *args: The exported module's arguments and, with a ``loss_fn``, its target as the last.
            update: Whether to update. ``update=False`` only adds up gradients (``accumulate=True`` at export); the next
                update uses them all.
            **kwargs: The module's keyword arguments.

        Returns:
            The loss, a 0-d tensor, detached; or all results of the module, the loss first.

        Raises:
            InputError: An argument does not fit; nothing was changed.
            ExecutionError: Native code failed; the message says whether the state is still whole.
            DistributedError: Another process ended or does not match.
        """
        last = self._last
        if (
            last is None
            or kwargs
            or not update
            or self._touched[0]
            or (self._watched and self._watch.changed())
            or not last.fits(args)
        ):
            return self._call_cached(args, kwargs, update)
        # Native code runs inside one call of C, list.extend: after an interrupt, ``ran`` tells whether the update was
        # made.
        ran: list[list[torch.Tensor]] = []
        operands: Any = args if last.order is None else [args[i] for i in last.order]
        call = map(last.native, (operands,))
        if self._exposed:
            torch.autograd.graph.increment_version(self._writes)
        try:
            ran.extend(call)
            if not self._may_skip:  # _record_update, without its branches
                if self._has_norm:
                    self.grad_norm = ran[0][-1]
                state = self._state
                state.updates = (state.updates[0] + 1, call)
            else:
                self._record_update(ran[0], call)
        except BaseException as error:
            if ran:
                self._record_update(ran[0], call)
            self._after_failure(error, ran, last.runnable)
            raise
        return ran[0][0] if last.plain else last.value(ran[0], args)

    def _record_update(self, results: Sequence[torch.Tensor], call: object) -> None:
        """Update counters and ``grad_norm`` after an update. After an interrupt, a second call for the same ``call``
        changes nothing."""
        state, spec = self._state, self._state.spec
        if spec.norm:
            self.grad_norm = results[-2 if spec.finite else -1]
        if spec.finite:
            finite = bool(results[-1].item())
            if state.scaler is not None:
                state.scaler.update(finite, call)
            if not finite:
                state.record_skip(call)
                return
        state.record_update(call)

    def _after_failure(
        self, error: BaseException, ran: Sequence[Any], runnable: Runnable, adding: bool = False
    ) -> None:
        """Handle a failure of native code, or an interrupt before it (``ran`` is empty) or after it."""
        if ran or isinstance(error, AotBackwardError):
            return
        if isinstance(error, RuntimeError):
            raise self._execution_error(error, adding) from error
        if runnable.library is not None and not runnable.library.is_one_call:
            self._clear_cache()
            self._inconsistent = (
                f"a call was interrupted ({type(error).__name__}), which may have been inside native code"
            )

    def _call_cached(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> Any:
        """Serve a call that differs from the last one: from the cache (other sizes, accumulated or averaged gradients),
        or else by matching."""
        with self._lock:
            adding = not update or self._replicas is not None or self._state.accumulated > 0
            ready = None
            if not kwargs and not self._touched[0] and not (self._watched and self._watch.changed()):
                ready = next((r for r in self._cached if r.adding == adding and r.fits(args)), None)
            if ready is None:
                return self._match_and_call(args, kwargs, update)
            self._share_buffers()
            operands = args if ready.order is None else [args[i] for i in ready.order]
            results = self._run(ready, lambda: (ready.native, operands), update)
            if not adding:
                self._last = ready
            return ready.value(results, args)

    def _run(
        self,
        ready: _StepCall,
        bound: Callable[[], tuple[Any, Any]],
        update: bool,
        hooked: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> list[torch.Tensor]:
        """Run native code on the result of ``bound``, and record it. If that only accumulates gradients and ``update``
        is set, update too. ``hooked``: parameters by name that have gradient hooks."""
        ran: list[Any] = []
        results: list[list[torch.Tensor]] = [] if hooked else ran
        call: Any = None
        if self._exposed:
            torch.autograd.graph.increment_version(self._state.buffers.values() if ready.adding else self._writes)
        try:
            native, operands = bound()
            call = map(native, (operands,))
            if hooked:
                add_through_hooks(self._state, call, hooked, results, ran)
            else:
                ran.extend(call)
            if ready.adding:
                self._record_accumulation(call, update)
            else:
                self._record_update(results[0], call)
        except BaseException as error:
            if ran and ready.adding:
                self._state.record_accumulation(call)
                self._last = None
                self._state.set_accumulated(self._state.accumulated)
            elif ran:
                self._record_update(results[0], call)
            self._after_failure(error, results, ready.runnable, ready.adding)
            raise
        return results[0]

    def _match_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> Any:
        entry, state = self._entry, self._state
        with self._lock:
            self._check_consistent()
            matched = entry.match(self._mode, args, kwargs)
            binding = self._bind()
            hooked = {n: p for n in state.gradients if has_hooks(p := state.parameters[n])}
            self._watch.settle(bool(hooked))
            separate = not update or state.accumulated > 0 or self._replicas is not None or bool(hooked)
            if separate and self._update is None:
                raise InputError(
                    f"entry {entry.name!r} was exported without gradient accumulation: export it with accumulate=True for update=False"
                )
            self._share_buffers()
            runnable = matched.variant.plans["accumulate" if separate else "step"]
            written = runnable.written(binding, self._held)
            runnable.refuse_overlap(written, matched.given, matched.variant.spec.inputs)
            ready = _StepCall(entry, matched, runnable, self._held, written, separate)
            with torch.no_grad(), allocator.kept():
                results = self._run(ready, lambda: runnable.bound(binding, matched.flat, matched.sizes), update, hooked)
            self._opt_called = True  # lr_scheduler warns if it is stepped before its optimizer
            if ready.remember(matched, args):
                self._cached = [ready, *self._cached[: _CACHED - 1]]
                self._last = None if separate else ready
            return ready.value(results, matched.given)

    def _record_accumulation(self, call: object, update: bool) -> None:
        """Record that gradients were added to the accumulated ones, or replaced them."""
        self._state.record_accumulation(call)
        self._last = None  # its plan would ignore the accumulated gradients
        if self._replicas is not None:
            self._replicas.buffers_due = update
        if update:
            self._apply()
        else:
            self._state.numbers.set_accumulating(True)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update with the accumulated gradients.

        Args:
            closure: Unsupported; it exists for the signature of ``torch.optim.Optimizer``.

        Raises:
            InputError: No gradients have been accumulated, or ``closure`` is given.
        """
        with self._lock:
            if closure is not None:
                raise InputError(
                    "a compiled step takes no closure: call it with the arguments of the module, loss = step(x, y)"
                )
            self._check_consistent()
            if not self._state.accumulated:
                raise InputError(
                    "no gradients have been accumulated: call step(…, update=False) first, or step(…) for gradients and update in one call"
                )
            self._apply()

    def _apply(self) -> None:
        state, runnable = self._state, self._update
        assert runnable is not None and runnable.library is not None
        if self._run_update is None or self._touched[0] or (self._watched and self._watch.changed()):
            self._run_update, _ = runnable.bound(self._bind(), (), {})
        if self._replicas is not None:
            self._collectively("averaging gradients", self._replicas.average)
        ran: list[list[torch.Tensor]] = []
        call = map(self._run_update, ([],))
        if self._exposed:
            torch.autograd.graph.increment_version(self._writes)
        try:
            ran.extend(call)
            self._record_separate_update(ran[0], call)
        except BaseException as error:
            if ran:
                self._record_separate_update(ran[0], call)
            else:
                state.set_accumulated(state.accumulated)
            self._after_failure(error, ran, runnable)
            raise

    def _record_separate_update(self, results: Sequence[torch.Tensor], call: object) -> None:
        self._record_update(results, call)
        self.zero_grad()

    def _bind(self) -> Binding:
        """Return the library's bindings, renewed if a tensor was given other memory."""
        for spec, tensor in zip(self._entry.spec.state, self._held, strict=True):
            if tensor.requires_grad != spec.requires_grad:
                raise InputError(
                    f"{spec.name.removeprefix(_MODULE)}.requires_grad was changed: the set of trained parameters is fixed in the compiled step; "
                    "change it back, or export a step without this one in the optimizer"
                )
        binding = self._entry.state.refresh([t.detach() for t in self._held])
        if binding is not self._binding:
            self._clear_cache()
            if self._shared:
                for spec, tensor in zip(self._entry.spec.state, self._held, strict=True):
                    if spec.name.startswith(_PUBLIC) and tensor.data_ptr() != self._tensors[spec.weight].data_ptr():
                        raise WeightsError(
                            f"{spec.name.removeprefix(_MODULE)} was moved to other memory, and other entries of the package would not see it: "
                            f"write into it in place (with torch.no_grad(): p.copy_(…))"
                        )
            self._binding = binding
        if self._touched[0]:
            self._state.write_numbers()
        return binding

    def _clear_cache(self) -> None:
        """Forget all cached calls: the next call of each kind is matched again."""
        self._last, self._cached, self._run_update = None, [], None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients.

        Args:
            set_to_none: Ignored; it exists for the signature of ``torch.optim.Optimizer``.
        """
        self._state.set_accumulated(0)
        self._last = None

    def _check_consistent(self) -> None:
        if self._inconsistent:
            raise ExecutionError(
                f"the state is inconsistent: {self._inconsistent}; resume() a saved state, or load_state_dict(), and go on"
            )

    def _execution_error(self, error: RuntimeError, adding: bool = False) -> ExecutionError:
        """Return the error of a failed native call. ``adding``: whether the call only accumulates gradients."""
        self._clear_cache()
        reason = reason_of(error)
        if adding:
            self.zero_grad()
            outcome = "the accumulated gradients are lost, everything else is unchanged"
        elif self._replicas is not None:
            self._inconsistent = f"an update failed in this process ({reason}), and other processes have made it"
            outcome = "other processes have made this update: resume() a saved state on all of them"
        elif self._state.spec.in_place:
            outcome = "nothing was changed"
        else:
            self._inconsistent = f"a native call failed, maybe in the middle of an update ({reason})"
            outcome = "the update may be incomplete: resume() a saved state, or load_state_dict(), before the next step"
        return ExecutionError(f"entry {self._entry.name!r}: native code failed ({reason}); {outcome}")

    def train(self, mode: bool = True) -> LoadedStep:
        """Set the mode.

        Args:
            mode: Whether later calls run the variants of training mode; otherwise they run the variants of evaluation
                mode.

        Returns:
            The step itself.
        """
        self._clear_cache()
        self._mode = "train" if mode else "eval"
        return self

    def eval(self) -> LoadedStep:
        """Call ``train(False)``, and return the step itself."""
        return self.train(False)

    # state

    @property
    def param_groups(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The optimizer's groups. You may set their numbers, such as ``lr``; ``params`` are the parameters."""
        return tuple(self._state.groups)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The module's parameters by name. Write into them in place. The next call binds other memory (``.data =``)."""
        self._expose()
        return MappingProxyType(dict(self._state.parameters))

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module's buffers by name. Write into them in place."""
        self._expose()
        return MappingProxyType(dict(self._state.buffers))

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The accumulated gradients by parameter, detached; empty if there are none. The next call writes to them."""
        return MappingProxyType(
            {n: t.detach() for n, t in self._state.gradients.items()} if self._state.accumulated else {}
        )

    @property
    def state(self) -> Mapping[torch.Tensor, Mapping[str, torch.Tensor]]:  # type: ignore[override]
        """The optimizer's state by parameter, the tensors themselves. Write into them in place."""
        self._expose()
        self._expose(_OPTIMIZER)
        out: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for key, names, tensor in [] if self._state.fresh else self._state.slots:
            for name in names:
                out.setdefault(self._state.parameters[name], {})[key] = tensor
        return MappingProxyType({p: MappingProxyType(slots) for p, slots in out.items()})

    @property
    def averages(self) -> Mapping[str, torch.Tensor]:
        """The averages of the trained parameters by name, detached; empty without ``ema`` at export. The next call
        writes to them. To evaluate them: ``net.load_state_dict(step.averages, strict=False)``, or
        ``state_dict()["ema"]`` in an ``AveragedModel``."""
        return MappingProxyType({n: t.detach() for n, t in self._state.averages.items()})

    @property
    def ema(self) -> float | None:
        """The decay of the averages; None without them. You may set it, for example to
        ``min(0.999, (1 + step.count) / (10 + step.count))``. It is not part of the saved state."""
        return self._state.decay

    @ema.setter
    def ema(self, decay: float) -> None:
        self._state.decay = decay

    @property
    def scaler(self) -> LossScale | None:
        """The loss scale of a step that was exported with ``loss_scale``, else None."""
        return self._state.scaler

    @property
    def count(self) -> int:
        """The number of updates made."""
        return self._state.count

    @property
    def skipped(self) -> int:
        """The number of updates skipped because a gradient was Inf or NaN (with ``skip_nonfinite`` or
        ``loss_scale``)."""
        return self._state.skipped

    @property
    def accumulated(self) -> int:
        """The number of calls with accumulated gradients since the last update."""
        return self._state.accumulated

    def state_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """Return a copy of the state, for ``load_state_dict`` of an eager module and optimizer.

        Args:
            whole: Whether to include the optimizer's state before its first step, when eager has none yet.
                ``torch.distributed.checkpoint.load`` needs it: it only fills existing entries.

        Returns:
            A dict with the keys "module", "optimizer", "count" and others.
        """
        with self._lock:
            return eager_state.to_eager(self._state, whole)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an eager training, or a result of :meth:`state_dict`.

        Args:
            state_dict: ``{"module": net.state_dict(), "optimizer": optimizer.state_dict()}``, or a result of
                :meth:`state_dict`.

        Raises:
            StateError: A part of the state does not fit; nothing was changed.
            InputError: A tensor or an option does not fit; nothing was changed.
        """
        with self._lock:
            self._replace_state(eager_state.from_eager(self._state, state_dict))
            self._inconsistent = ""

    def _replace_state(self, change: Change) -> None:
        """Apply ``change`` to the state, even if an interrupt comes in the middle."""
        self._last = None
        try:
            self._state.replace(change)
        except BaseException:
            self._state.replace(change)
            raise

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Write the whole training state to a file, atomically.

        The file has parameters, buffers, the optimizer's state, the groups' numbers, accumulated gradients, the
        counters and torch's random state. If there are several processes, all must call it, at the same point; rank 0
        writes. Accumulated gradients are averaged first, and all ranks get the buffers of rank 0, so that any number of
        processes can resume.

        Args:
            path: The file to write.
            extra: Any JSON value, such as an epoch or a schedule's state.

        Raises:
            StateError: The state cannot be written; an old file stays.
        """
        with self._lock:
            if self._inconsistent:
                raise StateError(f"nothing was saved to {path}: {self._inconsistent}")
            random, replicas = rng_state.current(self._held[0].device), self._replicas
            if replicas is None:
                checkpoint_contents.save(self._state, path, random, extra)
                return
            if self._state.accumulated:
                self._collectively("averaging gradients", replicas.average)
            everyone = replicas.collectives.gathered(random)
            self._share_buffers()
            replicas.collectives.by_first(lambda: checkpoint_contents.save(self._state, path, everyone, extra))

    def resume(self, path: str | os.PathLike[str], *, random: bool = True) -> Any:
        """Restore the state written by :meth:`save`, bit for bit.

        If there are several processes, all must call it; rank 0 reads the file for all. A rank without a saved random
        state (there were fewer processes) keeps its own.

        Args:
            path: The file to read.
            random: Whether to restore torch's random state too.

        Returns:
            The ``extra`` that was saved.

        Raises:
            StateError: The file is damaged, incomplete or of another program, on every rank; the state is unchanged.

        Examples:
            >>> step.resume("training.safetensors")
            {'epoch': 1}
        """
        with self._lock:

            def read() -> tuple[dict[str, torch.Tensor], Any]:
                change, states, extra = checkpoint_contents.read(self._state, path, random)
                self._replace_state(change)
                return states, extra

            replicas = self._replicas
            if replicas is None:
                states, extra = read()
            else:
                states, extra = replicas.collectives.by_first(read)
                self._collectively("sharing the state", replicas.follow_first)
            self._last, self._inconsistent = None, ""
            if random:
                rng_state.restore(states, self._held[0].device, self._rank())
            return extra

    # several processes

    def distribute(
        self,
        group: Any = None,
        *,
        broadcast_buffers: bool = True,
    ) -> LoadedStep:
        """Average gradients over processes before each later update, as ``DistributedDataParallel`` does. All start
        from the state of rank 0.

        Call it on every rank, after ``torch.distributed.init_process_group``. Export the step with
        ``distributed=True``.

        Args:
            group: The process group; by default all processes.
            broadcast_buffers: Whether all ranks get the buffers of rank 0 (BatchNorm's statistics) before a forward,
                unless the previous call had no update.

        Returns:
            The step itself.

        Raises:
            DistributedError: The processes do not match, or one has ended.
            InputError: The step is already distributed, or was exported for one process.
        """
        from .distributed import Replicas

        if self._update is None:
            raise InputError(
                f"entry {self._entry.name!r} was exported for one process: export it with distributed=True"
            )
        if self._replicas is not None:
            raise InputError("this step is already distributed; load the package again for other processes")
        with self._lock:
            state = self._state
            replicas = Replicas(state, group, broadcast_buffers)
            replicas.collectives.check_same(f"package {self._digest}, entry {self._entry.name}")
            replicas.move_gradients()
            for gradient in state.spec.gradients:
                self._held[self._entry.index[gradient.state]] = state.gradients[gradient.parameter]
            self._clear_cache()
            self._collectively("sharing the state", replicas.follow_first)
            self._replicas = replicas
        return self

    def _rank(self) -> int:
        """Return the rank that selects the random state to resume. A script may resume before it distributes."""
        if self._replicas is not None:
            return self._replicas.collectives.rank
        distributed = torch.distributed
        return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0

    def _share_buffers(self) -> None:
        if (replicas := self._replicas) is not None and replicas.buffers_due and replicas.broadcasts_buffers:
            self._collectively("sharing buffers", replicas.share_buffers)

    def _collectively(self, label: str, action: Callable[[], None]) -> None:
        """Run ``action``, a collective. If it raises because a process ended or was interrupted, only some tensors may
        have new values."""
        try:
            action()
        except BaseException:
            self._clear_cache()
            self._inconsistent = f"{label} was interrupted"
            raise

    # methods of torch.optim.Optimizer that a compiled step cannot serve

    def add_param_group(self, param_group: Any) -> None:
        raise InputError(
            "the parameter groups of a compiled step are fixed; export a step with this group in its optimizer"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a compiled step does not call hooks: run the hook's code before or after the call")

    register_step_pre_hook = register_step_post_hook = _refuse_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __repr__(self) -> str:
        return f"LoadedStep(entry={self._entry.name!r}, optimizer={self._state.spec.optimizer.rpartition('.')[2]}, count={self.count})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedStep:
        with self._lock:
            tensors = {
                k: t.detach().clone()
                for k, t in zip((s.weight for s in self._entry.spec.state), self._held, strict=True)
            }
            other = LoadedStep(copy.deepcopy(self._entry, memo), tensors, self._digest, False)
            other.load_state_dict(self.state_dict())
            other._mode, other._inconsistent = self._mode, self._inconsistent
            other._state.set_accumulated(self._state.accumulated)
            return other

    def __copy__(self) -> LoadedStep:
        return refuse_shallow_copy(self)

    def __reduce__(self) -> Any:
        with self._lock:
            self._check_consistent()
            tensors = pickled(self._entry.spec.state, self._held)
            accumulated = self._state.accumulated
            return (
                self._entry.reopen,
                (),
                {"tensors": tensors, "state": self.state_dict(), "accumulated": accumulated, "mode": self._mode},
            )

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self._entry.spec.state, self._held, state["tensors"])
        self.load_state_dict(state["state"])
        self._state.set_accumulated(state["accumulated"])
        self._mode = state["mode"]

    def _expose(self, kind: str = _MODULE) -> None:
        """Record that user code may hold the tensors of ``kind``, give them other memory, and use them in autograd
        graphs."""
        self._exposed = self._watched = True
        self._watch.add(t for s, t in zip(self._entry.spec.state, self._held, strict=True) if s.name.startswith(kind))


class _StepCall(CachedCall):
    __slots__ = ("adding",)

    def __init__(
        self,
        entry: Entry,
        matched: MatchedCall,
        runnable: Runnable,
        held: list[torch.Tensor],
        written: Ranges,
        adding: bool,
    ):
        """``adding``: whether the call only accumulates gradients."""
        super().__init__(entry, matched, runnable, held, written)
        self.adding = adding
