"""The row-major bytes of a tensor, as packages and safetensors files hold them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from ..format.safetensors_header import DTYPES

TORCH_DTYPES = {stored: getattr(torch, name) for name, stored in DTYPES.items()}
"""PyTorch's dtype by the safetensors format's name."""


def dtype_name(tensor: torch.Tensor) -> str:
    """Return PyTorch's name of the tensor's dtype, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous, non-empty CPU tensor, valid as long as ``tensor`` is alive."""
    # Tensors lack the buffer protocol; numpy would provide it, but torch does not require numpy.
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the row-major bytes of a tensor in one piece, without a copy if it is contiguous on the CPU."""
    if not tensor.numel():
        return
    tensor = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8).ne(0)  # a byte other than 0 and 1 counts as true, but readers refuse it
    yield memory_of(tensor)
