"""Run an optimizer step as one native call on the script's own tensors.

Eager makes the first step, which creates the state. Each later step is a call of compiled code that reads the gradients
and writes parameters and state in place. Guards run before each call: they check the groups with their options and
parameters, the presence of gradients, the tensors in the state, the metadata of all tensors, and whether they share
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from ..errors import InputError
from ..format.manifest import LibrarySpec, UpdateSpec
from ..format.param_groups import allowed_words, inside, options_of
from ..native.guards import Contract, Fast, Same
from ..native.library import NO_CONSTANTS, Library
from ..native.memory import Ranges, extent
from ..training.param_groups import plain
from .compiled_table import OtherCaller

FIRST_NUMBER = 2
"""Elements of the vector before the numbers: flags of training steps, 0 here."""
IGNORED = ("foreach", "fused")
"""Options that only choose eager's implementation."""
NO_STATE = "the optimizer has no state yet"
"""Why eager makes the first step of an optimizer that keeps state."""


class CompiledUpdate:
    """A recorded optimizer step with its library."""

    def __init__(self, spec: UpdateSpec, library: Library):
        self.spec, self.library = spec, library
        self.groups = [_FixedGroup(spec, n) for n in range(len(spec.groups))]
        places = {name: (g, i) for g, group in enumerate(spec.groups) for i, name in enumerate(group.parameters)}
        self.trained = [places[n] for n in spec.trained]
        self.untrained = [place for name, place in places.items() if name not in set(spec.trained)]
        keys: dict[str, list[str]] = {n: [] for n in spec.trained}
        for slot in spec.state:
            keys[slot.parameter].append(slot.key)
        self.keys = [keys[n] for n in spec.trained]

    def bind(self, optimizer: torch.optim.Optimizer) -> BoundUpdate:
        """Bind the optimizer. Raise :class:`InputError` if this code does not fit its present state."""
        return BoundUpdate(self, optimizer)


