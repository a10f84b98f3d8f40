"""New values for existing tensors: all are checked before the first is written, and all are written in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import torch_api
from .memory import extent, room

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""What is written to, and what is written."""


def misfit(value: Any, own: torch.Tensor, *, exactly: bool = False) -> str:
    """Why ``value`` cannot be copied into ``own`` whole, as "is …; expected …", or "". ``exactly``: it must have the dtype of ``own``; else one
    that PyTorch casts to it without losing what kind of number it is (``torch.can_cast``)."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}; expected a tensor"
    if problem := unplain(value):
        return problem
    if torch_api.is_wrapper(value):
        return f"is a {type(value).__module__}.{type(value).__qualname__}; expected a plain tensor with the values (of a DTensor: .full_tensor())"
    if value.shape != own.shape and (own.dim() or value.numel() != 1):
        return f"has shape {tuple(value.shape)}; the package was compiled for {tuple(own.shape)}"
    if value.dtype != own.dtype and (exactly or not torch.can_cast(value.dtype, own.dtype)):
        named = f"is complex ({value.dtype})" if value.is_complex() else f"has dtype {value.dtype}"
        return f"{named}; the package was compiled for {own.dtype}"
    return unbacked(value)


def unplain(value: torch.Tensor) -> str:
    """Why ``value`` is no tensor of numbers in memory, or ""."""
    if value.is_nested:  # before its shape, which a strided one does not tell
        return "is a nested tensor; expected a plain one: pass .to_padded_tensor(…), or one of its parts"
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        kind = f"quantized ({value.dtype})" if value.is_quantized else f"of layout {value.layout} on {value.device}"
        return f"is a tensor {kind}; expected a plain one: pass .to_dense(), .dequantize(), or its values"
    return ""


def unbacked(value: torch.Tensor) -> str:
    """Why the memory of a plain ``value`` cannot be read, or ""."""
    if torch_api.is_zerotensor(value) or (value.untyped_storage().nbytes() and value.numel() and not torch_api.has_memory(value)):
        return (
            f"of shape {tuple(value.shape)} has no memory: it stands for zeros (forward-mode differentiation) or for another tensor (functionalize)"
        )
    needed, held = extent(value), room(value)
    if held < needed:  # a copy does not look
        return f"of shape {tuple(value.shape)} needs {needed} bytes, its storage holds {max(0, held)}: it was freed or shrunk"
    return ""


def unlike(own: Mapping[str, torch.Tensor], given: Mapping[str, Any], *, strict: bool = True, exactly: bool = False) -> str:
    """The first thing that keeps ``given`` from being copied into ``own``, or "". Not ``strict``: names that one of the two lacks are left out."""
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(map(str, given.keys() - own.keys()))
    if strict and (missing or unexpected):
        return f"missing {_few(missing)}, unexpected {_few(unexpected)}"
    for name in own:
        if name in given and (problem := misfit(given[name], own[name], exactly=exactly)):
            return f"{name!r} {problem}"
    return ""


def write(copies: Copies) -> None:
    """One call of C++, which an interrupt comes before or after. The values were found good (:func:`misfit`)."""
    if copies:
        with torch.no_grad():
            torch_api.foreach_copy_([own for own, _ in copies], [value.detach().reshape(own.shape) for own, value in copies])


def _few(names: list[str]) -> str:
    return f"{names[:5]}{' …' if len(names) > 5 else ''}" if names else "nothing"
