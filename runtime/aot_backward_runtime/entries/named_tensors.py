"""A module's parameters and buffers by their names, and where each is looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers; a tied tensor by each of its names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def slot_of(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where the tensor of that name is looked up at each call: whatever is put there is what the call uses."""
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last
