"""Fresh processes: scripts that run once, and peers that stay and answer requests in turn."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
WORK = ROOT / "build" / "benchmarks"
"""Packages and caches of the benchmarks. You may delete this folder; the next run then compiles again."""

_READY = "ready"

REUSE = False
"""Whether to measure existing packages (``--reuse``) instead of exporting them again."""


def package(name: str) -> Path:
    (WORK / "packages").mkdir(parents=True, exist_ok=True)
    return WORK / "packages" / f"{name}.pt2"


def environment(threads: int, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}
    return {**kept, "OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"), **more}


def now() -> float:
    """Return the seconds of a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def run(script: str, *arguments: object, threads: int, **more: str) -> tuple[float, dict[str, Any]]:
    """Run ``script`` in a fresh process. Return its start time (:func:`now`) and the JSON of its last line of
    output."""
    argv = [sys.executable, "-c", script, *map(str, arguments)]
    start = now()
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=ROOT, env=environment(threads, **more), stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(f"a measured process failed:\n{done.stderr[-4000:]}")
    return start, json.loads(done.stdout.splitlines()[-1])


class Peer:
    """A separate process that answers requests: it calls the function that ``serve(spec)`` of ``module`` returns."""

    def __init__(self, module: str, spec: Mapping[str, Any], *, threads: int, **more: str):
        self.spec = dict(spec)
        argv = [sys.executable, "-m", __name__, module, json.dumps({**spec, "threads": threads})]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(argv, **pipes, text=True, cwd=ROOT, env=environment(threads, **more))
        self._read()

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the measured process {self.spec} ended with status {self._process.wait()}. Its message is above."
            )
        return json.loads(line)


def main(module: str, spec: dict[str, Any]) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # stdout is for answers only, not for output of libraries
    import torch

    torch.set_num_threads(spec["threads"])
    answer: Callable[[dict[str, Any]], Any] = importlib.import_module(module).serve(spec)
    print(json.dumps(_READY), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
