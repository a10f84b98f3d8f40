"""Gradients averaged over the processes of ``torch.distributed``, in flat tensors that native code writes straight into.

The sums are those of ``torch.nn.parallel.DistributedDataParallel`` to the last bit. Two numbers add up to the same in either order, but gloo's
ring starts its sum at another rank for each chunk of a bucket, so from three processes on a sum depends on where in its bucket an element lies.
DDP has two layouts: in its first iteration one bucket per dtype, in the order of the parameters; from the second on 1 MB and then 25 MB at a
time, in the order in which gradients arrived, which for layers used in the order of their definition is last parameter first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from operator import mul
from typing import Any

import torch
import torch.distributed as dist  # this module is only imported where processes are asked for; plain `import torch` has loaded it already

from ..errors import AotBackwardError, DistributedError

Spec = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Name, shape, strides, dtype and device of a gradient."""

_MB = 1 << 20
_BROADCAST = 250 * _MB  # DDP's broadcast_bucket_size: what sharing may hold a second time


class Buckets:
    """Gradients laid out in flat tensors, each of one dtype and device.

    ``specs``: the gradients in the order of the parameters. ``order``: their names in the order in which DDP would see them arrive, where that is
    not last parameter first. A bucket is closed once it holds ``cap_mb`` MiB, the first of a dtype ``first_mb``; DDP with ``bucket_cap_mb=n`` has
    both at n. ``align``: each gradient begins at a multiple of so many bytes; by default it follows the last one directly on the CPU, as in DDP,
    while elsewhere kernels that read 16 bytes at a time need 16, and the layout is DDP's only where sizes are such multiples.

    ``views``: the gradients by name, zeros at first. ``flat``: the buckets, in the order in which they are averaged. ``layout``: both in words.
    Raises :class:`DistributedError` for a gradient whose elements do not fill their memory, each once.
    """

    def __init__(
        self, specs: Sequence[Spec], cap_mb: float = 25.0, first_mb: float = 1.0, *, order: Sequence[str] | None = None, align: int | None = None
    ):
        by_name = {spec[0]: spec for spec in specs}
        order = [spec[0] for spec in reversed(specs)] if order is None else order
        if len(by_name) != len(specs) or sorted(order) != sorted(by_name):
            raise DistributedError("every gradient needs a name of its own, and `order` must hold each name once")
        self.layout = [f"{name}: {dtype} {list(shape)} strides {list(stride)}, {device.type}" for name, shape, stride, dtype, device in specs]
        self.flat: list[torch.Tensor] = []
        made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for names in _assign([by_name[name] for name in order], int(first_mb * _MB), int(cap_mb * _MB)):
            flat, members = _lay_out([by_name[name] for name in names], align)
            self.layout.append(f"bucket of {flat.numel()} elements: {', '.join(names)}")
            self.flat.append(flat)
            made |= members
        self.views: dict[str, torch.Tensor] = {name: made[name][0] for name in by_name}
        kinds = dict.fromkeys((dtype, device) for *_, dtype, device in specs)
        self.in_order = [[made[spec[0]][1] for spec in specs if spec[3:] == kind] for kind in kinds]
        """The memory of the gradients in the order of the parameters, by dtype and device: DDP's buckets in its first iteration."""


