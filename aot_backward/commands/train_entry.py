"""``train``: a step entry of a package over a file of samples, epoch after epoch, saved so that it can go on bit for bit. What
``aot-backward train`` does, on the runtime alone.

The order of the samples in an epoch depends on the seed and the epoch's number, and on nothing else; the random state of dropout is in the saved
state. So a training that was interrupted anywhere and resumed sees the batches that it would have seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from aot_backward_runtime import InputError, Package, StateError, load
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.native.guards import Contract
from aot_backward_runtime.native.pytree import unflatten
from aot_backward_runtime.native.tensor_bytes import tensor_chunks
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signature_policy import Key, Policy, admission
from aot_backward_runtime.training.step import LoadedStep

from ..tensor_file import read_tensors

BATCH = 32
"""The size of a batch where the package leaves it open."""
_OURS = "aot-backward train"  # the key, in what a state file says, of what this module notes there


@dataclass(frozen=True)
class EpochReport:
    """``epoch`` counts from 1. ``loss``: the mean over the epoch's samples. ``skipped``: updates left out, in the whole training so far.
    ``seconds``, ``steps_per_second``: of what this process did of the epoch, without saving."""

    epoch: int
    epochs: int
    steps: int
    samples: int
    loss: float
    skipped: int
    seconds: float
    steps_per_second: float


@dataclass(frozen=True)
class Watcher:
    """Who is told what. ``step(epoch, done, total, loss)`` comes after each step, ``loss`` being a 0-d tensor; ``note`` with what to know."""

    step: Callable[[int, int, int, torch.Tensor], None] = lambda *_: None
    epoch: Callable[[EpochReport], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Outcome:
    """How far it came: epochs that are whole, steps of the next one, and the signal that ended it early, or 0. ``rank``: of this process."""

    epochs: int
    steps: int
    signal: int
    rank: int


def train(
    package: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    epochs: int,
    save: str | os.PathLike[str],
    resume: bool = False,
    batch_size: int | None = None,
    entry: str | None = None,
    seed: int = 0,
    watcher: Watcher | None = None,
    device: str | None = None,
    cudagraphs: bool = False,
    signature: Policy | None = None,
    key: Key | None = None,
) -> Outcome:
    """Trains a ``step`` entry of ``package`` (the sole one where ``entry`` is None) on the samples of ``data`` until ``epochs`` epochs are done.

    ``data``: a safetensors file with a tensor for each that the step takes, by the names that ``inspect`` lists; each row of the first dimension
    is a sample. ``batch_size``: samples of a call; by default what was exported, or :data:`BATCH` where that is dynamic. Samples left over at
    the end of an epoch are a smaller batch where the package takes one, else they are left out of that epoch.
    ``save``: the state, written after each epoch and on SIGINT and SIGTERM, which end the training early, after the step at hand.
    ``resume``: go on from ``save``; with other data, another seed or batch size it is refused. ``device``, ``cudagraphs``, ``signature`` and ``key``
    are those of :func:`aot_backward_runtime.load`; samples are moved to the device batch by batch.

    Where ``WORLD_SIZE`` says that it is one of several processes (``torchrun``), each takes ``batch_size`` samples of every batch, and
    gradients are averaged; of a package for GPUs each has the GPU of its ``LOCAL_RANK``. Raises :class:`InputError` where samples do not fit, before
    anything is trained, and :class:`StateError`.
    """
    save = Path(save)
    if not resume and save.exists():
        raise StateError(f"{save} is there already: resume from it, or save to another file")
    if device is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and _on_gpu(package, signature, key):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    loaded = load(package, device=device, cudagraphs=cudagraphs, signature=signature, key=key)
    name = _step_entry(loaded, entry)
    spec = loaded.manifest.entries[name]
    mode = "train" if any(v.mode == "train" for v in spec.variants) else "eval"
    samples = _samples(Path(data), name, [v for v in spec.variants if v.mode == mode], loaded.device)
    with _processes(loaded.device) as (rank, world):
        watcher = (watcher or Watcher()) if rank == 0 else Watcher()
        batches = _batches(samples, batch_size, rank, world, watcher)
        step = loaded.step(name).train(mode == "train")
        if world > 1:
            step.distribute()
        about = {"seed": seed, "batch_size": batches.size, "processes": world, "samples": samples.count, "data": samples.digests}
        return _train(step, samples, batches, epochs, seed, save, resume, about, watcher)


def _train(
    step: LoadedStep,
    samples: _Samples,
    batches: _Batches,
    epochs: int,
    seed: int,
    save: Path,
    resume: bool,
    about: Mapping[str, Any],
    watcher: Watcher,
) -> Outcome:
    torch.manual_seed(seed if batches.rank == 0 else _mixed(seed, "rank", batches.rank))  # else all ranks would drop out alike
    epoch = done = 0
    total = 0.0  # of the losses of the epoch's samples so far, in all processes
    if resume:
        noted = _noted(step.resume(save), about, save, samples.data)
        epoch, done, total = int(noted["epoch"]), int(noted["batches"]), float(noted["loss"])
        if epoch >= epochs:
            watcher.note(f"{save} has made {epoch} of {epochs} epochs already: nothing is left to train")

    def write() -> None:
        step.save(save, {_OURS: {**about, "epoch": epoch, "batches": done, "loss": total}})

    with _signals() as caught:
        while epoch < epochs:
            began, first = time.perf_counter(), done
            sums = torch.tensor(total if batches.rank == 0 else 0.0, dtype=torch.float64, device=samples.device)
            for rows in batches.of(seed, epoch)[first:]:
                loss = samples.call(step, rows)
                sums += loss.double() * len(rows)
                done += 1
                watcher.step(epoch + 1, done, len(batches.shares), loss)
                ended = batches.largest(caught[0] if caught else 0)
                if ended:
                    total = batches.sum(sums)
                    write()
                    return Outcome(epoch, done, ended, batches.rank)
            seconds, steps = time.perf_counter() - began, done - first
            count = sum(batches.shares) * batches.world
            loss_mean = batches.sum(sums) / count
            report = EpochReport(epoch + 1, epochs, done, count, loss_mean, step.skipped, seconds, steps / seconds if steps else 0.0)
            epoch, done, total = epoch + 1, 0, 0.0
            write()
            watcher.epoch(report)
    return Outcome(epoch, 0, 0, batches.rank)


def _on_gpu(package: str | os.PathLike[str], signature: Policy | None, key: Key | None) -> bool:
    return open_package(Path(package), admit=admission(signature, key)).manifest.target.device == "cuda"


def _step_entry(package: Package, entry: str | None) -> str:
    steps = [n for n, kind in package.entries.items() if kind == "step"]
    if entry is None and len(steps) == 1:
        return steps[0]
    if entry is None or entry not in steps:
        has = ", ".join(f"{n} ({kind})" for n, kind in package.entries.items())
        what = f"has no training step {entry!r}" if entry is not None else f"has {len(steps)} training steps, of which one must be named"
        raise InputError(f"the package {what}; its entries: {has}")
    return entry


@contextlib.contextmanager
def _processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """The number of this process and how many there are, joined where there are several."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), world
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Samples:
    """The tensors of a data file in the order in which a step takes them, and its variants that could."""

    tensors: list[torch.Tensor]
    variants: list[tuple[VariantSpec, Contract]]
    count: int
    digests: dict[str, str]
    data: Path
    device: torch.device

    def refusal(self, size: int) -> InputError | None:
        """Why no variant takes ``size`` samples at once; None where one does."""
        refused = None
        for _, contract in self.variants:
            try:
                contract.fit([t[:size].to(self.device) for t in self.tensors])
                return None
            except InputError as error:
                refused = refused or error
        return refused

    def call(self, step: LoadedStep, rows: torch.Tensor) -> torch.Tensor:
        """One step on these samples; its loss."""
        variant = self.variants[0][0]
        args, kwargs = unflatten(variant.in_tree, [t[rows].to(self.device) for t in self.tensors], {}, {})
        loss: torch.Tensor = pytree.tree_leaves(step(*args, **kwargs))[0]
        return loss


