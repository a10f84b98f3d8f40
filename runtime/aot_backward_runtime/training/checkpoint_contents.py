"""The contents of a saved training state, to and from tensors by name and JSON (:mod:`.checkpoint` is the file's
format)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import AotBackwardError, StateError
from . import checkpoint, rng_state
from .param_groups import plain
from .state import COUNTERS, MALFORMED, Change, TrainingState, counter, malformed, matching


def save(own: TrainingState, path: str | os.PathLike[str], random: Mapping[str, torch.Tensor], extra: Any) -> None:
    """Save ``own``. ``random``: the states of :mod:`.rng_state`. ``extra``: the caller's JSON data. Raises
    :class:`StateError`."""
    tensors = {f"module/{n}": t for n, t in own.module.items()} | {f"loss/{n}": t for n, t in own.loss.items()}
    tensors |= {f"optimizer/{key}/{names[0]}": t for key, names, t in own.all_slots}
    if own.accumulated:
        tensors |= {f"gradient/{n}": t for n, t in own.gradients.items()}
    tensors |= {f"random/{n}": t for n, t in random.items()}
    about = {
        "optimizer": own.spec.optimizer,
        "groups": [
            {"parameters": list(s.parameters), "options": plain(g.options())}
            for s, g in zip(own.spec.groups, own.groups, strict=True)
        ],
        "fresh": own.fresh,
        **own.counters(),
        "scaler": own.scaler.state_dict() if own.scaler is not None else None,
        "extra": extra,
    }
    checkpoint.write_state(path, tensors, about)


def read(own: TrainingState, path: str | os.PathLike[str], random: bool) -> tuple[Change, dict[str, torch.Tensor], Any]:
    """Read a file written by :func:`save`. Return the checked change for ``own.replace``, the random states by name
    (checked if ``random``), and ``extra``."""
    tensors, about = checkpoint.read_state(path)
    try:
        return _checked(own, tensors, about, random)
    except (AotBackwardError, *MALFORMED) as error:
        raise StateError(f"{path} does not fit this step: {malformed(error)}") from error


def _checked(
    own: TrainingState, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any], random: bool
) -> tuple[Change, dict[str, torch.Tensor], Any]:
    if about["optimizer"] != own.spec.optimizer:
        raise StateError(f"it was saved by {about['optimizer']}, this is {own.spec.optimizer}")
    saved_groups, own_groups = [g["parameters"] for g in about["groups"]], [list(g.parameters) for g in own.spec.groups]
    if saved_groups != own_groups:
        mismatches = sorted({n for g in saved_groups for n in g} ^ {n for g in own_groups for n in g})
        raise StateError(f"its parameter groups differ from this step's{' in ' + mismatches[0] if mismatches else ''}")
    parts: dict[str, dict[str, torch.Tensor]] = {
        "module": {},
        "loss": {},
        "optimizer": {},
        "gradient": {},
        "random": {},
    }
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        parts[kind][rest] = tensor
    copies = matching("module", own.module, parts["module"], True) + matching("loss", own.loss, parts["loss"], True)
    copies += matching(
        "optimizer", {f"{key}/{names[0]}": t for key, names, t in own.all_slots}, parts["optimizer"], True
    )
    counters = {name: counter(name, about[name]) for name in COUNTERS}
    if counters["accumulated"] and not own.gradients:
        raise StateError(
            f"it has accumulated gradients of {counters['accumulated']} calls, and this step was exported without accumulate=True"
        )
    copies += matching("gradient", own.gradients if counters["accumulated"] else {}, parts["gradient"], True)
    options = [g["options"] for g in about["groups"]]
    own.check_options(options)
    fresh, scaler = about["fresh"], about.get("scaler")
    if not isinstance(fresh, bool):
        raise StateError(f"fresh is {fresh!r}; expected true or false")
    if (scaler is None) != (own.scaler is None):
        raise StateError(
            f"it has {'no' if scaler is None else 'a'} loss scale, and this step has {'one' if scaler is None else 'none'}"
        )
    if own.scaler is not None:
        own.scaler.check(scaler)
    for name, state in parts["random"].items() if random else ():
        rng_state.check(name, state)
    return Change(copies, options, counters, fresh, scaler), parts["random"], about["extra"]
