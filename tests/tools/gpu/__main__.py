"""``python -m tests.tools.gpu [--device cpu] [--only native,tiny-step] [--quick] [--docs STEM]``: run the parts and
print one table.

Each part is a separate process: a fault in a kernel ends a process's use of the GPU, and becomes one row. Parts without
timings run in parallel, with half as many processes as cores. The results are written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..benchmarks import report
from .compared import MEASURED, NOT_RUN, RIGHT
from .parts import ALONE, PARTS

LIMIT = 290
"""Seconds per part."""
COLUMNS = ("part", "what", "outcome", "figure")
ROOT = Path(__file__).parents[3]


def _one(part: str, device: str, quick: bool) -> None:
    """Run a part and print each row as a line of JSON. Runs in a separate process."""
    try:
        for row in PARTS[part](device, quick):
            print(json.dumps([part, *row]), flush=True)
    except Exception as error:
        print(json.dumps([part, "", _failed(f"{type(error).__name__}: {error}"), ""]), flush=True)


def _failed(why: str) -> str:
    return f"FAILED: {why.strip().partition(chr(10))[0][:300]}"


def _run(part: str, device: str, quick: bool) -> list[list[str]]:
    started = time.perf_counter()
    argv = [
        sys.executable,
        "-m",
        "tests.tools.gpu",
        "--device",
        device,
        "--part",
        part,
        *(["--quick"] if quick else []),
    ]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    late = threading.Timer(LIMIT, process.kill)
    late.start()
    out, said = process.communicate()
    late.cancel()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    if process.returncode:
        last = said.strip().splitlines()[-1:] or [""]
        late_by_itself = time.perf_counter() - started >= LIMIT
        rows.append(
            [
                part,
                "",
                _failed(
                    f"not done in {LIMIT} s" if late_by_itself else f"it ended with {process.returncode}: {last[0]}"
                ),
                "",
            ]
        )
    print(f"{part}: {time.perf_counter() - started:.0f} s, {len(rows)} rows", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.gpu")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, by default all: {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="only the smallest case of each part")
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md and STEM.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU. Use --device cpu for the parts that do not need one.")
    if options.part:
        _one(options.part, options.device, options.quick)
        return
    asked = options.only.split(",")
    if strangers := [part for part in asked if part not in PARTS]:
        parser.error(f"unknown part {strangers[0]!r}; known: {', '.join(PARTS)}")
    named = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    title = f"{named}\n{report.header(report.machine([torch.get_num_threads()]))}"
    found: dict[str, list[list[str]]] = {}
    lock = threading.Lock()

    def run(part: str) -> None:
        rows = _run(part, options.device, options.quick)
        with lock:
            found[part] = rows
            if options.docs:
                _write(options.docs, named, title, [row for name in asked for row in found.get(name, [])])

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(run, [part for part in asked if part not in ALONE]))
    for part in asked:
        if part in ALONE:
            run(part)
    rows = [row for name in asked for row in found[name]]
    print(f"{title}\n{report.table(list(COLUMNS), rows)}")
    sys.exit(any(row[2] not in (RIGHT, MEASURED, NOT_RUN) for row in rows))


def _write(stem: Path, named: str, title: str, rows: list[list[str]]) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    table = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|", *(f"| {' | '.join(r)} |" for r in rows)]
    stem.with_suffix(".md").write_text("\n".join(["# On a GPU", "", "```", title, "```", "", *table]) + "\n")
    stem.with_suffix(".json").write_text(
        json.dumps({"gpu": named, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