class BoundUpdate:
    """A compiled update and one optimizer that it serves. It holds no reference to the optimizer."""

    def __init__(self, code: CompiledUpdate, optimizer: torch.optim.Optimizer):
        self.code = code
        refuse_unsupported(optimizer)
        self._numbers: list[Any] = []
        self._vector = torch.zeros(FIRST_NUMBER + len(code.spec.numbers), dtype=torch.float64)
        self._ranges = Ranges(())
        self._extents: list[int] = []
        groups = optimizer.param_groups
        if len(groups) != len(code.groups):
            raise OtherCaller(f"it has {len(groups)} parameter groups; {len(code.groups)} were recorded")
        for n, (group, recorded) in enumerate(zip(groups, code.groups, strict=True)):
            recorded.check(n, group)
        self._groups = [
            (recorded.values(group), list(group["params"])) for group, recorded in zip(groups, code.groups, strict=True)
        ]
        self._parameters = [self._groups[g][1][i] for g, i in code.trained]
        self._others = [self._groups[g][1][i] for g, i in code.untrained]
        self._bind(optimizer)

    def _bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Check all tensors and numbers that native code takes. Raise :class:`InputError` if they do not fit."""
        self._read_numbers(optimizer)
        gradients, written = self._gradients(), [*self._parameters, *self._state(optimizer)]
        _check([*gradients, *written, self._vector], self.code.library.spec)
        fast = Fast(gradients)
        if not fast.holds(gradients) or not Fast(written).holds(written):
            raise InputError("a tensor of it cannot be read by native code")
        names = [s.name for s in self.code.library.spec.inputs]
        ranges = Ranges(zip(names[len(gradients) : -1], written, strict=True))
        if pair := ranges.overlap():
            raise InputError(f"{pair[0]} and {pair[1]} share memory")
        library = self.code.library
        with library.lock:
            library.bind(NO_CONSTANTS)  # raises if it cannot be opened, before the tensors' versions change
        self._ranges = ranges
        self._extents = list(map(extent, gradients))
        self._fast, self._written, self._known = fast, Same(written), _KnownState(optimizer.state)

    def serves(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether groups, options and parameters are the bound ones."""
        groups = optimizer.param_groups
        if len(groups) != len(self._groups):
            return False
        for group, recorded, (values, parameters) in zip(groups, self.code.groups, self._groups, strict=True):
            try:
                if recorded.values(group) != values:
                    return False
            except (LookupError, RuntimeError, TypeError):  # a key is missing, or holds a tensor or another type
                return False
            now = group["params"]
            if len(now) != len(parameters) or not all(map(is_, now, parameters)):
                return False
        return True

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step. Raise :class:`InputError`, with nothing changed, if it does not fit."""
        refuse_unsupported(optimizer)
        gradients = self._gradients()
        self._read_numbers(optimizer)
        if not self._known.is_still(optimizer.state) or not self._written.stayed() or not self._fast.holds(gradients):
            self._bind(optimizer)
        written = self._written.tensors
        self._check_memory(gradients)
        torch.autograd.graph.increment_version(written)
        self.code.library.run_bound(NO_CONSTANTS, [*gradients, *written, self._vector])

    def _gradients(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._parameters]
        if any(g is None for g in gradients):
            place = self.code.spec.trained[gradients.index(None)]
            raise InputError(f"the gradient of parameter {place} is None; one was there when it was recorded")
        if any(p.grad is not None for p in self._others):
            raise InputError("a parameter has a gradient, and had none when it was recorded")
        return gradients

    def _state(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        state = optimizer.state
        values: list[Any] = []
        for parameter, keys in zip(self._parameters, self.code.keys, strict=True):
            own = state.get(parameter)
            if own is None or not keys:
                if keys:
                    raise InputError(NO_STATE)
                if own and any(v is not None for v in own.values()):
                    raise InputError(
                        f"the optimizer has the state {next(k for k, v in own.items() if v is not None)!r}; none was recorded"
                    )
                continue
            if len(own) != len(keys) and sum(v is not None for v in own.values()) != len(keys):
                raise InputError(
                    f"the optimizer's state of a parameter is {sorted(own) or 'empty'}; {sorted(keys)} was recorded"
                )
            for key in keys:
                value = own.get(key)
                if value is None:
                    raise InputError(f"the optimizer has no state {key!r} yet")
                values.append(value)
        return values

    def _read_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        now = [
            groups[n.group][n.key] if n.position < 0 else groups[n.group][n.key][n.position]
            for n in self.code.spec.numbers
        ]
        values = [float(v) for v in now]
        if values == self._numbers:
            return
        for number, value in zip(self.code.spec.numbers, values, strict=True):
            if number.allowed and not any(inside(value, i) for i in number.allowed):
                raise InputError(
                    f"param_groups[{number.group}][{number.key!r}] is {value:g}; the code was compiled for {allowed_words(number.allowed)}"
                )
        self._vector[FIRST_NUMBER:] = torch.tensor(values, dtype=torch.float64)
        self._numbers = values

    def _check_memory(self, gradients: Sequence[torch.Tensor]) -> None:
        """Raise :class:`InputError` if a gradient shares memory with a written tensor: none did when the code was
        compiled."""
        if not self._ranges.apart_from(self._fast.addresses, self._extents):
            for gradient in gradients:
                if name := self._ranges.reached_by(gradient):
                    raise InputError(f"a gradient shares memory with {name}")


class _KnownState:
    """A guard on an optimizer's state: the same parameters, keys and values. They are compared in the order of the
    dicts, which is cheaper than looking each up."""

    __slots__ = ("_keys", "_parameters", "_values")

    def __init__(self, state: Mapping[Any, dict[str, Any]]):
        self._parameters = list(state)
        self._keys = list(chain.from_iterable(state.values()))
        self._values = list(chain.from_iterable(map(dict.values, state.values())))

    def is_still(self, state: Mapping[Any, dict[str, Any]]) -> bool:
        return (
            len(state) == len(self._parameters)
            and all(map(is_, state, self._parameters))
            and list(chain.from_iterable(state.values())) == self._keys
            and all(map(is_, chain.from_iterable(map(dict.values, state.values())), self._values))
        )


class _FixedGroup:
    """The fixed part of a parameter group: its number of parameters, and its options except for the numbers that the
    code reads."""

    def __init__(self, spec: UpdateSpec, number: int):
        group = spec.groups[number]
        options = options_of(group)
        read = {(n.key, n.position) for n in spec.numbers if n.group == number}
        self._count = len(group.parameters)
        self._options = {k: v for k, v in options.items() if k not in IGNORED and not any(k == key for key, _ in read)}
        # If the code reads only some elements of a list, the others are fixed.
        lists = {k: v for k, v in options.items() if isinstance(v, list) and k not in self._options}
        self._elements = {(k, i): e for k, v in lists.items() for i, e in enumerate(v) if (k, i) not in read}

    def values(self, group: Mapping[str, Any]) -> list[Any]:
        return [group[key] for key in self._options] + [group[key][i] for key, i in self._elements]

    def check(self, number: int, group: Mapping[str, Any]) -> None:
        if len(group["params"]) != self._count:
            raise OtherCaller(
                f"param_groups[{number}] has {len(group['params'])} parameters; {self._count} were recorded"
            )
        for key, value in self._options.items():
            if key not in group or plain(group[key]) != value:
                raise OtherCaller(f"param_groups[{number}][{key!r}] is {group.get(key)!r:.60}; {value!r} was recorded")
        for (key, i), value in self._elements.items():
            if plain(group[key][i]) != value:
                raise OtherCaller(
                    f"param_groups[{number}][{key!r}][{i}] is {group[key][i]!r:.60}; {value!r} was recorded"
                )


def _check(inputs: Sequence[torch.Tensor], spec: LibrarySpec) -> None:
    contract = Contract(spec.inputs, (), ())
    for tensor, input_spec in zip(inputs, spec.inputs, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{input_spec.name} is a {type(tensor).__name__}; expected a tensor")
    _, _, untouched = contract.fit(inputs)
    if not untouched:
        name = next(s.name for t, s in zip(inputs, spec.inputs, strict=True) if tuple(t.stride()) != tuple(s.stride))
        raise InputError(f"{name} has other strides than when it was recorded")


def name_of(kind: type) -> str:
    """Return the full name of a class, as in :attr:`UpdateSpec.optimizer`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_unsupported(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`InputError` if the step depends on something that compiled code ignores."""
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        raise InputError("a GradScaler scales the gradients within the optimizer's fused step")
    if torch.is_autocast_enabled("cpu"):
        raise InputError("it is called under autocast")
