"""``python -m tests.tools.benchmarks [--only cold,doors] [--quick] [--threads 1,2] [--json FILE]``"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

from . import processes, report

SUBJECTS = (
    "overhead",
    "cold",
    "replay",
    "doors",
    "sizes",
    "exports",
    "native",
    "scripts",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.benchmarks", description="Measures; asserts nothing about times."
    )
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"subjects, by default all: {','.join(SUBJECTS)}")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by default 1,2")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, one small model, no torch.compile: to try them out"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write everything there (each subject has a file in --work)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=processes.WORK,
        metavar="FOLDER",
        help="packages and caches; by default build/benchmarks",
    )
    parser.add_argument("--reuse", action="store_true", help="measure the packages that an earlier run left in --work")
    options = parser.parse_args()
    processes.REUSE = options.reuse
    processes.WORK = options.work.absolute()
    chosen = options.only.split(",")
    unknown = sorted(set(chosen) - set(SUBJECTS))
    if unknown:
        parser.error(f"unknown subject {unknown[0]!r}; known: {', '.join(SUBJECTS)}")
    threads = [int(t) for t in options.threads.split(",")]
    processes.WORK.mkdir(parents=True, exist_ok=True)
    described = report.machine(threads)
    print(report.header(described), flush=True)
    results = []
    for name in chosen:
        before = os.getloadavg()
        result = importlib.import_module(f"{__package__}.{name}").measure(options.quick, threads)
        results.append(result)
        print(f"\n{result.text()}", flush=True)
        document = {
            "machine": {**described, "load_average": list(before)},
            "quick": options.quick,
            **dataclasses.asdict(result),
        }
        _write(processes.WORK / f"{name}.json", document)
    print(f"\n{report.targets(results)}", flush=True)
    if options.json:
        _write(
            options.json,
            {"machine": described, "quick": options.quick, "subjects": [dataclasses.asdict(r) for r in results]},
        )


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
