"""A training step on several processes of ``torch.distributed``: gradients averaged, state and buffers equal on all
ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from operator import mul
from typing import Any

import torch

# Imported only if processes are requested; plain `import torch` has loaded torch.distributed already
import torch.distributed as dist

from ..errors import AotBackwardError, DistributedError
from .state import TrainingState

_BROADCAST = 250 << 20  # DDP's broadcast_bucket_size: bytes that a broadcast of several tensors may copy at a time
_ALIGNMENT = 64  # bytes at whose multiples each gradient begins, as tensors of PyTorch's allocators do


class Replicas:
    """The copies of one training state, one per process of ``group``: they start equal and make the same updates.

    ``broadcast_buffers``: whether all ranks get the module's buffers of rank 0 before a forward. All methods except
    ``move_gradients`` are collectives, which every process must call in the same order.
    """

    def __init__(self, state: TrainingState, group: dist.ProcessGroup | None, broadcast_buffers: bool):
        self.collectives = Collectives(FlatGradients(state.gradients), group)
        self._state = state
        self.broadcasts_buffers = broadcast_buffers and bool(state.buffers)
        self.buffers_due = True
        """True if the next forward shares the buffers first: DDP's rule, unless the previous forward was within
        ``no_sync``."""

    def move_gradients(self) -> None:
        """Move the state's gradients into the flat tensors, as views with the same values."""
        views = self.collectives.gradients.views
        self._state.gradients = {n: views[n].copy_(t) for n, t in self._state.gradients.items()}

    def average(self) -> None:
        """Replace the accumulated gradients by their mean over all ranks."""
        self.collectives.average()
        self.buffers_due = True

    def share_buffers(self) -> None:
        """Copy the buffers of rank 0 to all ranks."""
        self.collectives.share(list(self._state.buffers.values()))

    def follow_first(self) -> None:
        """Copy the whole state of rank 0 to all ranks."""
        self._state.replace_metadata(self.collectives.by_first(self._state.metadata))
        self.collectives.share(self._state.tensors())
        self.buffers_due = True


