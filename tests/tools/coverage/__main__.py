"""``python -m tests.tools.coverage [--only op_db,module_db] [--names sort,nn.Linear] [--minutes M] [--resume FILE]
[--docs]``"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from tests.tools import resumable

from . import cases, processes, report
from .worker import WAYS

RESULTS = processes.ROOT / "build" / "coverage" / f"{torch.__version__}.jsonl"
CHUNK = 24  # operators per worker


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.coverage",
        description="Gradients of every operator of PyTorch's test databases, against eager.",
    )
    parser.add_argument(
        "--only", default=",".join(cases.DATABASES), help=f"databases, by default all: {','.join(cases.DATABASES)}"
    )
    parser.add_argument("--names", help="operators, by default all: sort,nn.Linear")
    parser.add_argument(
        "--minutes",
        type=float,
        default=24 * 60,
        metavar="M",
        help="start nothing new after M minutes; run again to continue",
    )
    parser.add_argument(
        "--resume", type=Path, default=RESULTS, metavar="FILE", help="skip cases that FILE has; append new ones"
    )
    parser.add_argument(
        "--again",
        metavar="VERDICTS",
        default="",
        help="run operators with these verdicts in FILE again: refused,wrong,crashed",
    )
    parser.add_argument("--way", default="export", choices=list(WAYS), help="the kind of artifact")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="calls of each operator, by default 2")
    parser.add_argument("--size", type=int, default=16, metavar="N", help="calls per package, by default 16")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes, by default one per core"
    )
    parser.add_argument(
        "--limit", type=float, default=300, metavar="S", help="seconds after which a silent worker is killed"
    )
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md and STEM.json")
    options = parser.parse_args()
    databases = options.only.split(",")
    unknown = sorted(set(databases) - {*cases.DATABASES, cases.FAULTS})
    if unknown:
        parser.error(f"unknown database {unknown[0]!r}; known: {', '.join(cases.DATABASES)}")
    every = {database: list(cases.operators(database)) for database in databases}
    wanted = set(options.names.split(",")) if options.names else {name for names in every.values() for name in names}
    unknown = sorted(wanted - {name for names in every.values() for name in names})
    if unknown:
        parser.error(f"no operator {unknown[0]!r} in {options.only}")
    operators = [(database, name) for database, names in every.items() for name in names if name in wanted]
    records = [r for r in resumable.records(options.resume) if r["way"] == options.way]
    again = set(options.again.split(","))
    done = {
        (o["database"], o["operator"])
        for o in report.operators(report.latest(records))
        if o["complete"] and o["samples"] >= options.samples and o["verdict"] not in again
    }
    chunks = [tuple(operators[i : i + CHUNK]) for i in range(0, len(operators), CHUNK)]
    jobs = [
        processes.Job(left, options.way, options.samples, options.size)
        for chunk in chunks
        if (left := tuple(o for o in chunk if o not in done))
    ]
    options.resume.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()
    with options.resume.open("a") as file:

        def record(found: processes.Record) -> None:
            with lock:
                records.append(found)
                print(json.dumps(found, ensure_ascii=False), file=file, flush=True)
                print(
                    "{verdict:12}{seconds:6.1f} s  {database}:{operator}#{sample}  {reason}".format(**found), flush=True
                )

        complete = processes.run(
            jobs, record, workers=options.jobs, deadline=time.monotonic() + 60 * options.minutes, limit=options.limit
        )
    shown = [r for r in records if r["operator"] in every.get(r["database"], ())]
    found = report.document(shown, {d: len(names) for d, names in every.items()}, datetime.date.today().isoformat())
    print(f"\n{report.table(found)}")
    if options.docs:
        report.write(options.docs, found)
    if not complete:
        print(
            f"Some operators have not run within {options.minutes:g} minutes. Run the same command again to continue."
        )
    wrong = [r for r in report.latest(shown) if r["verdict"] == "wrong"]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
