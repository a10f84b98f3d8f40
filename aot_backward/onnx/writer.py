"""Write ONNX models: each file whole or not at all, large weights in a file next to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import onnx
import torch

from aot_backward_exporters.onnx.model import Translated, element_type, numpy_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.atomic_file import replacing

_MAX_EMBEDDED_BYTES = 64 << 20
"""Weights with more bytes in all are stored outside the models. A guess, far below protobuf's limit of 2 GiB.
docs/onnx.md documents it."""
# Bytes, a page; each tensor in the file of weights begins at a multiple, so that the file can be mapped
_ALIGNMENT = 4096


def write(models: Mapping[Path, Translated], data: Path, external: bool | None) -> Path | None:
    """Write ``models`` to their paths. ``external``: whether weights go to ``data``, shared by all models; None: if
    they are large.

    Return the file of weights, if there is one. Weights are written first, so that a new model never refers to missing
    weights.
    """
    tensors = {_key(t, name): tensor for t in models.values() for name, tensor in _values(t).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    outside = external if external is not None else size > _MAX_EMBEDDED_BYTES
    try:
        places: dict[str, tuple[int, int]] = {}
        if outside:
            with replacing(data) as file:
                places = _write_data(file, tensors)
        for path, translated in models.items():
            model = _with_values(translated, places, data.name)
            with replacing(path) as file:
                file.write(model.SerializeToString())
    except OSError as error:
        raise ExportError(f"{error.filename or data.parent} could not be written: {error.strerror or error}") from error
    return data if outside else None


def _values(translated: Translated) -> dict[str, torch.Tensor]:
    return translated.defaults | translated.fixed


def _key(translated: Translated, name: str) -> str:
    """Return a key, equal for one weight in several models."""
    return translated.keys.get(name, f"number {name}")


def _write_data(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    places = {}
    for key, tensor in tensors.items():
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        places[key] = file.tell(), tensor.nbytes
        file.write(numpy_of(tensor).tobytes())
    return places


def _with_values(translated: Translated, places: Mapping[str, tuple[int, int]], file: str) -> onnx.ModelProto:
    """Return the model with each weight's value, or its place in ``file``."""
    out = onnx.ModelProto()
    out.CopyFrom(translated.model)
    for name, tensor in _values(translated).items():
        initializer = out.graph.initializer.add(
            name=name, dims=list(tensor.shape), data_type=element_type(tensor.dtype)
        )
        key = _key(translated, name)
        if key not in places:
            initializer.raw_data = numpy_of(tensor).tobytes()
            continue
        initializer.data_location = onnx.TensorProto.EXTERNAL
        for entry, value in zip(("location", "offset", "length"), (file, *places[key]), strict=True):
            initializer.external_data.add(key=entry, value=str(value))
    return out
