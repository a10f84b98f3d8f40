"""``python -m tests.tools.fuzz [--seed N] [--count N] [--minutes M] [--jobs N] [--resume FILE] [--docs STEM] [--only
NUMBER]``

Run mutations 0 to ``count - 1`` of a seed in forked processes that may crash. Results are written at once; the same
command continues an interrupted run. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.fuzz",
        description="Mutated packages, state files and signatures: refused, or right.",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100_000, metavar="N", help="mutations in all, by default 100000")
    parser.add_argument(
        "--minutes",
        type=float,
        default=24 * 60,
        metavar="M",
        help="start nothing new after M minutes; run again to continue",
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes, by default one per core"
    )
    parser.add_argument(
        "--limit", type=float, default=30, metavar="S", help="seconds after which a mutation counts as hanging"
    )
    parser.add_argument(
        "--packages",
        type=Path,
        default=ROOT / "build" / "fuzz",
        metavar="FOLDER",
        help="valid packages; missing ones are made",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="skip mutations that FILE has; by default in the packages' folder"
    )
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md and STEM.json")
    parser.add_argument(
        "--only", type=int, metavar="NUMBER", help="run one mutation in this process, and print its verdict"
    )
    parser.add_argument(
        "--bases",
        metavar="NAMES",
        help="packages to mutate: net,order,step,passes,targets; also golden-pair,golden-passes",
    )
    options = parser.parse_args()
    os.environ["AOT_BACKWARD_CACHE"] = str(options.packages / "cache")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from . import bases, processes, report

    names = tuple(options.bases.split(",")) if options.bases else tuple(bases.BASES)
    processes.prepare(options.packages, names)
    if options.only is not None:
        made, verdict, reason = processes.one(options.seed, options.only, options.packages, names)
        print(f"{made.kind} of {made.base}: {made.what}\n{verdict}: {reason}")
        sys.exit(verdict not in ("refused", "right"))
    resume = options.resume or options.packages / f"results-{options.seed}.jsonl"
    done = report.read(resume)
    with resume.open("a") as file:

        def record(found: processes.Records) -> None:
            done.extend(found)
            file.write("".join(json.dumps(r) + "\n" for r in found))
            file.flush()
            for r in found:
                if r["verdict"] in processes.FAULTS:
                    print(
                        f"{r['number']:7} {r['verdict']:18} {r['kind']} of {r['base']}: {r['what'][:160]}: {r['reason']}",
                        flush=True,
                    )

        start, before = time.monotonic(), len(done)
        left = sorted(set(range(options.count)) - {r["number"] for r in done})
        processes.run(
            options.seed,
            left,
            options.packages,
            names,
            record,
            jobs=options.jobs,
            deadline=start + 60 * options.minutes,
            limit=options.limit,
        )
    print(f"{len(done) - before} mutations in {time.monotonic() - start:.0f} s")
    shown = [r for r in done if r["number"] < options.count]
    print(report.table(shown))
    if options.docs:
        report.write(options.docs, options.seed, options.count, shown)
    sys.exit(any(r["verdict"] in processes.FAULTS for r in shown))


if __name__ == "__main__":
    main()
