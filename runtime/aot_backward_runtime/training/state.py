"""The state that a training step changes: parameters, buffers, optimizer state, accumulated gradients, parameter
groups' numbers, counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError, StateError
from ..format.manifest import StepSpec
from ..native import tensor_values
from ..native.tensor_values import Copies
from . import loss_scale
from .param_groups import Group, Numbers, plain

Metadata = tuple[list[dict[str, Any]], dict[str, int], bool, dict[str, Any] | None]
COUNTERS = ("count", "skipped", "accumulated")
MALFORMED = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""Exceptions from reading a state of another structure: other nesting, missing keys, numbers and tensors of other
kinds."""
_MAX_COUNT = 1 << 62  # exclusive: the C library counts on from it in 64 bits
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose among eager's implementations of the same computation."""
_LOSS = "loss_fn."
_AVERAGE, AVERAGED = "ema.", "n_averaged"
"""Names in the entry's state of the averages of parameters (``export_step(ema=…)``), and of the number of updates in
them."""


class TrainingState:
    """The tensors of a loaded step, by their names in eager.

    A new state is checked completely before the first tensor is written, so an error leaves the old state.
    """

    def __init__(
        self,
        spec: StepSpec,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        persistent: Sequence[str],
        others: Mapping[str, torch.Tensor],
        on_params: Callable[[], None],
        touched: list[bool],
    ):
        """``others``: the rest of the entry's state by name. ``persistent``: the names in the module's ``state_dict``.
        ``touched``: see :class:`Numbers`."""
        self.spec, self.parameters, self.buffers, self._persistent = spec, parameters, buffers, persistent
        self.numbers = Numbers(spec, others["numbers"], touched)
        self.groups = [
            Group(self.numbers, n, g, [parameters[p] for p in g.parameters], on_params)
            for n, g in enumerate(spec.groups)
        ]
        self.slots = [(s.key, s.parameters, others[s.state]) for s in spec.state if not _is_average(s.state)]
        self.averages = {s.parameters[0]: others[s.state] for s in spec.state if s.state.startswith(_AVERAGE)}
        self.averaged = others.get(AVERAGED)
        self.loss = {n.removeprefix(_LOSS): t for n, t in others.items() if n.startswith(_LOSS)}
        """Tensors of the loss function, which eager's two dicts do not have."""
        self.initial = [_copy(t.detach()) for *_, t in self.slots] if spec.fresh else None
        """The slots before the optimizer's first step; None if the export was in the middle of a training."""
        self.gradients: dict[str, torch.Tensor] = {g.parameter: others[g.state] for g in spec.gradients}
        for s in spec.state:
            if s.starts_as >= 0:
                self.numbers.add_initialised(s.starts_as, others[s.state])
        self.updates: tuple[int, object] = (0, None)
        """The number of updates, and the call that made the last: after an interrupt, a repeated call is not counted
        twice."""
        self._skips: tuple[int, object] = (0, None)
        self._adds: tuple[int, object] = (0, None)
        self.fresh = spec.fresh
        scale = [n.value for n in spec.numbers if (n.group, n.key) == (-1, loss_scale.KEY)]
        self.scaler = loss_scale.LossScale(self.numbers, scale[0]) if scale else None

    @property
    def all_slots(self) -> list[tuple[str, tuple[str, ...], torch.Tensor]]:
        """The slots, and the averages of parameters in the same form."""
        counted = [] if self.averaged is None else [(AVERAGED, tuple(self.averages), self.averaged)]
        return [*self.slots, *((_AVERAGE[:-1], (n,), t) for n, t in self.averages.items()), *counted]

    @property
    def decay(self) -> float | None:
        """The decay of the averages."""
        return None if self.averaged is None else self.numbers.get(-1, _AVERAGE[:-1])

    @decay.setter
    def decay(self, value: float) -> None:
        if self.averaged is None:
            raise InputError("this step has no averages: export it with ema=0.999")
        self.numbers.set(-1, _AVERAGE[:-1], -1, self.numbers.check(-1, _AVERAGE[:-1], -1, value))

    @property
    def fresh(self) -> bool:
        """Whether the optimizer has made no step, so that eager's has no state yet."""
        return self._fresh

    @fresh.setter
    def fresh(self, flag: bool) -> None:
        self.numbers.set_fresh(flag)
        self._fresh = flag

    @property
    def count(self) -> int:
        return self.updates[0]

    @property
    def skipped(self) -> int:
        return self._skips[0]

    @property
    def accumulated(self) -> int:
        return self._adds[0]

    def record_update(self, call: object) -> None:
        if self.updates[1] is not call:
            self.updates = (self.updates[0] + 1, call)
        if self._fresh:
            self.fresh = False

    def record_skip(self, call: object) -> None:
        """Count the skipped update of ``call``."""
        if self._skips[1] is not call:
            self._skips = (self._skips[0] + 1, call)

    def record_accumulation(self, call: object) -> None:
        """Count ``call``, whose gradients were accumulated. :meth:`set_accumulated` sets whether native code adds the
        next ones to them."""
        if self._adds[1] is not call:
            self._adds = (self._adds[0] + 1, call)

    @property
    def persistent(self) -> dict[str, torch.Tensor]:
        """The tensors of the module's ``state_dict``."""
        module = self.module
        return {n: module[n] for n in self._persistent}

    @property
    def module(self) -> dict[str, torch.Tensor]:
        """All tensors of the module, including non-persistent buffers, because a forward may change them too."""
        return {**self.parameters, **self.buffers}

    def set_accumulated(self, calls: int) -> None:
        """Set the number of calls with accumulated gradients."""
        before, self.numbers.touched[0] = self.numbers.touched[0], True
        self._adds = (calls, self._adds[1])
        self.numbers.set_accumulating(calls > 0)
        self.numbers.touched[0] = before

    def write_numbers(self) -> None:
        """Write every number that native code reads. This is needed after an interrupt in the middle of writing."""
        for group in self.groups:
            group.write()
        if self.scaler is not None:
            self.scaler.write(again=True)
        self.numbers.set_accumulating(self.accumulated > 0)
        self.numbers.set_fresh(self._fresh)
        self.numbers.write_flags()

    def counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTERS}

    def replace(self, change: Change) -> None:
        """Apply ``change`` to the state. After an interrupt inside, it may be called again."""
        tensor_values.write(change.copies)
        for group, group_options in zip(self.groups, change.options, strict=True):
            for key, value in group_options.items():
                if key not in _IMPLEMENTATION:
                    group.put(key, value)
        if self.scaler is not None and change.scaler is not None:
            self.scaler.load_state_dict(change.scaler)
        self.updates, self._skips = (change.counters["count"], None), (change.counters["skipped"], None)
        self.fresh = change.fresh
        self.set_accumulated(change.counters["accumulated"])

    # another process

    def tensors(self) -> list[torch.Tensor]:
        """Return everything that training changes, except the groups' numbers, in the same order in each process."""
        own = [*self.parameters.values(), *self.buffers.values(), *self.loss.values(), *(t for *_, t in self.all_slots)]
        return [t.detach() for t in (*own, *(self.gradients.values() if self.accumulated else ()))]

    def metadata(self) -> Metadata:
        """Return the part of the state that :meth:`tensors` does not hold."""
        return (
            [plain(g.options()) for g in self.groups],
            self.counters(),
            self.fresh,
            self.scaler.state_dict() if self.scaler is not None else None,
        )

    def replace_metadata(self, metadata: Metadata) -> None:
        """Apply the :meth:`metadata` of another process with the same package. :meth:`tensors` are not changed."""
        options, counters, fresh, scaler = metadata
        self.replace(Change([], options, counters, fresh, scaler))

    def check_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise :class:`StateError` if ``options``, one dict per group without its parameters, do not fit."""
        for group, group_options in zip(self.groups, options, strict=True):
            if not isinstance(group_options, Mapping):
                raise StateError(
                    f"the options of a parameter group are a {type(group_options).__name__}; expected a dict"
                )
            for key in sorted(group.own - group_options.keys() - set(_IMPLEMENTATION)):
                if group[key] is not False and group[key] is not None:  # an option that an older torch lacks is off
                    raise StateError(f"a parameter group has no {key!r}; in this step it is {group[key]!r}")
            for key, value in group_options.items():
                if key not in _IMPLEMENTATION:
                    group.check(key, value)


@dataclass(frozen=True)
class Change:
    """A completely checked state, for :meth:`TrainingState.replace`."""

    copies: Copies
    options: Sequence[Mapping[str, Any]]
    counters: Mapping[str, int]
    fresh: bool
    scaler: Mapping[str, Any] | None


def _is_average(state: str) -> bool:
    return state == AVERAGED or state.startswith(_AVERAGE)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy. If all elements are equal, as in moments before the first step, return that number, expanded."""
    if tensor.numel() and tensor.is_floating_point():
        low, high = torch.aminmax(tensor)
        if low == high:
            return low.expand(tensor.shape)
    return tensor.clone()


def malformed(error: BaseException) -> str:
    """Return the message for one of :data:`MALFORMED`."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def matching(label: str, own: Mapping[str, torch.Tensor], values: Any, exactly: bool = False) -> Copies:
    """Pair each of ``own`` with the tensor of that name in ``values``. Raise :class:`StateError` if they do not fit.
    ``exactly``: require the same dtypes, and no other names."""
    if not isinstance(values, Mapping):
        raise StateError(f"{label} state is a {type(values).__name__}; expected tensors by name")
    if problem := tensor_values.unlike(own, values, exactly=exactly):
        raise StateError(f"{label} state: {problem}")
    return [(tensor, values[name]) for name, tensor in own.items()]


def counter(name: str, value: Any) -> int:
    """Return ``value``, checked to be a count."""
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise StateError(f"{name} is {value!r:.60}; expected a count")
    return value
