"""A training state as the dicts of eager training:
``{"module": net.state_dict(), "optimizer": optimizer.state_dict()}``, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import StateError
from ..native import tensor_values
from ..native.tensor_values import Copies
from .state import AVERAGED, COUNTERS, MALFORMED, Change, TrainingState, counter, malformed, matching


def to_eager(own: TrainingState, whole: bool = False) -> dict[str, Any]:
    """Return copies for ``load_state_dict`` of an eager module and optimizer. ``whole``: include the optimizer's state
    before its first step."""
    order = {name: i for i, name in enumerate(n for g in own.spec.groups for n in g.parameters)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    if whole or not own.fresh:
        for key, names, tensor in own.slots:
            for name in names:
                # step counters are on the CPU in eager, whatever the parameter's device
                state.setdefault(order[name], {})[key] = (
                    tensor.detach().clone() if tensor.dim() else tensor.detach().cpu().clone()
                )
    groups = []
    for spec, group in zip(own.spec.groups, own.groups, strict=True):
        groups.append({**group.options(), "params": [order[n] for n in spec.parameters]})
    return {
        "module": {n: t.detach().clone() for n, t in own.persistent.items()},
        "optimizer": {"state": dict(sorted(state.items())), "param_groups": groups},
        **own.counters(),
        **({"scaler": own.scaler.state_dict()} if own.scaler is not None else {}),
        **({"ema": _averages_of(own)} if own.averaged is not None else {}),
    }


def _averages_of(own: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies for ``AveragedModel.load_state_dict``. It also holds what is not averaged: other parameters, and
    buffers."""
    assert own.averaged is not None
    averages = {id(own.parameters[n]): t for n, t in own.averages.items()}  # a tied parameter has several names
    module = {f"module.{n}": averages.get(id(t), t).detach().clone() for n, t in own.persistent.items()}
    return {AVERAGED: own.averaged.detach().to(torch.int64), **module}


def from_eager(own: TrainingState, state: Mapping[str, Any]) -> Change:
    """Check ``state`` and return it for ``own.replace``. :class:`StateError` names the part that does not fit."""
    try:
        return _checked(own, state)
    except MALFORMED as error:
        raise StateError(f"this is not the state of a module and an optimizer: {malformed(error)}") from error


def _checked(own: TrainingState, state: Mapping[str, Any]) -> Change:
    if not isinstance(state, Mapping) or not {"module", "optimizer"} <= state.keys():
        got = (sorted(map(str, state)) or "an empty dict") if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f'expected {{"module": net.state_dict(), "optimizer": optimizer.state_dict()}}, got {got}')
    copies = matching("module", own.persistent, state["module"])
    optimizer = state["optimizer"]
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        raise StateError(
            "state['optimizer'] is not the state_dict of a torch.optim optimizer: it needs 'state' and 'param_groups'"
        )
    slots_by_id, groups = optimizer["state"], optimizer["param_groups"]
    counts, own_counts = [len(g["params"]) for g in groups], [len(g.parameters) for g in own.spec.groups]
    if counts != own_counts:
        raise StateError(
            f"the optimizer's groups have {counts or 'no'} parameters; this step was exported with {own_counts}"
        )
    names = [n for g in own.spec.groups for n in g.parameters]
    order = [p for g in groups for p in g["params"]]
    if unknown := sorted(map(str, slots_by_id.keys() - set(order))):
        raise StateError(f"the optimizer's state has entries {unknown[:5]}, which are in none of its groups")
    slots_by_name = {names[i]: slots_by_id[p] for i, p in enumerate(order) if p in slots_by_id}
    if all(v is None for slots in slots_by_name.values() for v in slots.values()):
        slots_by_name = {}  # as in eager's SGD if no momentum was used yet
    options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
    own.check_options(options)
    slots = _slots_from(own, slots_by_name)
    counters = {name: counter(name, state.get(name, 0)) for name in COUNTERS}
    if counters["count"] and own.slots and not slots_by_name:
        raise StateError(
            f"{counters['count']} updates were made, but the optimizer's state is empty: load the checkpoint into state_dict(whole=True)"
        )
    counters["accumulated"] = 0  # eager's dicts hold no gradients
    untouched = (
        state.get("count") == 0 and own.initial is not None and all(map(_equal, (v for _, v in slots), own.initial))
    )
    scaler = state.get("scaler")
    if own.scaler is None or not scaler:  # a disabled eager scaler has an empty state
        scaler = None
    else:
        own.scaler.check(scaler)
    return Change(
        copies + slots + _averages_from(own, state), options, counters, not slots_by_name or untouched, scaler
    )


def _averages_from(own: TrainingState, state: Mapping[str, Any]) -> Copies:
    """Without averages in ``state``, they begin anew, as those of a new ``AveragedModel``."""
    if own.averaged is None:
        return []
    ema = state.get("ema")
    if ema is None:
        averages = [(tensor, state["module"][name]) for name, tensor in own.averages.items()]
        return [*averages, (own.averaged, torch.zeros(()))]
    needed = {AVERAGED: own.averaged, **{f"module.{n}": t for n, t in own.averages.items()}}
    return matching("ema", needed, {n: ema[n] for n in needed if n in ema} if isinstance(ema, Mapping) else ema)


def _slots_from(own: TrainingState, slots_by_name: Mapping[str, Mapping[str, Any]]) -> Copies:
    if not slots_by_name:
        if own.initial is None and own.slots:
            raise StateError(
                "the optimizer's state is empty, and this step was exported in the middle of a training: it has no initial state"
            )
        return [(tensor, first) for (*_, tensor), first in zip(own.slots, own.initial or (), strict=True)]
    copies = []
    slots = {(name, key) for key, parameters, _ in own.slots for name in parameters}
    # Eager may still have state of a parameter that was frozen since
    trained_names = {name for name, _ in slots} or slots_by_name.keys()
    for name in slots_by_name:
        for key, value in slots_by_name[name].items():
            if name in trained_names and isinstance(value, torch.Tensor) and (name, key) not in slots:
                raise StateError(
                    f"the optimizer's state of {name!r} has {key!r}; {own.spec.optimizer}, as it was exported, has no such state"
                )
    for key, parameters, tensor in own.slots:
        first: torch.Tensor | None = None
        for name in parameters:
            value = slots_by_name.get(name, {}).get(key)
            if value is None and key == "momentum_buffer" and name in slots_by_name:
                if any(g.get("dampening") for g in own.groups) and any(
                    s.get(key) is not None for s in slots_by_name.values()
                ):
                    raise StateError(
                        f"{name!r} has no momentum yet, and others have: with dampening, its first step would differ from eager"
                    )
                value = torch.zeros_like(tensor)  # eager's value before the first step
            if type(value) in (int, float):
                value = torch.tensor(float(value))
            if value is None:
                raise StateError(f"the optimizer's state of {name!r} has no {key!r}; {own.spec.optimizer} needs it")
            if problem := tensor_values.misfit(value, tensor):
                raise StateError(f"the optimizer's {key!r} of {name!r} {problem}")
            if first is not None and float(value) != float(first):
                raise StateError(
                    f"the optimizer's {key!r} is {float(first):g} for {parameters[0]!r} and {float(value):g} for {name!r}; this step was "
                    f"exported with one value for both: export it with the optimizer in this state"
                )
            first = value
        assert first is not None
        copies.append((tensor, first))
    return copies


def _equal(value: torch.Tensor, own: torch.Tensor) -> bool:
    return torch.equal(value.to(own), own)
