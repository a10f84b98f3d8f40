"""The global state under which a program is captured."""

from __future__ import annotations

import torch

from aot_backward_runtime.format.manifest import Ambient


def current_ambient(device: str) -> Ambient:
    """Return the autocast, determinism and matmul precision settings that affect eager on ``device``."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # "meta" has no autocast
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""
    return Ambient(autocast, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
