"""``python -m tests.tools.costs -m "not slow"``: print the costs of a test run as a table.

Other arguments go to pytest. The run starts with an empty cache. The table has the runs of g++ and their seconds, by
product; the number of graphs that Inductor lowered; and the seconds of the tests, by folder. Other processes on the
machine increase all seconds. ``--cache FOLDER`` keeps the compile cache; a second run with it is warm.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COMPILER = """#!/bin/sh
start=$(date +%s%N)
{real} "$@"
code=$?
echo "$(( ($(date +%s%N) - start) / 1000000 )) $*" >> {log}
exit $code
"""


def kind(arguments: str) -> str:
    """Return the product of a run of g++."""
    words = arguments.split()
    if "-c" in words:
        return (
            f"objects of {words[words.index('-c') + 1].rpartition('/')[2]}"
            if words[-1] in ("wrapper.o", "kernel.o")
            else "other objects"
        )
    return (
        "libraries"
        if "-shared" in words
        else "precompiled headers"
        if "c++-header" in words
        else "questions to the compiler"
    )


def compiled(log: Path) -> dict[str, tuple[int, float]]:
    """Return the number of runs of g++ and their seconds, by kind."""
    runs, seconds = Counter[str](), Counter[str]()
    for line in log.read_text().splitlines() if log.exists() else ():
        milliseconds, _, arguments = line.partition(" ")
        runs[kind(arguments)] += 1
        seconds[kind(arguments)] += int(milliseconds)
    return {name: (runs[name], seconds[name] / 1000) for name in sorted(runs, key=lambda name: -seconds[name])}


def tests(junit: Path) -> dict[str, tuple[int, float]]:
    """Return the number of tests and their seconds, by folder below tests/."""
    count, seconds = Counter[str](), Counter[str]()
    for case in ElementTree.parse(junit).iter("testcase"):
        folder = (*case.get("classname", "").split("."), "")[1]  # "" if pytest could not read the file
        count[folder] += 1
        seconds[folder] += int(1000 * float(case.get("time", 0)))
    return {name: (count[name], seconds[name] / 1000) for name in sorted(count, key=lambda name: -seconds[name])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--jobs", default=str(os.cpu_count()))
    options, asked = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="aot-backward-costs-") as made:
        folder = Path(made)
        log, junit, cache = folder / "g++.log", folder / "junit.xml", (options.cache or folder / "cache").resolve()
        program = folder / "bin" / "g++"
        program.parent.mkdir()
        program.write_text(_COMPILER.format(real=shutil.which("g++"), log=log))
        program.chmod(0o755)
        before = len(list(cache.glob("compiled/[!.]*")))
        env = {
            **os.environ,
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
            "AOT_BACKWARD_CACHE": str(cache),
        }
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            options.jobs,
            "--dist",
            "loadfile",
            f"--junitxml={junit}",
            *asked,
        ]
        start = time.perf_counter()
        code = subprocess.run(argv, cwd=ROOT, env=env).returncode
        wall = time.perf_counter() - start
        rows = {"whole run": (1, wall)}
        rows |= {f"g++: {name}": row for name, row in compiled(log).items()}
        rows |= {f"tests/{name}": row for name, row in (tests(junit) if junit.exists() else {}).items()}
        print(
            f"\n{os.cpu_count()} processors, load {os.getloadavg()[2]:.1f}; graphs lowered: {len(list(cache.glob('compiled/[!.]*'))) - before}"
        )
        print("\n| item | count | seconds |\n|---|---|---|")
        for name, (count, seconds) in rows.items():
            print(f"| {name} | {count:,} | {seconds:,.0f} |")
    return code


if __name__ == "__main__":
    sys.exit(main())
