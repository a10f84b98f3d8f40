"""What passes between the process that compiles and the one that interprets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Source:
    """A kernel in Triton's language, and what it was compiled to. ``signature``: the type of each argument that a launch gives, in order.

    ``constants``: of the others the values. ``multiples``: arguments that the machine code takes to be multiples of 16.
    """

    text: str
    signature: dict[str, str]
    constants: dict[str, Any]
    multiples: tuple[str, ...]
    shared: int
    cubin: bytes


@dataclass
class Call:
    """Tensors after a call: what it returned, what it was given, and the constants by weight key."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass
class Played:
    """``refused``: why it could not be interpreted. ``failed``: what went wrong. ``kernels``: how many different ones were launched."""

    calls: list[Call] = field(default_factory=list)
    launches: int = 0
    kernels: int = 0
    refused: str = ""
    failed: str = ""


@dataclass
class Library:
    """What a library is to be called with. ``constants``: its names for them -> weight keys. ``operators``: of the GPU, without their prefix."""

    path: str
    operators: tuple[str, ...]
    kernels: dict[str, Source]
    constants: dict[str, str]
    weights: dict[str, torch.Tensor]
    calls: list[tuple[int, list[torch.Tensor]]]
