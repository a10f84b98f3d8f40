"""Observations of passes as JSON, for another process of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from aot_backward_runtime.format.manifest import Ambient

from ..observation import Observation, TensorMetadata


def observations_to_json(observations: Mapping[Observation, int]) -> list[Any]:
    """With how often each was made."""
    return [
        [[_tensor_to_json(t) for t in o.inputs], o.sizes, o.scalars, asdict(o.ambient), o.hook_groups, sorted(o.positions), count]
        for o, count in observations.items()
    ]


def observations_from_json(form: Sequence[Any]) -> dict[Observation, int]:
    return {
        Observation(
            tuple(map(_tensor_from_json, inputs)), tuple(sizes), tuple(scalars), Ambient(**ambient), tuple(groups), frozenset(positions)
        ): count
        for inputs, sizes, scalars, ambient, groups, positions, count in form
    }


def _tensor_to_json(tensor: TensorMetadata) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *(getattr(tensor, f.name) for f in fields(tensor)[1:])]


def _tensor_from_json(form: Sequence[Any]) -> TensorMetadata:
    dtype, device, shape, stride, *rest = form
    return TensorMetadata(getattr(torch, dtype), device, tuple(shape), tuple(stride), *rest)
