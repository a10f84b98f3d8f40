"""Read named tensors from a safetensors file, and write them completely or not at all.

The safetensors library's own writer is not used: it needs numpy, which this distribution does not require.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from aot_backward_runtime.errors import AotBackwardError
from aot_backward_runtime.format.atomic_file import replacing
from aot_backward_runtime.format.safetensors_header import stored_as, write_header
from aot_backward_runtime.native.tensor_bytes import dtype_name, tensor_chunks


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise AotBackwardError(f"cannot read {path} as a safetensors file: {reason}") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``path``. The old file stays if that fails."""
    unknown = [
        f"{name!r} of {t.dtype}"
        for name, t in tensors.items()
        if not stored_as(dtype_name(t), ())[0] or t.dtype is torch.complex128
    ]
    if unknown:
        raise AotBackwardError(f"safetensors has no dtype for {', '.join(unknown)}")
    header, order = write_header({name: stored_as(dtype_name(t), tuple(t.shape)) for name, t in tensors.items()})
    try:
        with replacing(path.resolve()) as file:
            file.write(header)
            for name in order:
                for chunk in tensor_chunks(tensors[name].detach()):
                    file.write(chunk)
    except OSError as error:
        raise AotBackwardError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