class FlatGradients:
    """Gradients as parts of one flat tensor for each dtype and device, which native code writes into and processes
    sum.

    ``gradients``: tensors by name. ``views``: zeros of the same shapes and strides, by name. ``flat``: the flat
    tensors. ``layout``: text about the gradients. Raises :class:`DistributedError` for a gradient whose elements do not
    fill their memory, each once.
    """

    def __init__(self, gradients: Mapping[str, torch.Tensor]):
        self.layout = [
            f"{name}: {t.dtype} {list(t.shape)} strides {list(t.stride())}, {t.device.type}"
            for name, t in gradients.items()
        ]
        self.flat: list[torch.Tensor] = []
        self.views: dict[str, torch.Tensor] = {}
        for dtype, device in dict.fromkeys((t.dtype, t.device) for t in gradients.values()):
            members = {n: t for n, t in gradients.items() if (t.dtype, t.device) == (dtype, device)}
            step = -(-_ALIGNMENT // dtype.itemsize)
            ends = list(accumulate((-(-t.numel() // step) * step for t in members.values()), initial=0))
            flat = torch.zeros(ends.pop(), dtype=dtype, device=device)
            self.flat.append(flat)
            for start, (name, t) in zip(ends, members.items(), strict=True):
                if not _is_dense(t.shape, t.stride()):
                    raise DistributedError(
                        f"the gradient of {name} has shape {list(t.shape)} and strides {list(t.stride())}, which leave gaps or overlap; "
                        f"expected elements that fill their memory: make the parameter contiguous before the export"
                    )
                self.views[name] = flat[start:].as_strided(t.shape, t.stride())


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    steps = sorted((step, n) for n, step in zip(shape, stride, strict=True) if n > 1)
    return all(
        step == expected
        for (step, _), expected in zip(steps, accumulate((n for _, n in steps), mul, initial=1), strict=False)
    )


class Collectives:
    """The collectives of one training run, on the processes of ``group`` (all of them if it is None).

    All ranks must call each method, in the same order. Each raises :class:`DistributedError`.
    """

    def __init__(self, gradients: FlatGradients, group: dist.ProcessGroup | None = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise DistributedError(
                "torch.distributed is not initialised: start the program with torchrun and call torch.distributed.init_process_group() first"
            )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise DistributedError("this process is not in the group; only its members may average over it")
        self.gradients = gradients
        self._group = group
        self._scale = 1.0 / self.world

    def average(self) -> None:
        """Replace the gradients by their mean over all ranks. Return when this is done (on CUDA: when the current
        stream will wait for it)."""

        def run() -> None:
            # Scale before the sum, as DDP does: dividing afterwards gives other bits, and float16 could overflow in the
            # sum.
            flat = self.gradients.flat
            works = [dist.all_reduce(t.mul_(self._scale), group=self._group, async_op=True) for t in flat]
            for work in works:
                work.wait()

        with torch.no_grad():
            self._run("averaging gradients", run)

    def share(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy the values of ``tensors`` from rank ``source``: parameters once, buffers before each forward as DDP's
        broadcast_buffers.

        They must have the same sizes, dtypes and order on all ranks. They are sent as bytes, whatever their dtypes, in
        one broadcast per device.
        """
        with torch.no_grad():
            for device in dict.fromkeys(t.device for t in tensors):
                for chunk in _chunks([t for t in tensors if t.device == device]):
                    self._broadcast(chunk, source)

    def check_same(self, text: str) -> None:
        """Raise, on every rank, if ``text`` (such as the package's digest) or the gradients differ from rank 0's."""
        lines = [*text.splitlines(), *self.gradients.layout]
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._device())
        digests = [torch.empty_like(own) for _ in range(self.world)]
        self._run("comparing packages", lambda: dist.all_gather(digests, own, group=self._group))
        if all(torch.equal(other, own) for other in digests):
            return
        everyone: list[Any] = [None] * self.world
        self._run("comparing packages", lambda: dist.all_gather_object(everyone, lines, group=self._group))
        differing = [rank for rank, rank_lines in enumerate(everyone) if rank_lines != everyone[0]]
        other = differing[0]
        other_line, first_line = next(
            (a, b) for a, b in zip_longest(everyone[other], everyone[0], fillvalue="nothing") if a != b
        )
        who = f"rank {other} holds" if len(differing) == 1 else f"ranks {', '.join(map(str, differing))} hold"
        raise DistributedError(
            f"rank {self.rank} of {self.world}: {who} another package or other gradients than rank 0: "
            f"{other_line!r} on rank {other}, {first_line!r} on rank 0; load the same package on every rank"
        )

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return ``tensors`` of all ranks: rank 0's by their own names, rank 3's by "name/3"."""
        everyone: list[Any] = [None] * self.world
        self._run("gathering tensors", lambda: dist.all_gather_object(everyone, dict(tensors), group=self._group))
        return {
            f"{name}/{rank}" if rank else name: t
            for rank, rank_tensors in enumerate(everyone)
            for name, t in rank_tensors.items()
        }

    def by_first(self, action: Callable[[], Any]) -> Any:
        """Call ``action`` on rank 0 only, and return its result on every rank. Raise its exception on every rank too;
        the others get an :class:`AotBackwardError` unchanged, anything else inside a :class:`DistributedError`."""
        raised: Exception | None = None
        value = None
        if self.rank == 0:
            try:
                value = action()
            except Exception as error:
                raised = error
        shared_error = (
            raised
            if raised is None or isinstance(raised, AotBackwardError)
            else DistributedError(f"rank 0 failed: {raised!r}")
        )
        outcome: list[Any] = [shared_error, value]
        self._run("waiting for rank 0", lambda: dist.broadcast_object_list(outcome, group=self._group, group_src=0))
        if self.rank == 0 and raised is not None:
            raise raised
        if outcome[0] is not None:
            raise outcome[0]
        return outcome[1]

    def _device(self) -> torch.device:
        """Return a device that the group's backend can take tensors on: that of the gradients."""
        return self.gradients.flat[0].device if self.gradients.flat else torch.device("cpu")

    def _broadcast(self, chunk: Sequence[torch.Tensor], source: int) -> None:
        chunk = sorted(chunk, key=lambda t: -t.itemsize)  # so that each begins at a multiple of its elements' size
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk])
        self._run("sharing tensors", lambda: dist.broadcast(flat, group=self._group, group_src=source))
        if self.rank != source:
            for t, part in zip(chunk, flat.split([t.nbytes for t in chunk]), strict=True):
                t.copy_(part.view(t.dtype).view(t.shape))

    def _run(self, label: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # gloo raises this class, and NCCL's DistBackendError is a subclass
            raise DistributedError(
                f"rank {self.rank} of {self.world}: {label} failed: another rank has ended or does not answer, or the connection is gone "
                f"({str(error).splitlines()[0]}); resume from the last saved state"
            ) from error


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """Split into at most _BROADCAST bytes at a time, or one tensor."""
    ends, size = [0], 0
    for i, tensor in enumerate(tensors):
        if size and size + tensor.nbytes > _BROADCAST:
            ends.append(i)
            size = 0
        size += tensor.nbytes
    return (tensors[a:b] for a, b in pairwise([*ends, len(tensors)]) if a < b)
