"""``record`` in several processes that a launcher such as torchrun has started on one machine: one of them writes the package.

They meet in a folder beside the package. Each holds a lock on a file there, which the kernel drops when the process ends, however it ends. When its
script is done, each leaves there what its passes looked like (``N.passes``); the first that is still there, rank 0 mostly, is the writer. It adds
that to what it saw itself, so that a batch size which it never met makes the size dynamic, and asks the others (``N.wanted.M``) for the graphs of
passes of a kind that it has not met; it compiles all of them, and says so (``N.done``). The others wait for that. Where the writer ends before, the
next one takes its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.atomic_file import replacing

from ..observation import Observation
from ..recorded_structure import RecordedStructure
from .observation_json import observations_from_json, observations_to_json

_RUN = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"
_POLL = 0.05
_START = 60.0  # seconds until the others must have begun
_PATIENCE = 1800.0  # ... until they must be done: what a process group waits for, too
_NOTICE = 1.0  # ... in which a process that was killed is noticed by the others, whose script then failed for that
_contexts = itertools.count()

Seen = dict[Observation, int]


@dataclass
class Gathered:
    """What the writer is to compile. ``files``: written by :func:`~..miss_file.save_misses`; ``lines``: what became of the others, for the report."""

    structures: dict[str, RecordedStructure]
    files: list[Path] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def ranks_here(output: Path) -> Ranks | None:
    """The processes that record into ``output``, by the launcher's environment variables; None where it is this one alone."""
    rank = rank_here()
    return None if rank is None else Ranks(output, rank, int(_count_here()))


def rank_here() -> int | None:
    """The number of this process on this machine; None where it is the only one."""
    number, count = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "")), _count_here()
    return int(number) if number.isdecimal() and count.isdecimal() and int(number) < int(count) and int(count) > 1 else None


def _count_here() -> str:
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", ""))