class Averaging:
    """Collectives of one training run, on the processes of ``group`` (all of them where it is None).

    Every method is a collective: all ranks must call it. Each raises :class:`DistributedError`.
    """

    def __init__(self, buckets: Buckets, group: dist.ProcessGroup | None = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise DistributedError(
                "torch.distributed is not initialised: start the program with torchrun and call torch.distributed.init_process_group() first"
            )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise DistributedError("this process is not in the group; only its members may average over it")
        self.buckets = buckets
        self._group = group
        self._scale = 1.0 / self.world

    def average(self, first: bool = False) -> None:
        """The gradients in the buckets become the mean over all ranks; returns when they are (on CUDA: when the current stream will wait for it).

        ``first``: sum as DDP's first iteration does, through one flat copy of all gradients. Only from three processes on does that change a
        bit, and only then is it done."""
        with torch.no_grad():
            if not first or self.world < 3:
                self._sum(self.buckets.flat)
                return
            flat = [torch.cat(members) for members in self.buckets.in_order]
            self._sum(flat)
            for whole, members in zip(flat, self.buckets.in_order, strict=True):
                for part, member in zip(whole.split([m.numel() for m in members]), members, strict=True):
                    member.copy_(part)

    def share(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """``tensors`` get the values that they have on rank ``source``: parameters once, buffers before each forward as DDP's broadcast_buffers.

        They must be of the same sizes, dtypes and order on all ranks. They go as bytes, whatever their dtypes, in one broadcast per device.
        """
        with torch.no_grad():
            for device in dict.fromkeys(t.device for t in tensors):
                for chunk in _chunks([t for t in tensors if t.device == device]):
                    self._broadcast(chunk, source)

    def check_same(self, text: str) -> None:
        """Refuses, on every rank, where ``text`` (such as the package's digest) or the layout of the buckets is not that of rank 0."""
        lines = [*text.splitlines(), *self.buckets.layout]
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._device())
        digests = [torch.empty_like(own) for _ in range(self.world)]
        self._run("comparing packages", lambda: dist.all_gather(digests, own, group=self._group))
        if all(torch.equal(other, own) for other in digests):
            return
        everyone: list[Any] = [None] * self.world
        self._run("comparing packages", lambda: dist.all_gather_object(everyone, lines, group=self._group))
        differing = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        other = differing[0]
        theirs, first = next((a, b) for a, b in zip_longest(everyone[other], everyone[0], fillvalue="nothing") if a != b)
        who = f"rank {other} holds" if len(differing) == 1 else f"ranks {', '.join(map(str, differing))} hold"
        raise DistributedError(
            f"rank {self.rank} of {self.world}: {who} another package or other gradients than rank 0: "
            f"{theirs!r} on rank {other}, {first!r} on rank 0; load the same package on every rank"
        )

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``tensors`` of all ranks: those of rank 0 by their own names, those of rank 3 by "name/3"."""
        everyone: list[Any] = [None] * self.world
        self._run("gathering tensors", lambda: dist.all_gather_object(everyone, dict(tensors), group=self._group))
        return {f"{name}/{rank}" if rank else name: t for rank, theirs in enumerate(everyone) for name, t in theirs.items()}

    def by_first(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on rank 0, where alone it is called, on every rank. So is what it raises: on the others as it is where it is
        an :class:`AotBackwardError`, else inside a :class:`DistributedError`."""
        raised: Exception | None = None
        value = None
        if self.rank == 0:
            try:
                value = action()
            except Exception as error:
                raised = error
        told = raised if raised is None or isinstance(raised, AotBackwardError) else DistributedError(f"rank 0 failed: {raised!r}")
        outcome: list[Any] = [told, value]
        self._run("waiting for rank 0", lambda: dist.broadcast_object_list(outcome, group=self._group, group_src=0))
        if self.rank == 0 and raised is not None:
            raise raised
        if outcome[0] is not None:
            raise outcome[0]
        return outcome[1]

    def _device(self) -> torch.device:
        """Where the group's backend can take tensors: where the gradients are."""
        return self.buckets.flat[0].device if self.buckets.flat else torch.device("cpu")

    def _sum(self, flat: Iterable[torch.Tensor]) -> None:
        def run() -> None:
            # scaled before the sum, as DDP does: other bits than a division behind it, and no overflow of float16 on the way
            works = [dist.all_reduce(bucket.mul_(self._scale), group=self._group, async_op=True) for bucket in flat]
            for work in works:
                work.wait()

        self._run("averaging gradients", run)

    def _broadcast(self, chunk: Sequence[torch.Tensor], source: int) -> None:
        chunk = sorted(chunk, key=lambda t: -t.itemsize)  # each then begins at a multiple of its elements' size
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk])
        self._run("sharing tensors", lambda: dist.broadcast(flat, group=self._group, group_src=source))
        if self.rank != source:
            for t, part in zip(chunk, flat.split([t.nbytes for t in chunk]), strict=True):
                t.copy_(part.view(t.dtype).view(t.shape))

    def _run(self, what: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # gloo raises this very class, NCCL's DistBackendError is one
            raise DistributedError(
                f"rank {self.rank} of {self.world}: {what} failed: another rank has ended or does not answer, or the connection is gone "
                f"({str(error).splitlines()[0]}); resume from the last saved state"
            ) from error


def _assign(specs: Sequence[Spec], first: int, cap: int) -> list[list[str]]:
    """The names of each bucket, filled in the order of ``specs``, as torch's compute_bucket_assignment_by_size does."""
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


def _lay_out(specs: Sequence[Spec], align: int | None) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """A bucket, and by name the gradients in it: as they are shaped, and as the elements in memory."""
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
    return all(step == expected for (step, _), expected in zip(steps, accumulate((n for _, n in steps), mul, initial=1), strict=False))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """At most _BROADCAST bytes at a time, or one tensor."""
    ends, size = [0], 0
    for i, tensor in enumerate(tensors):
        if size and size + tensor.nbytes > _BROADCAST:
            ends.append(i)
            size = 0
        size += tensor.nbytes
    return (tensors[a:b] for a, b in pairwise([*ends, len(tensors)]) if a < b)
