"""Forked workers. Each runs a batch of mutations and announces each one, so that the parent knows the mutation that
crashed or stopped it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_backward_runtime import load

from . import bases, judging, spoiling
from .judging import FAULTS

__all__ = ["FAULTS", "Records", "one", "prepare", "run"]

Records = list[dict[str, Any]]
BATCH = 1000


def prepare(folder: Path, names: Sequence[str]) -> None:
    """Make the missing valid packages, the state file and the signature. Only one process at a time does this."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = [name for name in names if not (folder / f"{name}.pt2").exists()]
        files = [
            folder / n
            for n, of in (("step.state", "step"), (judging.KEY, "targets"), ("targets.pt2.sig", "targets"))
            if of in names
        ]
        if made or not all(f.exists() for f in files):
            _in_a_process(lambda: _make(folder, made, names))


def _make(folder: Path, missing: Sequence[str], names: Sequence[str]) -> None:
    """Make the files. Runs in a separate process: a process that has exported, or has autograd's threads, should not
    fork workers."""
    for name in missing:
        bases.KNOWN[name].export(folder / f"{name}.pt2")
        for found, expected in bases.KNOWN[name].call(load(folder / f"{name}.pt2"), folder / f"{name}.pt2"):
            assert not (odd := bases.difference(found, expected)), f"{name}: {odd}"
    if "step" in names:
        _save(folder)
    if "targets" in names:
        _sign(folder)


def _save(folder: Path) -> None:
    step = load(folder / "step.pt2").step()
    step(*bases.samples(8))
    step.save(folder / "step.state", extra={"epoch": 3})


def _sign(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    import aot_backward as ab

    private = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (folder / "private.pem").write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / judging.KEY).write_bytes(
        private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    ab.sign(folder / "targets.pt2", key=folder / "private.pem")


def _in_a_process(action: Callable[[], None]) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the valid packages could not be made")


def one(seed: int, number: int, folder: Path, names: tuple[str, ...]) -> tuple[spoiling.Spoilt, str, str]:
    """Run a mutation in this process."""
    made = spoiling.spoilt(seed, number, folder, names)
    with tempfile.TemporaryDirectory(prefix="aot-backward-fuzz-") as work:
        return made, *judging.judge(made, folder, Path(work))


@dataclass
class _Worker:
    pid: int
    pipe: int
    numbers: Sequence[int]
    text: bytes
    running: int  # the mutation that runs; -1 between mutations
    since: float
    alone: bool  # whether it repeats the one mutation that ended an earlier worker


def run(
    seed: int,
    numbers: Sequence[int],
    folder: Path,
    names: tuple[str, ...],
    record: Callable[[Records], None],
    *,
    jobs: int,
    deadline: float,
    limit: float,
) -> None:
    """Run mutations ``numbers``. Start none after ``deadline``. A mutation hangs if it takes more than ``limit``
    seconds."""
    torch.set_num_threads(1)
    for name in names:  # forked workers inherit the files, modules and libraries opened here
        path = folder / f"{name}.pt2"
        spoiling.parts(path)
        spoiling.whole(path)
        bases.KNOWN[name].call(load(path), path)
    gc.collect()
    gc.freeze()  # the collector then skips these objects in workers, so their pages are not copied
    waiting = deque(numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH))
    workers: dict[int, _Worker] = {}
    again: deque[int] = deque()  # mutations that ended or stopped a worker: run again, alone
    with selectors.DefaultSelector() as selector, tempfile.TemporaryDirectory(prefix="aot-backward-fuzz-") as work:
        while workers or again or (waiting and time.monotonic() < deadline):
            while len(workers) < jobs and (again or (waiting and time.monotonic() < deadline)):
                alone = bool(again)
                worker = _fork(
                    seed, [again.popleft()] if alone else waiting.popleft(), folder, Path(work), names, alone, deadline
                )
                workers[worker.pipe] = worker
                selector.register(worker.pipe, selectors.EVENT_READ)
            for key, _ in selector.select(1):
                worker = workers[key.fd]
                data = os.read(worker.pipe, 1 << 16)
                if data:
                    _heard(worker, data, record)
                    continue
                selector.unregister(worker.pipe)
                os.close(worker.pipe)
                del workers[key.fd]
                status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
                _ended(worker, status, lambda n: spoiling.spoilt(seed, n, folder, names), record, again, waiting)
            for worker in workers.values():
                if time.monotonic() - worker.since > limit:
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.since = float("inf")


def _heard(worker: _Worker, data: bytes, record: Callable[[Records], None]) -> None:
    *lines, worker.text = (worker.text + data).split(b"\n")
    found = []
    for line in map(json.loads, lines):
        if isinstance(line, int):
            worker.running, worker.since = line, time.monotonic()
        else:
            found.append(line)
            worker.running = -1
    record(found)


def _ended(
    worker: _Worker,
    status: int,
    spoilt: Callable[[int], spoiling.Spoilt],
    record: Callable[[Records], None],
    again: deque[int],
    waiting: deque[Sequence[int]],
) -> None:
    if worker.running < 0:
        if status:
            raise RuntimeError(f"a worker ended with status {status} between two mutations of {worker.numbers[0]}…")
        return
    guilty = worker.running
    if worker.alone:
        hung = worker.since == float("inf")
        made = spoilt(guilty)
        why = "no end" if hung else signal.Signals(-status).name if status < 0 else f"exit status {status}"
        record([_record(guilty, made, "hang" if hung else "signal", why)])
        return
    again.append(guilty)
    rest = worker.numbers[list(worker.numbers).index(guilty) + 1 :]
    if rest:
        waiting.appendleft(rest)


def _record(number: int, made: spoiling.Spoilt, verdict: str, reason: str) -> dict[str, Any]:
    what = made.what if verdict in FAULTS else ""
    return {"number": number, "base": made.base, "kind": made.kind, "what": what, "verdict": verdict, "reason": reason}


def _fork(
    seed: int,
    numbers: Sequence[int],
    folder: Path,
    temporary: Path,
    names: tuple[str, ...],
    alone: bool,
    deadline: float,
) -> _Worker:
    """Start a worker. The caller removes ``temporary``, with the files of killed workers."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Worker(pid, read, numbers, b"", -1, time.monotonic(), alone)
    status = 1
    try:
        os.close(read)
        judging.quiet()
        work = Path(tempfile.mkdtemp(dir=temporary))
        with contextlib.suppress(KeyboardInterrupt), os.fdopen(write, "wb", buffering=0) as pipe:
            for number in numbers:
                if time.monotonic() > deadline and not alone:
                    break
                pipe.write(f"{number}\n".encode())
                made = spoiling.spoilt(seed, number, folder, names)
                pipe.write(json.dumps(_record(number, made, *judging.judge(made, folder, work))).encode() + b"\n")
        shutil.rmtree(work, ignore_errors=True)
        status = 0
    finally:
        os._exit(status)
    raise AssertionError
