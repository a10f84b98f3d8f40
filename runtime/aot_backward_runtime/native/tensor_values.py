"""New values for existing tensors: all are checked before the first is written, and all are written in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import torch_api
from .memory import extent, room

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a destination and its source."""


def misfit(value: Any, own: torch.Tensor, *, exactly: bool = False) -> str:
    """Return why ``value`` cannot be copied into ``own``, as "is …; expected …", or "". ``exactly``: it must have the
    dtype of ``own``; else one that PyTorch casts to it without changing the kind of number (``torch.can_cast``)."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}; expected a tensor"
    if problem := unplain(value):
        return problem
    if torch_api.is_wrapper(value):
        return f"is a {type(value).__module__}.{type(value).__qualname__}; expected a plain tensor with the values (of a DTensor: .full_tensor())"
    if value.shape != own.shape and (own.dim() or value.numel() != 1):
        return f"has shape {tuple(value.shape)}; the package was compiled for {tuple(own.shape)}"
    if value.dtype != own.dtype and (exactly or not torch.can_cast(value.dtype, own.dtype)):
        words = f"is complex ({value.dtype})" if value.is_complex() else f"has dtype {value.dtype}"
        return f"{words}; the package was compiled for {own.dtype}"
    return unbacked(value)


def unplain(value: torch.Tensor) -> str:
    """Return why ``value`` is not a plain dense tensor, or ""."""
    if value.is_nested:  # checked before the shape, which a strided nested tensor does not have
        return "is a nested tensor; expected a plain one: pass .to_padded_tensor(…), or one of its parts"
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        kind = f"quantized ({value.dtype})" if value.is_quantized else f"of layout {value.layout} on {value.device}"
        return f"is a tensor {kind}; expected a plain one: pass .to_dense(), .dequantize(), or its values"
    return ""


def unbacked(value: torch.Tensor) -> str:
    """Return why the memory of a plain ``value`` cannot be read, or ""."""
    if torch_api.is_zerotensor(value) or (
        value.untyped_storage().nbytes() and value.numel() and not torch_api.has_memory(value)
    ):
        return (
            f"of shape {tuple(value.shape)} has no memory: it stands for zeros (forward-mode differentiation) or for "
            "another tensor (functionalize)"
        )
    needed, held = extent(value), room(value)
    if held < needed:  # copy_ does not check this
        return f"of shape {tuple(value.shape)} needs {needed} bytes, its storage holds {max(0, held)}: it was freed or shrunk"
    return ""


def unlike(
    own: Mapping[str, torch.Tensor], values: Mapping[str, Any], *, strict: bool = True, exactly: bool = False
) -> str:
    """Return the first reason why ``values`` cannot be copied into ``own``, or "". Not ``strict``: skip names that only
    one of them has."""
    missing, unexpected = sorted(own.keys() - values.keys()), sorted(map(str, values.keys() - own.keys()))
    if strict and (missing or unexpected):
        return f"missing {_few(missing)}, unexpected {_few(unexpected)}"
    for name in own:
        if name in values and (problem := misfit(values[name], own[name], exactly=exactly)):
            return f"{name!r} {problem}"
    return ""


def write(copies: Copies) -> None:
    """Copy in one C++ call, which no interrupt can split. The values must have been checked (:func:`misfit`)."""
    if copies:
        with torch.no_grad():
            torch_api.foreach_copy_(
                [own for own, _ in copies], [value.detach().reshape(own.shape) for own, value in copies]
            )


def _few(names: list[str]) -> str:
    return f"{names[:5]}{' …' if len(names) > 5 else ''}" if names else "nothing"