class Ranks:
    """This process (``rank``) and the others. Entered before the script runs."""

    def __init__(self, output: Path, rank: int, count: int):
        self.rank = rank
        self.others = [r for r in range(count) if r != rank]
        run = "|".join([*(os.environ.get(name, "") for name in _RUN), str(next(_contexts))])
        self.folder = output.resolve().parent / f".{output.name}.ranks-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
        self.terminated = False  # while it compiled
        self._absent: set[int] = set()  # never came
        self._closing = False
        self._until = float("inf")
        self._prior: Any = None

    # -- who is there

    def enter(self) -> None:
        """Waits until the others are there, too, a minute at most."""
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.glob(f"{self.rank}.*"):  # by an earlier run that was killed
            left.unlink()
        self._lock = self._path("lock").open("w")
        fcntl.lockf(self._lock, fcntl.LOCK_EX)  # not flock, which a forked data loader would hold on to
        until = time.monotonic() + _START
        waiting = set(self.others)
        while waiting and time.monotonic() < until:
            waiting = {r for r in waiting if not self._is_there(r)}
            if waiting:
                time.sleep(_POLL)
        self._absent = waiting
        if threading.current_thread() is threading.main_thread():
            self._prior = signal.signal(signal.SIGTERM, self._on_terminate)

    def leave(self) -> None:
        if self._prior is not None:
            signal.signal(signal.SIGTERM, self._prior)
            self._prior = None
        self._lock.close()
        if not any(map(self._is_there, self.others)):  # the last one
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str, rank: int | None = None) -> Path:
        return self.folder / f"{self.rank if rank is None else rank}.{name}"

    def _is_there(self, rank: int) -> bool:
        """Whether that process runs, and may still say something."""
        if time.monotonic() > self._until:
            return False
        try:
            with self._path("lock", rank).open() as lock:
                fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:  # it holds the lock
            return not self._path("failed", rank).exists()
        return False

    def _was_killed(self, rank: int) -> bool:
        return rank not in self._absent and not self._is_there(rank) and not any(self._path(name, rank).exists() for name in ("failed", "passes"))

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """A launcher ends all processes where one of them has ended badly. What the others have seen is then compiled in the time that it gives."""
        gone = any(not self._is_there(r) for r in self.others) if self._closing else any(map(self._was_killed, self.others))
        if self._closing and gone:
            self.terminated = True
        elif gone:
            raise SystemExit(128 + number)
        else:  # nobody is gone: this process itself is meant
            signal.signal(number, self._prior)
            os.kill(os.getpid(), number)

    # -- when the script is done

    def failed_for_another(self) -> bool:
        """Whether the script may have failed here since another process was killed, so that what was seen is worth as much as before."""
        until = time.monotonic() + _NOTICE
        while not (killed := any(map(self._was_killed, self.others))) and time.monotonic() < until:
            time.sleep(_POLL)
        return killed

    def fail(self) -> None:
        """Says that nothing comes of this process: its script failed."""
        self._put("failed", {})

    def gather(self, structures: Mapping[str, RecordedStructure], passes: int) -> Gathered | None:
        """What is to be compiled, where this process is the writer; None where another has written it. ``passes``: how many were recorded here."""
        self._closing = True
        self._until = time.monotonic() + _PATIENCE
        self._put("passes", {"passes": passes, "structures": {f: observations_to_json(s.observations) for f, s in structures.items()}})
        answered: set[int] = set()
        while (writer := min([self.rank, *filter(self._is_there, self.others)])) != self.rank:
            if self._is_done():
                return None
            asked = self._take("wanted." + str(self.rank), writer)
            if asked is not None and writer not in answered:
                answered.add(writer)
                self._trace(structures, {f: observations_from_json(o) for f, o in asked.items()}, writer)
            time.sleep(_POLL)
        return None if self._is_done() else self._gather_as_writer(structures, passes)

    def _gather_as_writer(self, structures: Mapping[str, RecordedStructure], passes: int) -> Gathered:
        found = Gathered(dict(structures))
        counts = {self.rank: passes}
        others: dict[int, dict[str, Seen]] = {}
        for rank in self.others:
            said = self._wait_for("passes", rank)
            if said is None:
                found.lines.append(f"rank {rank} {self._why_absent(rank)}: the package has nothing of what it alone saw")
            else:
                counts[rank] = said["passes"]
                others[rank] = {f: observations_from_json(o) for f, o in said["structures"].items()}
        wanted = share_out(found.structures, others)
        for rank in others:
            self._put(f"wanted.{rank}", {f: observations_to_json(o) for f, o in wanted.get(rank, {}).items()})
        for rank in wanted:
            said = self._wait_for(f"traced.{self.rank}", rank)
            if said is None:
                found.lines.append(f"rank {rank} {self._why_absent(rank)} before it had traced its passes: the package has none that it alone saw")
            else:
                found.skipped.update(said["skipped"])
                found.files.append(self._path(f"graphs.{self.rank}", rank))
        found.lines.insert(0, "passes recorded by rank: " + ", ".join(f"{n} by {rank}" for rank, n in sorted(counts.items())))
        return found

    def _why_absent(self, rank: int) -> str:
        if rank in self._absent:
            return f"did not begin within {_START:.0f} s"
        if self._path("failed", rank).exists():
            return "failed"
        return "was killed" if time.monotonic() < self._until else f"was not done after {_PATIENCE:.0f} s"

    def _trace(self, structures: Mapping[str, RecordedStructure], wanted: Mapping[str, Seen], writer: int) -> None:
        if wanted:
            from ..miss_file import save_misses

            asked = {f: replace(structures[f], observations=seen) for f, seen in wanted.items()}
            skipped = save_misses(self._path(f"graphs.{writer}"), asked)
            self._put(f"traced.{writer}", {"skipped": skipped})

    def say_done(self) -> None:
        """The writer's last word, after which the others go on, and leave before it."""
        self._put("done", {})
        until = time.monotonic() + 10
        while any(map(self._is_there, self.others)) and time.monotonic() < until:
            time.sleep(_POLL)

    def _is_done(self) -> bool:
        return not self.folder.exists() or any(self.folder.glob("*.done"))

    # -- what is said

    def _put(self, name: str, said: Mapping[str, Any]) -> None:
        try:
            with replacing(self._path(name)) as file:
                file.write(json.dumps(said).encode())
        except FileNotFoundError:  # the others are done without this process
            pass
        except OSError as error:
            raise ExportError(f"cannot hand over to other processes in {self.folder}: {error.strerror or error}") from error

    def _take(self, name: str, rank: int) -> Any:
        path = self._path(name, rank)
        return json.loads(path.read_bytes()) if path.exists() else None

    def _wait_for(self, name: str, rank: int) -> Any:
        """What ``rank`` says; None where it has ended without."""
        while (said := self._take(name, rank)) is None:
            if rank in self._absent or not self._is_there(rank):
                return self._take(name, rank)
            time.sleep(_POLL)
        return said


def share_out(mine: dict[str, RecordedStructure], others: Mapping[int, Mapping[str, Seen]]) -> dict[int, dict[str, Seen]]:
    """Which passes each of the others is to trace: of each kind that is not ``mine`` the first that met it. Those of a kind that is are added there.

    ``mine`` and ``others``: by fingerprint."""
    wanted: dict[int, dict[str, Seen]] = {}
    tracer: dict[tuple[str, Any], Seen] = {}
    for fingerprint, structure in list(mine.items()):
        mine[fingerprint] = replace(structure, observations=dict(structure.observations))
        tracer.update(dict.fromkeys([(fingerprint, o.kind()) for o in structure.observations], mine[fingerprint].observations))
    for rank, structures in sorted(others.items()):
        for fingerprint, seen in structures.items():
            for observation, count in seen.items():
                key = fingerprint, observation.kind()
                if key not in tracer:
                    tracer[key] = wanted.setdefault(rank, {}).setdefault(fingerprint, {})
                tracer[key][observation] = tracer[key].get(observation, 0) + count
    return wanted
