"""A program is left as it was by whatever runs or traces it: its modes, and the tensors in its slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def in_mode(program: nn.Module, mode: str) -> Iterator[None]:
    """``program`` in ``mode`` ("train", "eval", or "" for a function, which has none), and afterwards every submodule as it was.

    In the mode that the program is in, submodules keep their own: a BatchNorm frozen by ``.eval()`` stays frozen.
    """
    before = [(m, m.training) for m in program.modules()]
    try:
        if mode and program.training != (mode == "train"):
            program.train(mode == "train")
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def slots_kept(program: nn.Module) -> Iterator[None]:
    """Afterwards each parameter and buffer is the object that it was, whatever the trace or the program put in its place.

    Tracing swaps them for its own, and puts the wrong ones back where a submodule has two names.
    """
    every: list[dict[str, Any]] = [slots for m in program.modules() for slots in (m._parameters, m._buffers)]
    before = [(slots, dict(slots)) for slots in every]
    try:
        yield
    finally:
        for slots, kept in before:
            slots.clear()
            slots.update(kept)
