"""An operator that a golden package calls."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("golden::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


cube.register_autograd(lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2, setup_context=_keep)
