"""The global state under which a program is captured."""

from __future__ import annotations

import torch

from aot_backward_runtime.format.manifest import Ambient


def current_ambient(device: str) -> Ambient:
    """What of autocast, determinism and matmul precision changes what eager computes on ``device``."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # there is none on "meta"
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
    return Ambient(autocast, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