def _samples(data: Path, name: str, variants: Sequence[VariantSpec], device: torch.device) -> _Samples:
    given = read_tensors(data)
    fitting = [v for v in variants if {s.name for s in v.inputs} == given.keys()]
    if not fitting:
        wanted = [s.name for s in variants[0].inputs]
        missing, extra = [n for n in wanted if n not in given], sorted(given.keys() - set(wanted))
        parts = [f"it has no {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"it has {', '.join(map(repr, extra))}, which the step does not take"] if extra else []
        raise InputError(f"{data} does not fit entry {name!r}, which takes {', '.join(wanted)}: {'; '.join(parts)}")
    single = [n for n, t in given.items() if not t.dim()]
    if single:
        raise InputError(f"{data}: {single[0]!r} has no dimensions, and the first should be that of the samples")
    lengths = {n: len(t) for n, t in given.items()}
    if len(set(lengths.values())) != 1:
        raise InputError(f"{data}: tensors have different numbers of samples: {', '.join(f'{n} {k}' for n, k in lengths.items())}")
    count = next(iter(lengths.values()))
    if not count:
        raise InputError(f"{data} holds no samples")
    first = [s.name for s in fitting[0].inputs]
    alike = [v for v in fitting if [s.name for s in v.inputs] == first and v.in_tree == fitting[0].in_tree]
    tensors = [given[n] for n in first]
    contracts = [(v, Contract(v.inputs, v.symbols, v.guards, device)) for v in alike]
    return _Samples(tensors, contracts, count, {n: _digest(t) for n, t in given.items()}, data, device)


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for chunk in tensor_chunks(tensor):
        digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Batches:
    """How an epoch is cut: ``shares`` are the samples of each call, of this process and of every other."""

    size: int
    shares: list[int]
    count: int
    rank: int
    world: int

    def of(self, seed: int, epoch: int) -> list[torch.Tensor]:
        """This process's rows in each batch of ``epoch``, without replacement."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(_mixed(seed, "epoch", epoch)))
        out, start = [], 0
        for share in self.shares:
            out.append(order[start + self.rank * share : start + (self.rank + 1) * share])
            start += share * self.world
        return out

    def largest(self, number: int) -> int:
        """The largest that any process has, so that all of them end after the same step."""
        return int(self._reduced(torch.tensor(number), "MAX")) if self.world > 1 else number

    def sum(self, value: torch.Tensor) -> float:
        """Over all processes; in all of them."""
        return float(self._reduced(value.clone(), "SUM") if self.world > 1 else value)

    def _reduced(self, value: torch.Tensor, operation: str) -> torch.Tensor:
        import torch.distributed as dist

        value = value.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(value, getattr(dist.ReduceOp, operation))
        return value


def _mixed(seed: int, what: str, number: int) -> int:
    """A seed for each number. Hashed, because torch's generators on the CPU look at 32 bits of a seed only."""
    return int.from_bytes(hashlib.sha256(f"{seed} {what} {number}".encode()).digest()[:4])


def _batches(samples: _Samples, size: int | None, rank: int, world: int, watcher: Watcher) -> _Batches:
    chosen = size or _exported(samples) or BATCH
    whole, rest = divmod(samples.count, chosen * world)
    last = rest // world
    refused = samples.refusal(chosen) if whole else None
    if refused is not None:
        hint = "" if size or _exported(samples) else f" (a batch size of {chosen} was taken, as none was given)"
        raise InputError(f"{samples.data} does not fit{hint}: {refused}")
    too_few = samples.refusal(last) if last else None
    if not whole and (not last or too_few is not None):
        raise InputError(f"{samples.data} has {samples.count} samples, which are no batch of {chosen * world}{f': {too_few}' if too_few else ''}")
    if too_few is not None or not last:
        last = 0
    left = samples.count - whole * chosen * world - last * world
    if left:
        why = f": {too_few}" if too_few is not None else f", which {world} processes cannot share evenly"
        watcher.note(f"{left} of {samples.count} samples, others each time, are left out of every epoch{why}")
    return _Batches(chosen, [chosen] * whole + ([last] if last else []), samples.count, rank, world)


def _exported(samples: _Samples) -> int | None:
    """The size of a batch where the package fixes it."""
    size = samples.variants[0][0].inputs[0].shape[0]
    return size if isinstance(size, int) else None


def _noted(extra: Any, about: Mapping[str, Any], save: Path, data: Path) -> Mapping[str, Any]:
    """What :func:`train` noted in the state; :class:`StateError` where it was another training."""
    noted = extra.get(_OURS) if isinstance(extra, Mapping) else None
    if not isinstance(noted, Mapping) or not {*about, "epoch", "batches", "loss"} <= noted.keys():
        raise StateError(f"{save} was not saved by `aot-backward train`, and does not say which samples come next: resume it with step.resume()")
    words = {"seed": "the seed", "batch_size": "the batch size", "processes": "the number of processes", "samples": "the number of samples"}
    for key, what in words.items():
        if noted[key] != about[key]:
            raise StateError(f"{save} cannot go on: {what} was {noted[key]}, and is {about[key]} now")
    for name, digest in about["data"].items():
        if not isinstance(noted["data"], Mapping) or noted["data"].get(name) != digest:
            raise StateError(f"{save} cannot go on: {name!r} in {data} is not what it was trained on")
    return noted


@contextlib.contextmanager
def _signals() -> Iterator[Sequence[int]]:
    """The SIGINT or SIGTERM that came, so that the step at hand is finished and saved; a second SIGINT ends at once."""
    caught: list[int] = []
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1  # torchrun passes on what the terminal has sent already
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, _: Any) -> None:
        if caught and number == signal.SIGINT and alone:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
