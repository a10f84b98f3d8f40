"""Whether the optimizer steps of a ``replay`` entry agree with themselves and with their libraries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..errors import PackageError
from ..format.dtypes import is_floating
from ..format.manifest import EntrySpec, LibrarySpec, NumberSpec, UpdateSpec
from ..format.param_groups import inside, options_of
from .tensor_checks import check_tensor
from .variant_checks import check_speed, check_status

_MOST = 1_000_000  # parameters


def check_updates(entry: EntrySpec, libraries: Mapping[str, LibrarySpec]) -> None:
    """:class:`PackageError` names what is wrong; that every library is there was checked before."""
    if entry.updates and entry.kind != "replay":
        raise PackageError(f"an entry of kind {entry.kind!r} has no recorded optimizer steps, but {len(entry.updates)} are listed")
    for number, update in enumerate(entry.updates):
        try:
            _check_update(update, libraries[update.library])
        except PackageError as error:
            raise PackageError(f"optimizer step {number}: {error}") from error


def operand_names(update: UpdateSpec) -> list[str]:
    """What its library calls what it takes, in order: gradients, parameters, state, numbers."""
    place = {p: f"param_groups[{g}]['params'][{i}]" for g, group in enumerate(update.groups) for i, p in enumerate(group.parameters)}
    parameters = [place[p] for p in update.trained]
    return [*(f"{p}.grad" for p in parameters), *parameters, *(f"state[{place[s.parameter]}][{s.key!r}]" for s in update.state), "numbers"]


def result_name(update: UpdateSpec) -> str:
    """What its library calls its result: a digest of what the code was compiled for, which nothing else in the manifest would contradict."""
    stated = [update.optimizer, update.trained, [*map(dataclasses.astuple, update.groups), *map(dataclasses.astuple, update.numbers)]]
    return f"step {hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16]}"


def _check_update(update: UpdateSpec, library: LibrarySpec) -> None:
    check_status(update.verdict)
    check_speed(update.speed, "compiled")
    if not update.optimizer.startswith("torch.optim."):
        raise PackageError(f"it is of {update.optimizer[:80]!r}, which is no optimizer of torch.optim")
    listed = [p for g in update.groups for p in g.parameters]
    if listed != [f"{g}.{i}" for g, group in enumerate(update.groups) for i in range(len(group.parameters))] or len(listed) > _MOST:
        raise PackageError("its parameters are not called by their places")
    if not update.trained or len(set(update.trained)) != len(update.trained) or not set(listed).issuperset(update.trained):
        raise PackageError("it trains a parameter twice, one that is not there, or none")
    slots = [(s.key, s.parameter) for s in update.state]
    if len(set(slots)) != len(slots) or not set(update.trained).issuperset(p for _, p in slots):
        raise PackageError("it lists a tensor of state twice, or of a parameter that it does not train")
    groups = [options_of(g) for g in update.groups]
    places = [(n.group, n.key, n.position) for n in update.numbers]
    if len(set(places)) != len(places):
        raise PackageError("it lists a number twice")
    for number in update.numbers:
        _check_number(number, groups)
    names = operand_names(update)
    if [s.name for s in library.inputs] != names:
        raise PackageError(f"its library {update.library} takes {len(library.inputs)} tensors, which are not the {len(names)} that the step has")
    if [s.name for s in library.outputs] != [result_name(update)]:
        raise PackageError(f"its library {update.library} was compiled for another optimizer, other groups or other numbers than it lists")
    for spec in (*library.inputs, *library.outputs):
        check_tensor(spec, set())
    count = len(update.trained)
    for gradient, parameter in zip(library.inputs[:count], library.inputs[count : 2 * count], strict=True):
        if not is_floating(parameter.dtype) or (gradient.dtype, gradient.shape) != (parameter.dtype, parameter.shape):
            raise PackageError(f"{gradient.name} is {gradient.dtype} {gradient.shape}, the parameter {parameter.dtype} {parameter.shape}")
    numbers = library.inputs[-1]
    if (numbers.dtype, numbers.shape) != ("float64", (len(update.numbers) + 2,)) or any(s.device != "cpu" for s in library.inputs):
        wanted = f"float64, {len(update.numbers) + 2} of them, on the CPU"
        raise PackageError(f"its numbers are {numbers.dtype} of shape {numbers.shape}; expected {wanted}")
    if library.constants:
        raise PackageError(f"its library {update.library} has {len(library.constants)} constants, and nothing to bind them to")


def _check_number(number: NumberSpec, groups: list[dict[str, Any]]) -> None:
    label = f"the number {number.key[:80]!r} of group {number.group}"
    if not 0 <= number.group < len(groups):
        raise PackageError(f"{label} is of none of the {len(groups)} groups")
    value: Any = groups[number.group].get(number.key)
    if number.position != -1:
        value = value[number.position] if isinstance(value, list) and 0 <= number.position < len(value) else None
    if type(value) not in (int, float) or value != number.value:
        raise PackageError(f"{label} is {number.value!r}; the group's options say {str(value)[:40]!r}")
    if number.allowed and not any(inside(number.value, i) for i in number.allowed):
        raise PackageError(f"{label} is {number.value!r}, which is in none of the intervals that the code was compiled for")
