"""A module's parameters and buffers by name, and the dict that holds each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, then buffers; a tied tensor appears under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def slot_of(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dict and key from which each call reads the tensor of that name, so that a replaced tensor is used."""
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last
