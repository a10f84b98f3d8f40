"""torch's random state in a checkpoint: ``cpu`` and ``cuda`` of rank 0, ``cpu/3`` and ``cuda/3`` of rank 3."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import StateError


def current(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of this process's generators: the CPU's, and the GPU's if ``device`` is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: Mapping[str, torch.Tensor], device: torch.device, rank: int) -> None:
    """Set the generators of :func:`current` to the state that was saved for ``rank``, if any."""
    suffix = f"/{rank}" if rank else ""
    if f"cpu{suffix}" in states:
        torch.set_rng_state(states[f"cpu{suffix}"])
    if f"cuda{suffix}" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[f"cuda{suffix}"], device)


def check(name: str, state: torch.Tensor) -> None:
    """Raise :class:`StateError` if torch's generator refuses ``state``. It is tested on a new generator."""
    kind = name.partition("/")[0]
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise StateError(
            f"the random state {name!r} is {state.dtype} of shape {tuple(state.shape)}; expected uint8 of one dimension"
        )
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        try:
            torch.Generator(kind).set_state(state)
        except RuntimeError as error:
            raise StateError(
                f"torch refuses the random state {name!r} ({str(error).splitlines()[0]}); resume(…, random=False) leaves torch's as it is"
            ) from error
