"""torch's random state, as a checkpoint holds it: ``cpu`` and ``cuda`` of rank 0, ``cpu/3`` and ``cuda/3`` of rank 3."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import StateError


def current(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of this process's generators: the CPU's, and where ``device`` is a GPU that GPU's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: Mapping[str, torch.Tensor], device: torch.device, rank: int) -> None:
    """Sets the generators of :func:`current` to what was saved of ``rank``, where it was."""
    suffix = f"/{rank}" if rank else ""
    if f"cpu{suffix}" in states:
        torch.set_rng_state(states[f"cpu{suffix}"])
    if f"cuda{suffix}" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[f"cuda{suffix}"], device)


def check(name: str, state: torch.Tensor) -> None:
    """:class:`StateError` where torch's generator refuses ``state``; it is tried on a generator of its own."""
    kind = name.partition("/")[0]
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise StateError(f"the random state {name!r} is {state.dtype} of shape {tuple(state.shape)}; expected uint8 of one dimension")
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        try:
            torch.Generator(kind).set_state(state)
        except RuntimeError as error:
            raise StateError(
                f"torch refuses the random state {name!r} ({str(error).splitlines()[0]}); resume(…, random=False) leaves torch's as it is"
            ) from error
