"""``train``: a step entry of a package over a file of samples, epoch after epoch. The code of ``aot-backward train``,
which needs only the runtime.

The state is saved so that a training interrupted anywhere and resumed is bit for bit the one that was not: it holds the
random state of dropout and the number of batches done, and :mod:`.train_samples` draws the batches from the seed and
the epoch's number alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_backward_runtime import InputError, Package, StateError, load
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signatures import Key, admission
from aot_backward_runtime.training.step import LoadedStep

from .train_samples import Batches, Samples, cut_batches, mixed_seed, read_samples

_OURS = "aot-backward train"  # the key of this module's entry in a state file


@dataclass(frozen=True)
class EpochReport:
    """``epoch`` counts from 1. ``loss``: the mean over the epoch's samples. ``skipped``: updates left out, in the whole
    training so far. ``seconds``, ``steps_per_second``: of this process's part of the epoch, without saving."""

    epoch: int
    epochs: int
    steps: int
    samples: int
    loss: float
    skipped: int
    seconds: float
    steps_per_second: float


@dataclass(frozen=True)
class Callbacks:
    """``step(epoch, done, total, loss)`` is called after each step, with ``loss`` a 0-d tensor; ``note`` with a
    sentence for the user."""

    step: Callable[[int, int, int, torch.Tensor], None] = lambda *_: None
    epoch: Callable[[EpochReport], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class TrainingResult:
    """``epochs`` that are complete, ``steps`` of the next one, and the ``signal`` that ended it early, or 0. ``rank``:
    of this process."""

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
    callbacks: Callbacks | None = None,
    device: str | None = None,
    cudagraphs: bool = False,
    key: Key | None = None,
) -> TrainingResult:
    """Train a ``step`` entry of ``package`` (the only one if ``entry`` is None) on the samples of ``data`` until
    ``epochs`` epochs are done.

    ``data``: a safetensors file with a tensor for each that the step takes, by the names that ``inspect`` lists; each
    row of the first dimension is a sample. ``batch_size``: samples of a call; by default the exported size, or
    :data:`.train_samples.BATCH` if that is dynamic. Samples left over at the end of an epoch are a smaller batch if the
    package takes one; otherwise that epoch skips them. ``save``: the state, written after each epoch and on SIGINT and
    SIGTERM, which end the training early, after the step under way. ``resume``: continue from ``save``; refused with
    other data, another seed or another batch size. ``device``, ``cudagraphs`` and ``key``: see
    :func:`aot_backward_runtime.load`; samples are moved to the device batch by batch.

    If ``WORLD_SIZE`` is above 1 (``torchrun``), each process takes ``batch_size`` samples of every batch, and gradients
    are averaged. With a package for GPUs, each process uses the GPU of its ``LOCAL_RANK``. Raises :class:`InputError`
    before any training if samples do not fit, and :class:`StateError`.
    """
    save = Path(save)
    if not resume and save.exists():
        raise StateError(f"{save} already exists: resume from it, or save to another file")
    if device is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and _on_gpu(package, key):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    loaded_package = load(package, device=device, cudagraphs=cudagraphs, key=key)
    name = _step_entry(loaded_package, entry)
    spec = loaded_package.manifest.entries[name]
    mode = "train" if any(v.mode == "train" for v in spec.variants) else "eval"
    samples = read_samples(Path(data), name, [v for v in spec.variants if v.mode == mode], loaded_package.device)
    with _processes(loaded_package.device) as (rank, world):
        callbacks = (callbacks or Callbacks()) if rank == 0 else Callbacks()
        batches = cut_batches(samples, batch_size, rank, world, callbacks.note)
        step = loaded_package.step(name).train(mode == "train")
        if world > 1:
            step.distribute()
        settings = {
            "seed": seed,
            "batch_size": batches.size,
            "processes": world,
            "samples": samples.count,
            "data": samples.digests,
        }
        return _train(step, samples, batches, epochs, seed, save, resume, settings, callbacks)


