"""Fake tensor rules for fake quantization, which runs as eager's own kernels: torch (2.13) lacks them, and dynamic
sizes need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import torch_api
from .process_state import exclusive


def _like_input(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _with_mask(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _gradients(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


_SHAPES: dict[str, Callable[..., Any]] = {
    "_fake_quantize_learnable_per_tensor_affine": _like_input,
    "_fake_quantize_learnable_per_channel_affine": _like_input,
    "_fake_quantize_learnable_per_tensor_affine_backward": _gradients,
    "_fake_quantize_learnable_per_channel_affine_backward": _gradients,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
}


@contextlib.contextmanager
def shapes_known() -> Iterator[None]:
    """Register shape functions for these operators, so that fake tensors can pass through them."""
    with exclusive():
        registrations = set(torch_api._dispatch_get_registrations_for_dispatch_key("Meta"))
        library = torch.library.Library("aten", "IMPL", "Meta")
        try:
            for name, shapes in _SHAPES.items():
                if f"aten::{name}" not in registrations:
                    library.impl(name, shapes)
            yield
        finally:
            library._destroy()
