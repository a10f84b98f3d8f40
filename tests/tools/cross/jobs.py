"""Messages between the compiling and the interpreting process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Source:
    """A kernel in Triton's language, and its machine code.

    ``signature``: the type of each argument of a launch, in order. ``constants``: the values of the other arguments.
    ``multiples``: arguments that must be multiples of 16, because the machine code assumes it.
    """

    text: str
    signature: dict[str, str]
    constants: dict[str, Any]
    multiples: tuple[str, ...]
    shared: int
    cubin: bytes


@dataclass
class Call:
    """Tensors after a call: its results, its inputs, and the constants by weight key."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass
class Played:
    """``refused``: why the library cannot be interpreted. ``failed``: the error. ``kernels``: the number of different
    kernels launched."""

    calls: list[Call] = field(default_factory=list)
    launches: int = 0
    kernels: int = 0
    refused: str = ""
    failed: str = ""


@dataclass
class Library:
    """A library and its calls. ``constants``: weight keys by the library's names. ``operators``: GPU operators, without
    their prefix."""

    path: str
    operators: tuple[str, ...]
    kernels: dict[str, Source]
    constants: dict[str, str]
    weights: dict[str, torch.Tensor]
    calls: list[tuple[int, list[torch.Tensor]]]