def _train(
    step: LoadedStep,
    samples: Samples,
    batches: Batches,
    epochs: int,
    seed: int,
    save: Path,
    resume: bool,
    settings: Mapping[str, Any],
    callbacks: Callbacks,
) -> TrainingResult:
    # Else all ranks had the same dropout masks
    torch.manual_seed(seed if batches.rank == 0 else mixed_seed(seed, "rank", batches.rank))
    epoch = done = 0
    total = 0.0  # of the losses of the epoch's samples so far, in all processes
    if resume:
        position = _saved_position(step.resume(save), settings, save, samples.data)
        epoch, done, total = int(position["epoch"]), int(position["batches"]), float(position["loss"])
        if epoch >= epochs:
            callbacks.note(f"{save} has already trained {epoch} of {epochs} epochs: nothing is left to train")

    def write() -> None:
        step.save(save, {_OURS: {**settings, "epoch": epoch, "batches": done, "loss": total}})

    with _signals() as signals:
        while epoch < epochs:
            start, first = time.perf_counter(), done
            sums = torch.tensor(total if batches.rank == 0 else 0.0, dtype=torch.float64, device=samples.device)
            for rows in batches.of(seed, epoch)[first:]:
                loss = samples.call(step, rows)
                sums += loss.double() * len(rows)
                done += 1
                callbacks.step(epoch + 1, done, len(batches.shares), loss)
                signal_number = batches.largest(signals[0] if signals else 0)
                if signal_number:
                    total = batches.sum(sums)
                    write()
                    return TrainingResult(epoch, done, signal_number, batches.rank)
            seconds, steps = time.perf_counter() - start, done - first
            count = sum(batches.shares) * batches.world
            loss_mean = batches.sum(sums) / count
            report = EpochReport(
                epoch + 1, epochs, done, count, loss_mean, step.skipped, seconds, steps / seconds if steps else 0.0
            )
            epoch, done, total = epoch + 1, 0, 0.0
            write()
            callbacks.epoch(report)
    return TrainingResult(epoch, 0, 0, batches.rank)


def _on_gpu(package: str | os.PathLike[str], key: Key | None) -> bool:
    return open_package(Path(package), admit=admission(key)).manifest.target.device == "cuda"


def _step_entry(package: Package, entry: str | None) -> str:
    steps = [n for n, kind in package.entries.items() if kind == "step"]
    if entry is None and len(steps) == 1:
        return steps[0]
    if entry is None or entry not in steps:
        entries = ", ".join(f"{n} ({kind})" for n, kind in package.entries.items())
        problem = (
            f"has no training step {entry!r}"
            if entry is not None
            else f"has {len(steps) or 'no'} training steps{': name one' if steps else ''}"
        )
        raise InputError(f"the package {problem}; its entries: {entries}")
    return entry


@contextlib.contextmanager
def _processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield the rank of this process and the world size, in a process group if there are several."""
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


def _saved_position(extra: Any, settings: Mapping[str, Any], save: Path, data: Path) -> Mapping[str, Any]:
    """Return the data that :func:`train` saved with the state. Raise :class:`StateError` if it is of another training
    than ``settings``."""
    saved = extra.get(_OURS) if isinstance(extra, Mapping) else None
    if not isinstance(saved, Mapping) or not {*settings, "epoch", "batches", "loss"} <= saved.keys():
        raise StateError(
            f"{save} was not saved by `aot-backward train`, and does not say which samples come next: resume it with step.resume()"
        )
    words = {
        "seed": "the seed",
        "batch_size": "the batch size",
        "processes": "the number of processes",
        "samples": "the number of samples",
    }
    for key, label in words.items():
        if saved[key] != settings[key]:
            raise StateError(f"{save} cannot be resumed: {label} was {saved[key]}, and is {settings[key]} now")
    for name, digest in settings["data"].items():
        if not isinstance(saved["data"], Mapping) or saved["data"].get(name) != digest:
            raise StateError(f"{save} cannot be resumed: {name!r} in {data} differs from the data it was trained on")
    return saved


@contextlib.contextmanager
def _signals() -> Iterator[Sequence[int]]:
    """Lists SIGINT and SIGTERM instead of being ended by them, so that the step under way is finished and saved; a
    second SIGINT interrupts."""
    signals: list[int] = []
    # torchrun forwards the SIGINT that the terminal has sent to each process already
    single_process = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, _: Any) -> None:
        if signals and number == signal.SIGINT and single_process:
            raise KeyboardInterrupt
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
