"""Attributes that a forward assigns: a package holds state in parameters and buffers, and changes buffers in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from aot_backward_exporters.process_state import patched

from . import source_location


@contextlib.contextmanager
def recorded_writes(program: nn.Module) -> Iterator[dict[str, str]]:
    """Yields what will hold, by name, where the program assigned a tensor that was there already; tensors are put back at the end."""
    names = {id(m): f"{n}." if n else "" for n, m in program.named_modules()}
    kept = [(m.__dict__, {n: v for n, v in m.__dict__.items() if v is None or isinstance(v, torch.Tensor)}) for m in program.modules()]
    found: dict[str, str] = {}
    original = nn.Module.__setattr__

    def assign(self: nn.Module, name: str, value: Any) -> None:
        before = self._buffers.get(name) if name in self.__dict__.get("_buffers", ()) else self.__dict__.get(name)
        if id(self) in names and isinstance(before, torch.Tensor) and before is not value:
            found.setdefault(names[id(self)] + name, source_location.here())
        original(self, name, value)

    with patched(nn.Module, __setattr__=assign):
        try:
            yield found
        finally:
            for slots, before in kept:
                slots.update({n: v for n, v in before.items() if slots.get(n) is not v})


def name_of(program: nn.Module, tensor: torch.Tensor) -> str:
    """The plain attribute that ``tensor`` is, "body.scale"; or "" where it is none."""
    for prefix, module in program.named_modules():
        for name, value in module.__dict__.items():
            if value is tensor:
                return f"{prefix}.{name}" if prefix else name
    return ""


def plain_tensors(program: nn.Module) -> list[str]:
    """The names of attributes that are tensors, and neither parameters nor buffers."""
    return [f"{p}.{n}" if p else n for p, m in program.named_modules() for n, v in m.__dict__.items() if isinstance(v, torch.Tensor)]
