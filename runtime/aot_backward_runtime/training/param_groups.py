"""The parameter groups of a loaded step: dicts like an optimizer's, but their numbers are elements of a vector that
native code reads."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import InputError
from ..format.manifest import GroupSpec, NumberSpec, StepSpec
from ..format.param_groups import allowed_words, inside, options_in, options_of


class Numbers:
    """The vector of numbers that the graphs read (:class:`NumberSpec`)."""

    def __init__(self, spec: StepSpec, vector: torch.Tensor, touched: list[bool]):
        """``touched[0]`` is True while numbers are being written. If an interrupt leaves it True, the next call writes
        them again."""
        self.touched = touched
        self.optimizer = spec.optimizer.rpartition(".")[2]
        self._places: dict[tuple[int, str, int], tuple[NumberSpec, torch.Tensor]] = {}
        for i, number in enumerate(spec.numbers, start=2):
            self._places[number.group, number.key, number.position] = number, vector[i]
        self.defaults = options_in(spec.defaults, "the optimizer's defaults")
        self._flags = vector[0], vector[1]
        self._set = [False, spec.fresh]
        self._following: dict[int, list[torch.Tensor]] = {}
        self._vector = vector
        with torch.no_grad():
            vector.copy_(torch.tensor([0.0, float(spec.fresh), *(n.value for n in spec.numbers)], dtype=torch.float64))

    def set_accumulating(self, flag: bool) -> None:
        """Set whether the next gradients are added to the accumulated ones, or replace them."""
        self._put(0, flag)

    def set_fresh(self, flag: bool) -> None:
        """Set whether the optimizer has no state yet."""
        self._put(1, flag)

    def _put(self, place: int, flag: bool) -> None:
        if self._set[place] != flag:
            self._flags[place].fill_(float(flag))
            if place == 1 and flag:
                for number, tensors in self._following.items():
                    for tensor in tensors:
                        tensor.fill_(self._vector[2 + number].item())
            self._set[place] = flag  # last: after an interrupt before this line all of it is repeated

    def write_flags(self) -> None:
        for place, flag in enumerate(self._set):
            self._flags[place].fill_(float(flag))

    def positions(self, group: int, key: str) -> list[int]:
        """Return the positions of the numbers of ``key``: [-1] for a single number, indices for a list, or an empty
        list."""
        return [p for g, k, p in self._places if (g, k) == (group, key)]

    def check(self, group: int, key: str, position: int, value: Any) -> float:
        """Return ``value`` as a float, within the intervals that the code was compiled for. :class:`InputError` names
        them."""
        spec, _ = self._places[group, key, position]
        label = _label(group, key, position)
        try:
            if isinstance(value, (str, bytes, bytearray)):
                raise TypeError("float() would read it")
            number = float(value)
        # RuntimeError: a tensor that is complex or on the meta device
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            text = "an integer beyond float64" if isinstance(value, int) else f"{value!r:.60}"
            raise InputError(f"{label} is {text}; expected a number") from error
        if spec.allowed and not any(inside(number, i) for i in spec.allowed):
            raise InputError(
                f"{label} = {number:g}: {self.optimizer} computes differently for this value; "
                f"compiled for {allowed_words(spec.allowed)}: export a step for this value"
            )
        return number

    def get(self, group: int, key: str, position: int = -1) -> float:
        return float(self._places[group, key, position][1])

    def set(self, group: int, key: str, position: int, value: float) -> None:
        self._places[group, key, position][1].fill_(value)
        if self._following and self._set[1]:  # state that the optimizer derives from this number in its first step
            for tensor in self._following.get(list(self._places).index((group, key, position)), ()):
                tensor.fill_(value)

    def add_initialised(self, number: int, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` with the number at that index of the list until the first step."""
        self._following.setdefault(number, []).append(tensor)


