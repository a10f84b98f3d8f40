"""``python -m tests.tools.endurance.worker PART CALLS FOLDER``: repeat one part, and print a line of JSON for each
sample."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

from .parts import HIDDEN, PARTS

SAMPLES = 20


def sample(number: int, start: float) -> dict[str, float]:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    libraries = Path(os.environ["AOT_BACKWARD_CACHE"], "lib")
    return {
        "calls": number,
        "seconds": round(time.perf_counter() - start, 3),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "mappings": sum(1 for _ in Path("/proc/self/maps").open()),
        "private": 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")),
        "folders": sum(1 for _ in libraries.iterdir()) if libraries.is_dir() else 0,
    }


def main() -> None:
    name, calls, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # replay warns of each unknown pass
    start, done = time.perf_counter(), 0
    with (PARTS | HIDDEN)[name].run(folder) as once:
        for number in range(1, SAMPLES + 1):
            until = calls * number // SAMPLES
            for i in range(done, until):
                once(i)
            done = until
            print(json.dumps(sample(done, start)), flush=True)


if __name__ == "__main__":
    main()
