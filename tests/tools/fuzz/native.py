"""``python -m tests.tools.fuzz.native [--count N] [--minutes M] [--seed N] [--bases NAMES] [--docs STEM]``

Run the same mutations through the C library with its standalone backend. Both are built with AddressSanitizer,
LeakSanitizer and UndefinedBehaviorSanitizer; every report is a fault. Packages and cache are in memory. Results are
written at once; the same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..resumable import records as read_records
from . import processes, spoiling
from .judging import KEY

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "runtime" / "native"
SANITIZERS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
BATCH = 500  # mutations per process; it checks for leaks at its end
STATUSES = ("opened", "io", "format", "incompatible", "signature", "name", "input", "state", "run", "memory")


def build(folder: Path) -> Path:
    """Build the library and the program in ``folder``. Return the program."""
    subprocess.run(["make", "-s", "-C", str(NATIVE), f"BUILD={folder}", f"CFLAGS={SANITIZERS}", "-j2"], check=True)
    program = folder / "open_packages"
    source = Path(__file__).with_name("open_packages.c")
    linked = ["-I", str(NATIVE / "include"), "-L", str(folder), "-laot_backward", f"-Wl,-rpath,{folder}"]
    subprocess.run(["gcc", "-std=c11", *SANITIZERS.split(), str(source), "-o", str(program), *linked], check=True)
    return program


def write(made: spoiling.Spoilt, folder: Path, packages: Path, number: int) -> str:
    """Write the mutation's files. Return the line for the program's input."""
    path = folder / f"{number}.pt2"
    path.write_bytes(made.data)
    state, key = "-", "-"
    if made.state is not None:
        state = str(folder / f"{number}.state")
        Path(state).write_bytes(made.state)
    if made.beside is not None:
        (folder / f"{number}.pt2.sig").write_bytes(made.beside)
        key = str(packages / KEY)
    return f"{path}\t{state}\t{key}\n"


def run(
    program: Path, seed: int, numbers: Sequence[int], packages: Path, work: Path, names: tuple[str, ...]
) -> tuple[Counter[str], list[dict[str, object]]]:
    """Return the counts of the outcomes, and the faults. If the process ends early, start a new one after the mutation
    that ended it."""
    outcomes, faults, left = Counter[str](), list[dict[str, object]](), list(numbers)
    environment = {
        **os.environ,
        "AOT_BACKWARD_BACKEND": "standalone",
        "AOT_BACKWARD_CACHE": str(work / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {
        "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # LeakSanitizer's scan of thread-local memory fails after a library was closed. Memory that OpenMP's threads keep
    # there is not our leak.
    suppressed = work / "suppressions"
    suppressed.write_text("leak:libgomp.so\nleak:_dl_resize_dtv\n")
    environment["LSAN_OPTIONS"] = f"use_tls=0:print_suppressions=0:suppressions={suppressed}"
    while left:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            made = [spoiling.spoilt(seed, number, packages, names) for number in left]
            lines = [write(one, Path(folder), packages, number) for one, number in zip(made, left, strict=True)]
            done = subprocess.run(
                [program],
                input="".join(lines),
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                timeout=1200,
            )
        answers = done.stdout.splitlines()
        for answer in answers:
            status, _, ran = answer.partition(" ")
            outcomes["ran" if ran else STATUSES[int(status)]] += 1
        if done.returncode == 0 and len(answers) == len(left):
            return outcomes, faults
        at = min(len(answers), len(left) - 1)
        what = (
            f"{made[at].kind} of {made[at].base}: {made[at].what[:200]}"
            if len(answers) < len(left)
            else "a leak in one of the batch"
        )
        faults.append({"number": left[at], "what": what, "status": done.returncode, "report": done.stderr[-6000:]})
        left = left[len(answers) + 1 :]
    return outcomes, faults


def page(records: Sequence[dict[str, object]], seed: int) -> str:
    """Return the results as Markdown."""
    outcomes, faults = Counter[str](), list[object]()
    for record in records:
        outcomes.update(record["outcomes"])  # type: ignore[arg-type]
        faults += record["faults"]  # type: ignore[operator]
    total = sum(outcomes.values()) + len(faults)
    rows = [f"| {name} | {count:,} |" for name, count in outcomes.most_common()]
    lines = [
        "# Mutated packages through the C library",
        "",
        f"{total:,} mutations of seed {seed}, of packages, state files and signatures, by `python -m tests.tools.fuzz.native`. `make fuzz` uses the",
        "same mutations. Library and standalone backend were built with AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer. The program",
        "describes and calls each package that opens: gradients, forward and backward, steps, accumulated gradients, numbers, state files. The",
        'outcome "ran" means that native code was called. Other outcomes are the status of the refusal, or "opened" if every call was refused.',
        "",
        "| outcome | mutations |",
        "|---|---:|",
        *rows,
        f"| **reports of a sanitizer, signals, leaks, messages with control characters** | **{len(faults)}** |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.fuzz.native", description="Run mutated packages in the C library, with sanitizers."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--count", type=int, default=1_000_000, metavar="N", help="mutations in all, by default a million"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=24 * 60,
        metavar="M",
        help="start nothing new after M minutes; run again to continue",
    )
    parser.add_argument(
        "--packages",
        type=Path,
        default=ROOT / "build" / "fuzz",
        metavar="FOLDER",
        help="valid packages; missing ones are made",
    )
    parser.add_argument(
        "--bases", default="net,step,targets", metavar="NAMES", help="packages to mutate; also golden-pair"
    )
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md")
    options = parser.parse_args()
    options.packages.mkdir(parents=True, exist_ok=True)
    names = tuple(options.bases.split(","))
    processes.prepare(options.packages, names)
    program = build(options.packages / "sanitized")
    kept = options.packages / f"native-{options.seed}.jsonl"
    records = read_records(kept)
    done = {r["first"] for r in records}
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="aotb-fuzz-", dir="/dev/shm") as folder, kept.open("a") as file:
        for first in (n for n in range(0, options.count, BATCH) if n not in done):
            if time.monotonic() > deadline:
                break
            numbers = range(first, min(first + BATCH, options.count))
            outcomes, faults = run(program, options.seed, numbers, options.packages, Path(folder), names)
            records.append({"first": first, "outcomes": outcomes, "faults": faults})
            file.write(json.dumps(records[-1]) + "\n")
            file.flush()
            for fault in faults:
                print(f"{fault['number']}: {fault['what']}\n{fault['report']}", flush=True)
    text = page(records, options.seed)
    print(text)
    if options.docs:
        options.docs.with_suffix(".md").write_text(text)
    sys.exit(any(r["faults"] for r in records))


if __name__ == "__main__":
    main()
