"""The layout of gradients in buckets: flat tensors that native code writes into and that processes sum.

The sums equal those of ``torch.nn.parallel.DistributedDataParallel`` to the last bit. The sum of two numbers is the
same in either order. But gloo's ring starts its sum at another rank for each chunk of a bucket, so with three or more
processes a sum depends on the element's place in its bucket. DDP has two layouts. In its first iteration there is one
bucket per dtype, in the order of the parameters. From the second on there are buckets of 1 MB and then 25 MB, in the
order in which gradients arrived. For layers used in the order of their definition that is last parameter first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch

from ..errors import DistributedError

Spec = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Name, shape, strides, dtype and device of a gradient."""

_MB = 1 << 20


class Buckets:
    """Gradients laid out in flat tensors, each of one dtype and device.

    ``specs``: the gradients in the order of the parameters. ``order``: their names in the order in which DDP would see
    them arrive, if that is not last parameter first. A bucket is closed once it holds ``cap_mb`` MiB, the first of a
    dtype ``first_mb``; DDP with ``bucket_cap_mb=n`` has both at n. ``align``: each gradient begins at a multiple of so
    many bytes. By default it follows the last one directly on the CPU, as in DDP. Elsewhere kernels that read 16 bytes
    at a time need 16, and the layout is DDP's only if sizes are such multiples.

    ``views``: the gradients by name, zeros at first. ``flat``: the buckets, in the order of averaging. ``layout``: text
    about both. Raises :class:`DistributedError` for a gradient whose elements do not fill their memory, each once.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        cap_mb: float = 25.0,
        first_mb: float = 1.0,
        *,
        order: Sequence[str] | None = None,
        align: int | None = None,
    ):
        by_name = {spec[0]: spec for spec in specs}
        order = [spec[0] for spec in reversed(specs)] if order is None else order
        if len(by_name) != len(specs) or sorted(order) != sorted(by_name):
            raise DistributedError("each gradient needs its own name, and `order` must have each name once")
        self.layout = [
            f"{name}: {dtype} {list(shape)} strides {list(stride)}, {device.type}"
            for name, shape, stride, dtype, device in specs
        ]
        self.flat: list[torch.Tensor] = []
        tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for names in _assign([by_name[name] for name in order], int(first_mb * _MB), int(cap_mb * _MB)):
            flat, members = _lay_out([by_name[name] for name in names], align)
            self.layout.append(f"bucket of {flat.numel()} elements: {', '.join(names)}")
            self.flat.append(flat)
            tensors |= members
        self.views: dict[str, torch.Tensor] = {name: tensors[name][0] for name in by_name}
        kinds = dict.fromkeys((dtype, device) for *_, dtype, device in specs)
        self.in_order = [[tensors[spec[0]][1] for spec in specs if spec[3:] == kind] for kind in kinds]
        """The memory of the gradients in the order of the parameters, by dtype and device: DDP's buckets in its first
        iteration."""


def _assign(specs: Sequence[Spec], first: int, cap: int) -> list[list[str]]:
    """Return the names of each bucket, filled in the order of ``specs``, like torch's
    compute_bucket_assignment_by_size."""
    closed: list[list[str]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, list[str]]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, shape, _, dtype, device in specs:
        kind = dtype, device
        size, names = filling.pop(kind, (0, []))
        size, names = size + math.prod(shape) * dtype.itemsize, [*names, name]
        if size >= limits.get(kind, first):
            closed.append(names)
            limits[kind] = cap
        else:
            filling[kind] = size, names
    return closed + [names for _, names in filling.values()]


def _lay_out(
    specs: Sequence[Spec], align: int | None
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return a bucket, and the gradients in it by name: with their shapes, and as the elements in memory."""
    *_, dtype, device = specs[0]
    step = -(-(align or (1 if device.type == "cpu" else 16)) // dtype.itemsize)
    sizes = [math.prod(shape) for _, shape, *_ in specs]
    starts = [0, *accumulate(-(-size // step) * step for size in sizes)]
    flat = torch.zeros(starts.pop(), dtype=dtype, device=device)
    members = {}
    for (name, shape, stride, *_), size, start in zip(specs, sizes, starts, strict=True):
        if not _is_dense(shape, stride):
            raise DistributedError(
                f"the gradient of {name} has shape {list(shape)} and strides {list(stride)}, which leave gaps or overlap; a bucket holds only "
                f"tensors whose elements fill their memory: make the parameter contiguous before the export"
            )
        part = flat[start : start + size]
        members[name] = part.as_strided(shape, stride), part
    return flat, members


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    steps = sorted((step, n) for n, step in zip(shape, stride, strict=True) if n > 1)
    return all(
        step == expected
        for (step, _), expected in zip(steps, accumulate((n for _, n in steps), mul, initial=1), strict=False)
    )
