"""The samples of a training: a file of tensors, checked against the step that takes them, and cut into an epoch's
batches.

The order of the samples in an epoch depends on the seed and the epoch's number, and on nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils._pytree as pytree

from aot_backward_runtime import InputError
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.native.guards import Contract
from aot_backward_runtime.native.pytree import unflatten
from aot_backward_runtime.native.tensor_bytes import tensor_chunks
from aot_backward_runtime.training.step import LoadedStep

from ..tensor_file import read_tensors

BATCH = 32
"""The size of a batch where the package leaves it open. A guess, documented in docs/training.md."""


@dataclass(frozen=True)
class Samples:
    """The tensors of a data file in the order in which a step takes them, and the step's variants that take such
    tensors."""

    tensors: list[torch.Tensor]
    variants: list[tuple[VariantSpec, Contract]]
    count: int
    digests: dict[str, str]
    data: Path
    device: torch.device

    def refusal(self, size: int) -> InputError | None:
        """Why no variant takes ``size`` samples at once; None where one does."""
        first_error = None
        for _, contract in self.variants:
            try:
                contract.fit([t[:size].to(self.device) for t in self.tensors])
                return None
            except InputError as error:
                first_error = first_error or error
        return first_error

    def call(self, step: LoadedStep, rows: torch.Tensor) -> torch.Tensor:
        """One step on these samples; its loss."""
        variant = self.variants[0][0]
        args, kwargs = unflatten(variant.in_tree, [t[rows].to(self.device) for t in self.tensors], {}, {})
        loss: torch.Tensor = pytree.tree_leaves(step(*args, **kwargs))[0]
        return loss


def read_samples(data: Path, name: str, variants: Sequence[VariantSpec], device: torch.device) -> Samples:
    """:class:`InputError` where the file's tensors are not those that the entry ``name`` takes, each with a row for
    every sample."""
    file_tensors = read_tensors(data)
    matches = [v for v in variants if {s.name for s in v.inputs} == file_tensors.keys()]
    if not matches:
        input_names = [s.name for s in variants[0].inputs]
        missing = [n for n in input_names if n not in file_tensors]
        extra = sorted(file_tensors.keys() - set(input_names))
        parts = [f"it has no {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"it has {', '.join(map(repr, extra))}, which the step does not take"] if extra else []
        raise InputError(
            f"{data} does not fit entry {name!r}, which takes {', '.join(input_names)}: {'; '.join(parts)}"
        )
    single = [n for n, t in file_tensors.items() if not t.dim()]
    if single:
        raise InputError(f"{data}: {single[0]!r} has no dimensions; expected the samples along the first dimension")
    lengths = {n: len(t) for n, t in file_tensors.items()}
    if len(set(lengths.values())) != 1:
        raise InputError(
            f"{data}: tensors have different numbers of samples: {', '.join(f'{n} {k}' for n, k in lengths.items())}"
        )
    count = next(iter(lengths.values()))
    if not count:
        raise InputError(f"{data} holds no samples")
    first = [s.name for s in matches[0].inputs]
    candidates = [v for v in matches if [s.name for s in v.inputs] == first and v.in_tree == matches[0].in_tree]
    tensors = [file_tensors[n] for n in first]
    contracts = [(v, Contract(v.inputs, v.symbols, v.guards, device)) for v in candidates]
    return Samples(tensors, contracts, count, {n: _digest(t) for n, t in file_tensors.items()}, data, device)


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for chunk in tensor_chunks(tensor):
        digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class Batches:
    """How an epoch is cut: ``shares`` are the numbers of samples that each process takes in each call."""

    size: int
    shares: list[int]
    count: int
    rank: int
    world: int

    def of(self, seed: int, epoch: int) -> list[torch.Tensor]:
        """This process's rows in each batch of ``epoch``, without replacement."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(mixed_seed(seed, "epoch", epoch)))
        out, start = [], 0
        for share in self.shares:
            out.append(order[start + self.rank * share : start + (self.rank + 1) * share])
            start += share * self.world
        return out

    def largest(self, number: int) -> int:
        """The largest number that any process has."""
        return int(self._reduced(torch.tensor(number), "MAX")) if self.world > 1 else number

    def sum(self, value: torch.Tensor) -> float:
        """Over all processes; in all of them."""
        return float(self._reduced(value.clone(), "SUM") if self.world > 1 else value)

    def _reduced(self, value: torch.Tensor, operation: str) -> torch.Tensor:
        import torch.distributed as dist

        value = value.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(value, getattr(dist.ReduceOp, operation))
        return value


def mixed_seed(seed: int, purpose: str, number: int) -> int:
    """A seed for each number. Hashed, because torch's generators on the CPU use only 32 bits of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()[:4])


def cut_batches(samples: Samples, size: int | None, rank: int, world: int, note: Callable[[str], None]) -> Batches:
    """``size``: samples of a call; None: what was exported, or :data:`BATCH`. ``note`` gets a sentence about samples
    that are left out."""
    batch_size = size or _exported(samples) or BATCH
    num_full, rest = divmod(samples.count, batch_size * world)
    last = rest // world
    refusal = samples.refusal(batch_size) if num_full else None
    if refusal is not None:
        hint = "" if size or _exported(samples) else f" (with the default batch size {batch_size})"
        raise InputError(f"{samples.data} does not fit{hint}: {refusal}")
    too_few = samples.refusal(last) if last else None
    if not num_full and (not last or too_few is not None):
        raise InputError(
            f"{samples.data} has {samples.count} samples, too few for a batch of {batch_size * world}{f': {too_few}' if too_few else ''}"
        )
    if too_few is not None or not last:
        last = 0
    remaining = samples.count - num_full * batch_size * world - last * world
    if remaining:
        reason = f": {too_few}" if too_few is not None else f": {world} processes cannot share them evenly"
        note(f"every epoch leaves out {remaining} of {samples.count} samples, different ones each time{reason}")
    return Batches(batch_size, [batch_size] * num_full + ([last] if last else []), samples.count, rank, world)


def _exported(samples: Samples) -> int | None:
    """The size of a batch where the package fixes it."""
    size = samples.variants[0][0].inputs[0].shape[0]
    return size if isinstance(size, int) else None
