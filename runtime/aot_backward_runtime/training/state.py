"""What a training step changes: parameters, buffers, the optimizer's state, the numbers of its groups; to and from eager's dicts and a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AotBackwardError, StateError
from ..format.manifest import StepSpec
from ..native import tensor_values
from ..native.tensor_values import Copies
from . import checkpoint, loss_scale
from .param_groups import Group, Numbers, plain

Notes = tuple[list[dict[str, Any]], dict[str, int], bool, dict[str, Any] | None]
_PROGRESS = ("count", "skipped", "accumulated")
_LARGEST = 1 << 62
_WRONG = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""What other shapes of dicts and lists, and numbers and tensors of other kinds, raise where they are looked at."""
_LOSS = "loss_fn."


class TrainingState:
    """The tensors of a loaded step, by the names that eager gives them.

    Every change of them is checked whole before the first tensor is written, so that an error leaves the old state.
    """

    def __init__(
        self,
        spec: StepSpec,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        persistent: Sequence[str],
        others: Mapping[str, torch.Tensor],
        on_params: Callable[[], None],
        unsettled: list[bool],
    ):
        """``others``: the rest of the entry's state by name. ``persistent``: the names that the module's ``state_dict`` has. ``unsettled``: see
        :class:`Numbers`."""
        self.spec, self.parameters, self.buffers, self._persistent = spec, parameters, buffers, persistent
        self.numbers = Numbers(spec, others["numbers"], unsettled)
        self.groups = [Group(self.numbers, n, g, [parameters[p] for p in g.parameters], on_params) for n, g in enumerate(spec.groups)]
        self.slots = [(s.key, s.parameters, others[s.state]) for s in spec.state]
        self.loss = {n.removeprefix(_LOSS): t for n, t in others.items() if n.startswith(_LOSS)}
        """What the loss function holds, which eager's two dicts do not."""
        self._first = [t.detach().clone() for *_, t in self.slots] if spec.fresh else None
        self.gradients: dict[str, torch.Tensor] = {g.parameter: others[g.state] for g in spec.gradients}
        for s in spec.state:
            if s.starts_as >= 0:
                self.numbers.follow(s.starts_as, others[s.state])
        self.updates: tuple[int, object] = (0, None)
        """How many were made, and the call that made the last: said again after an interrupt (:meth:`updated`), it is not counted twice."""
        self._skips: tuple[int, object] = (0, None)
        self._adds: tuple[int, object] = (0, None)
        self.fresh = spec.fresh
        scale = [n.value for n in spec.numbers if (n.group, n.key) == (-1, loss_scale.KEY)]
        self.scaler = loss_scale.LossScale(self.numbers, scale[0]) if scale else None

    @property
    def fresh(self) -> bool:
        """Whether the optimizer has made no step, so that eager's has no state yet."""
        return self._fresh

    @fresh.setter
    def fresh(self, flag: bool) -> None:
        self.numbers.fresh(flag)
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

    def updated(self, call: object) -> None:
        if self.updates[1] is not call:
            self.updates = (self.updates[0] + 1, call)
        if self._fresh:
            self.fresh = False

    def left_out(self, call: object) -> None:
        """The update of ``call`` was skipped."""
        if self._skips[1] is not call:
            self._skips = (self._skips[0] + 1, call)

    def added(self, call: object) -> None:
        """The gradients of ``call`` were added to those that wait. What the graphs are to make of the next ones is :meth:`waiting`'s to say."""
        if self._adds[1] is not call:
            self._adds = (self._adds[0] + 1, call)

    @property
    def _module(self) -> dict[str, torch.Tensor]:
        return {n: self._whole[n] for n in self._persistent}

    @property
    def _whole(self) -> dict[str, torch.Tensor]:
        """With the buffers that are not persistent: a forward may change them too."""
        return {**self.parameters, **self.buffers}

    def waiting(self, calls: int) -> None:
        """So many calls' gradients have been added up."""
        before, self.numbers.unsettled[0] = self.numbers.unsettled[0], True
        self._adds = (calls, self._adds[1])
        self.numbers.adding(calls > 0)
        self.numbers.unsettled[0] = before

    def write_numbers(self) -> None:
        """Everything that native code reads as a number, after an interrupt in the middle of writing."""
        for group in self.groups:
            group.write()
        if self.scaler is not None:
            self.scaler.write(again=True)
        self.numbers.adding(self.accumulated > 0)
        self.numbers.fresh(self._fresh)
        self.numbers.write_flags()

    # eager's dicts

    def state_dict(self, whole: bool = False) -> dict[str, Any]:
        order = {name: i for i, name in enumerate(n for g in self.spec.groups for n in g.parameters)}
        state: dict[int, dict[str, torch.Tensor]] = {}
        if whole or not self.fresh:
            for key, names, tensor in self.slots:
                for name in names:
                    # what counts steps is on the CPU in eager, wherever the parameter is
                    state.setdefault(order[name], {})[key] = tensor.detach().clone() if tensor.dim() else tensor.detach().cpu().clone()
        groups = []
        for spec, group in zip(self.spec.groups, self.groups, strict=True):
            groups.append({**group.options(), "params": [order[n] for n in spec.parameters]})
        return {
            "module": {n: t.detach().clone() for n, t in self._module.items()},
            "optimizer": {"state": dict(sorted(state.items())), "param_groups": groups},
            **self.progress(),
            **({"scaler": self.scaler.state_dict()} if self.scaler is not None else {}),
        }

    def progress(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _PROGRESS}

    def checked(self, state: Mapping[str, Any]) -> Change:
        """What eager's dicts come to, for :meth:`take`; :class:`StateError` says what does not fit."""
        try:
            return self._checked(state)
        except _WRONG as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise StateError(f"this is no state of a module and an optimizer: {what}") from error

    def _checked(self, state: Mapping[str, Any]) -> Change:
        if not isinstance(state, Mapping) or not {"module", "optimizer"} <= state.keys():
            has = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f'expected {{"module": net.state_dict(), "optimizer": optimizer.state_dict()}}, got {has}')
        copies = self._fitting("module", self._module, state["module"])
        optimizer = state["optimizer"]
        if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
            raise StateError("state['optimizer'] is no state_dict of a torch.optim optimizer: it needs 'state' and 'param_groups'")
        given, groups = optimizer["state"], optimizer["param_groups"]
        theirs, ours = [len(g["params"]) for g in groups], [len(g.parameters) for g in self.spec.groups]
        if theirs != ours:
            raise StateError(f"the optimizer's groups have {theirs} parameters; this step was exported with {ours}")
        names = [n for g in self.spec.groups for n in g.parameters]
        order = [p for g in groups for p in g["params"]]
        if strangers := sorted(map(str, given.keys() - set(order))):
            raise StateError(f"the optimizer's state has entries {strangers[:5]}, which none of its groups has")
        named = {names[i]: given[p] for i, p in enumerate(order) if p in given}
        if all(v is None for slots in named.values() for v in slots.values()):
            named = {}  # as eager's SGD has it where no momentum was used yet
        options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self._check_options(options)
        slots = self._slots_from(named)
        progress = {name: _count(name, state.get(name, 0)) for name in _PROGRESS}
        if progress["count"] and self.slots and not named:
            raise StateError(
                f"{progress['count']} updates were made, but the optimizer's state is empty: a checkpoint is to be loaded into state_dict(whole=True)"
            )
        progress["accumulated"] = 0  # gradients that wait are no part of it
        untouched = state.get("count") == 0 and self._first is not None and all(map(_equal, (v for _, v in slots), self._first))
        scaler = state.get("scaler")
        if self.scaler is None or not scaler:  # an eager scaler that is switched off has an empty one
            scaler = None
        else:
            self.scaler.check(scaler)
        return Change(copies + slots, options, progress, not named or untouched, scaler)

    def _slots_from(self, named: Mapping[str, Mapping[str, Any]]) -> Copies:
        if not named:
            if self._first is None and self.slots:
                raise StateError("the optimizer's state is empty, and this step was exported in the middle of a training: it knows no beginning")
            return [(tensor, first) for (*_, tensor), first in zip(self.slots, self._first or (), strict=True)]
        copies = []
        known = {(name, key) for key, parameters, _ in self.slots for name in parameters}
        trained = {name for name, _ in known} or named.keys()  # the state of a parameter that was frozen since may linger in eager
        for name in named:
            for key, value in named[name].items():
                if name in trained and isinstance(value, torch.Tensor) and (name, key) not in known:
                    raise StateError(f"the optimizer's state of {name!r} has {key!r}; {self.spec.optimizer}, as it was exported, has no such")
        for key, parameters, tensor in self.slots:
            first: torch.Tensor | None = None
            for name in parameters:
                value = named.get(name, {}).get(key)
                if value is None and key == "momentum_buffer" and name in named:
                    if any(g.get("dampening") for g in self.groups) and any(s.get(key) is not None for s in named.values()):
                        raise StateError(f"{name!r} has no momentum yet and others have: with dampening its first step would be another one")
                    value = torch.zeros_like(tensor)  # eager's, before the first step
                if type(value) in (int, float):
                    value = torch.tensor(float(value))
                if value is None:
                    raise StateError(f"the optimizer's state of {name!r} has no {key!r}; {self.spec.optimizer} needs it")
                if problem := tensor_values.misfit(value, tensor):
                    raise StateError(f"the optimizer's {key!r} of {name!r} {problem}")
                if first is not None and float(value) != float(first):
                    raise StateError(
                        f"the optimizer's {key!r} is {float(first):g} for {parameters[0]!r} and {float(value):g} for {name!r}; this step was "
                        f"exported with one for both: export it with the optimizer in this state"
                    )
                first = value
            assert first is not None
            copies.append((tensor, first))
        return copies

    # the file

    def save(self, path: str | os.PathLike[str], random: Mapping[str, torch.Tensor], extra: Any) -> None:
        tensors = {f"module/{n}": t for n, t in self._whole.items()} | {f"loss/{n}": t for n, t in self.loss.items()}
        tensors |= {f"optimizer/{key}/{names[0]}": t for key, names, t in self.slots}
        if self.accumulated:
            tensors |= {f"gradient/{n}": t for n, t in self.gradients.items()}
        tensors |= {f"random/{n}": t for n, t in random.items()}
        about = {
            "optimizer": self.spec.optimizer,
            "groups": [{"parameters": list(s.parameters), "options": plain(g.options())} for s, g in zip(self.spec.groups, self.groups, strict=True)],
            "fresh": self.fresh,
            **self.progress(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "extra": extra,
        }
        checkpoint.write_state(path, tensors, about)

    def read(self, path: str | os.PathLike[str], random: bool) -> tuple[Change, dict[str, torch.Tensor], Any]:
        """What :meth:`save` wrote, for :meth:`take`; the states of random generators by name, looked at where ``random``; and ``extra``."""
        tensors, about = checkpoint.read_state(path)
        try:
            return self._read(tensors, about, random)
        except (AotBackwardError, *_WRONG) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise StateError(f"{path} does not fit this step: {what}") from error

    def _read(self, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any], random: bool) -> tuple[Change, dict[str, torch.Tensor], Any]:
        if about["optimizer"] != self.spec.optimizer:
            raise StateError(f"it was saved by {about['optimizer']}, this is {self.spec.optimizer}")
        theirs, ours = [g["parameters"] for g in about["groups"]], [list(g.parameters) for g in self.spec.groups]
        if theirs != ours:
            odd = sorted({n for g in theirs for n in g} ^ {n for g in ours for n in g})
            raise StateError(f"its parameter groups are others than this step's{', which differ in ' + odd[0] if odd else ''}")
        parts: dict[str, dict[str, torch.Tensor]] = {"module": {}, "loss": {}, "optimizer": {}, "gradient": {}, "random": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            parts[kind][rest] = tensor
        copies = self._fitting("module", self._whole, parts["module"], True) + self._fitting("loss", self.loss, parts["loss"], True)
        copies += self._fitting("optimizer", {f"{key}/{names[0]}": t for key, names, t in self.slots}, parts["optimizer"], True)
        progress = {name: _count(name, about[name]) for name in _PROGRESS}
        if progress["accumulated"] and not self.gradients:
            raise StateError(f"gradients of {progress['accumulated']} calls wait in it, which this step was exported without (accumulate=True)")
        copies += self._fitting("gradient", self.gradients if progress["accumulated"] else {}, parts["gradient"], True)
        options = [g["options"] for g in about["groups"]]
        self._check_options(options)
        fresh, scaler = about["fresh"], about.get("scaler")
        if not isinstance(fresh, bool):
            raise StateError(f"fresh is {fresh!r}; expected true or false")
        if (scaler is None) != (self.scaler is None):
            raise StateError(f"it has {'no' if scaler is None else 'a'} loss scale, and this step has {'one' if scaler is None else 'none'}")
        if self.scaler is not None:
            self.scaler.check(scaler)
        for name, state in parts["random"].items() if random else ():
            _check_random(name, state)
        return Change(copies, options, progress, fresh, scaler), parts["random"], about["extra"]

    def take(self, change: Change) -> None:
        """What was checked becomes the state; after an interrupt inside it may be called again."""
        tensor_values.write(change.copies)
        for group, given in zip(self.groups, change.options, strict=True):
            for key, value in given.items():
                if key not in _FORM:
                    group.put(key, value)
        if self.scaler is not None and change.scaler is not None:
            self.scaler.load_state_dict(change.scaler)
        self.updates, self._skips = (change.progress["count"], None), (change.progress["skipped"], None)
        self.fresh = change.fresh
        self.waiting(change.progress["accumulated"])

    # another process

    def tensors(self) -> list[torch.Tensor]:
        """Everything that training changes, but the groups' numbers, in the same order in each process."""
        own = [*self.parameters.values(), *self.buffers.values(), *self.loss.values(), *(t for *_, t in self.slots)]
        return [t.detach() for t in (*own, *(self.gradients.values() if self.accumulated else ()))]

    def notes(self) -> Notes:
        """What :meth:`follow` takes: what is not in tensors."""
        return [plain(g.options()) for g in self.groups], self.progress(), self.fresh, self.scaler.state_dict() if self.scaler is not None else None

    def follow(self, notes: Notes) -> None:
        """Options, counts and all become those of a process with the same package. :meth:`tensors` are not changed."""
        options, progress, fresh, scaler = notes
        self.take(Change([], options, progress, fresh, scaler))

    def _check_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, given in zip(self.groups, options, strict=True):
            if not isinstance(given, Mapping):
                raise StateError(f"the options of a parameter group are a {type(given).__name__}; expected a dict")
            for key in sorted(group.own - given.keys() - set(_FORM)):
                if group[key] is not False and group[key] is not None:  # what an older torch did not have yet is off
                    raise StateError(f"a parameter group has no {key!r}; in this step it is {group[key]!r}")
            for key, value in given.items():
                if key not in _FORM:
                    group.check(key, value)

    def _fitting(self, what: str, own: Mapping[str, torch.Tensor], given: Any, exactly: bool = False) -> Copies:
        if not isinstance(given, Mapping):
            raise StateError(f"{what} state is a {type(given).__name__}; expected tensors by name")
        if problem := tensor_values.unlike(own, given, exactly=exactly):
            raise StateError(f"{what} state: {problem}")
        return [(tensor, given[name]) for name, tensor in own.items()]


@dataclass(frozen=True)
class Change:
    """A state that was found good, on its way in."""

    copies: Copies
    options: Sequence[Mapping[str, Any]]
    progress: Mapping[str, int]
    fresh: bool
    scaler: Mapping[str, Any] | None


_FORM = ("foreach", "fused", "capturable", "differentiable")
"""Options of eager's that choose among forms of the same computation."""


def _equal(value: torch.Tensor, own: torch.Tensor) -> bool:
    return torch.equal(value.to(own), own)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise StateError(f"{name} is {value!r:.60}; expected a count")
    return value


def _check_random(name: str, state: torch.Tensor) -> None:
    """:class:`StateError` where torch's generator would not take ``state``: tried on another one."""
    kind = name.partition("/")[0]
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise StateError(f"the random state {name!r} is {state.dtype} of shape {tuple(state.shape)}; expected a row of bytes")
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        try:
            torch.Generator(kind).set_state(state)
        except RuntimeError as error:
            raise StateError(f"the random state {name!r} is none ({str(error).splitlines()[0]}); resume(…, random=False) does without") from error
