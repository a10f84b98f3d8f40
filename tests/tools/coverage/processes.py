"""Workers, one per chunk of operators.

If a worker ends or goes silent, the case that it was running is crashed; another worker runs the rest.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]

Record = dict[str, Any]
"""A verdict: database, operator, sample, way, verdict, reason, seconds, "samples" (the number asked for) and "of" (the
number that the operator has)."""


@dataclass(frozen=True)
class Job:
    """The job of one worker. ``settled``: names of cases that already have a verdict. ``size``: cases per package."""

    operators: tuple[tuple[str, str], ...]
    way: str
    samples: int
    size: int
    settled: tuple[str, ...] = ()


def run(jobs: Sequence[Job], record: Callable[[Record], None], *, workers: int, deadline: float, limit: float) -> bool:
    """Run ``jobs``, and the jobs that workers leave when they end early. Start none after ``deadline``. Return whether
    all have run."""
    waiting = deque(jobs)
    running: set[Future[list[Job]]] = set()
    with ThreadPoolExecutor(workers) as pool:
        while True:
            while waiting and len(running) < workers and time.monotonic() < deadline:
                running.add(pool.submit(attempt, waiting.popleft(), record, limit))
            if not running:
                return not waiting
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                waiting.extendleft(future.result())


def attempt(job: Job, record: Callable[[Record], None], limit: float) -> list[Job]:
    """Run one worker on one job and return the jobs that are left. Kill the worker after ``limit`` seconds without
    output."""
    argv = [sys.executable, "-m", "tests.tools.coverage.worker", json.dumps(asdict(job))]
    settled, stage, running, of = list(job.settled), "started", list[str](), dict[tuple[str, str], int]()
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
        )
        lines = _lines(process)
        why = ""
        while (line := _next(lines, limit)) != "":
            if line is None:
                why = f"no end after {limit:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
                break
            said = json.loads(line)
            if "case" in said:
                case = said["case"]
                record({**case, "samples": job.samples, "of": of.get((case["database"], case["operator"]), 1)})
                settled.append("{database}:{operator}#{sample}".format(**case))
            elif "of" in said:
                database, operator, number = said["of"]
                of[database, operator] = number
            else:
                stage, running, start = said["stage"], said["running"], time.monotonic()
        status = process.wait()
        if stage == "end":
            return []
        if not running:
            errors.seek(0)
            raise RuntimeError(f"a worker ended with status {status} before its first case:\n{errors.read()[-4000:]}")
    why = why or (signal.Signals(-status).name if status < 0 else f"exit status {status}")
    seconds = round(time.monotonic() - start, 1)
    guilty = {
        "way": job.way,
        "verdict": "crashed",
        "reason": f"{stage}: {why}",
        "seconds": seconds,
        "samples": job.samples,
    }
    return _left(replace(job, settled=tuple(settled)), running, guilty, of, record)


def _left(
    job: Job, running: Sequence[str], guilty: Record, of: dict[tuple[str, str], int], record: Callable[[Record], None]
) -> list[Job]:
    """Record the only running case as crashed. If several were running, try them again in smaller groups."""
    blamed = {tuple(name.rpartition("#")[0].split(":", 1)) for name in running}
    rest = tuple(o for o in job.operators if o not in blamed)
    again = tuple(o for o in job.operators if o in blamed)
    out = [replace(job, operators=rest)] if rest else []
    if len(running) > 1:
        return [*out, replace(job, operators=again, size=max(1, min(job.size, len(running)) // 2))]
    database, operator = again[0]
    sample = running[0].rpartition("#")[2]
    record(
        {"database": database, "operator": operator, "sample": sample, **guilty, "of": of.get((database, operator), 1)}
    )
    if sample:  # its other samples
        out.append(replace(job, operators=again, settled=(*job.settled, running[0])))
    return out


def _lines(process: subprocess.Popen[str]) -> queue.Queue[str]:
    """Return a queue of the worker's output lines. An empty line marks the end."""
    out: queue.Queue[str] = queue.Queue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            out.put(line)
        out.put("")

    assert process.stdout is not None
    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    return out


def _next(lines: queue.Queue[str], limit: float) -> str | None:
    try:
        return lines.get(timeout=limit)
    except queue.Empty:
        return None


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}
    # Some samples come from sets; every process must make the same ones
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