class Group(dict[str, Any]):
    """One parameter group. Setting a number changes the value that native code reads. Setting an option that is fixed
    in that code raises :class:`InputError`. Other keys (``initial_lr``) are the caller's own."""

    def __init__(
        self, numbers: Numbers, index: int, spec: GroupSpec, params: list[torch.Tensor], on_params: Callable[[], None]
    ):
        options = options_of(spec)
        super().__init__({"params": params, **options})
        self._numbers, self._index, self._on_params = numbers, index, on_params
        # Other options, like a schedule's initial_lr, are the caller's
        self.own = options.keys() & numbers.defaults.keys()
        self._fixed = {k for k in options if not numbers.positions(index, k)}
        self._tuples = {k for k, v in options.items() if isinstance(v, list)}
        for key in self._tuples:
            super().__setitem__(key, tuple(options[key]))

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            self._on_params()
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.check(key, value)
        self.put(key, value)

    def check(self, key: str, value: Any) -> None:
        """Raise :class:`InputError` if ``value`` may not be set."""
        if key == "params":
            raise InputError(
                "the parameters of a group are fixed in the compiled step; export a step with other groups"
            )
        if key in self._fixed and _differ(value, super().__getitem__(key)):
            raise InputError(
                f"{_label(self._index, key, -1)} is fixed in the compiled step at {super().__getitem__(key)!r}, got {value!r}: export a step for it"
            )
        for position, part in self._parts(key, value):
            self._numbers.check(self._index, key, position, part)

    def put(self, key: str, value: Any) -> None:
        """Set a value that was checked."""
        if key not in self._fixed:
            value = plain(value)
            before, self._numbers.touched[0] = self._numbers.touched[0], True
            super().__setitem__(key, tuple(value) if key in self._tuples else value)
            self._write(key)
            self._numbers.touched[0] = before

    def write(self) -> None:
        """Write all numbers for native code."""
        for key in self.options().keys() - self._fixed:
            self._write(key)

    def _write(self, key: str) -> None:
        for position, part in self._parts(key, super().__getitem__(key)):
            self._numbers.set(self._index, key, position, float(part))

    def _parts(self, key: str, value: Any) -> Iterable[tuple[int, Any]]:
        positions = self._numbers.positions(self._index, key)
        if positions in ([], [-1]):
            return [(p, value) for p in positions]
        before = super().__getitem__(key)
        if not isinstance(value, (tuple, list)) or len(value) != len(before):
            raise InputError(f"{_label(self._index, key, -1)} is {value!r}; expected {len(before)} numbers")
        for i, (old, new) in enumerate(zip(before, value, strict=True)):
            if i not in positions and _differ(old, new):
                raise InputError(
                    f"{_label(self._index, key, i)} is fixed in the compiled step at {old!r}, got {new!r}: export a step for it"
                )
        return [(p, value[p]) for p in positions]

    def update(self, *args: Any, **kwargs: Any) -> None:
        options = dict(*args, **kwargs)
        for key, value in options.items():
            self.check(key, value)
        for key, value in options.items():
            self.put(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: str) -> None:
        if key == "params" or key in self._fixed or self._numbers.positions(self._index, key):
            raise InputError(f"{_label(self._index, key, -1)} belongs to the compiled step and cannot be removed")
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def clear(self) -> None:
        raise InputError("a parameter group of a compiled step cannot be cleared")

    def popitem(self) -> Any:
        raise InputError("pop a key of a parameter group by its name")

    def __ior__(self, other: Any) -> Group:  # type: ignore[override,misc]
        self.update(other)
        return self

    def options(self) -> dict[str, Any]:
        """Return everything but the parameters."""
        return {k: v for k, v in self.items() if k != "params"}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def plain(value: Any) -> Any:
    """Return an option as JSON data: tensors of one element and NumPy's numbers as Python's, tuples as lists."""
    if isinstance(value, torch.Tensor) and not value.is_meta and value.numel() == 1:
        return value.item()
    if type(value) not in (bool, int, float) and isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return value


def _differ(value: Any, other: Any) -> bool:
    try:
        return bool(plain(value) != plain(other))
    except (RuntimeError, TypeError, ValueError):  # a tensor of several elements is neither equal nor not
        return True


def _label(group: int, key: str, position: int) -> str:
    where = f"param_groups[{group}][{key!r}]" if group >= 0 else key
    return where + (f"[{position}]" if position >= 0 else "")
