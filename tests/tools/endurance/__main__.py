"""``python -m tests.tools.endurance [--only module,loads] [--calls 1000] [--again] [--work FOLDER] [--docs STEM]``"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tools.benchmarks import report

from . import parts

ROOT = Path(__file__).parents[3]
ALLOWED = {"descriptors": 2, "mappings": 16, "private": 4 << 20, "folders": 0}
"""Allowed growth from the end of the first fifth of the repetitions to the end. The first fifth fills caches that are
kept on purpose."""
RULE = (
    "Flat: from the end of the first fifth of the repetitions to the end, growth of at most "
    f"{ALLOWED['descriptors']} descriptors, {ALLOWED['mappings']} mappings, {ALLOWED['private'] >> 20} MiB of private memory and 0 folders."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.endurance", description="Repeat calls, loads and bindings; resources must not grow."
    )
    parser.add_argument("--only", default=",".join(parts.PARTS), help=f"parts, by default all: {','.join(parts.PARTS)}")
    parser.add_argument("--calls", type=int, metavar="N", help="at most N repetitions of each part")
    parser.add_argument("--again", action="store_true", help="also run parts that an earlier run has finished")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "endurance", metavar="FOLDER", help="packages, caches and results"
    )
    parser.add_argument("--docs", type=Path, metavar="STEM", help="write STEM.md and STEM.json")
    options = parser.parse_args()
    known, chosen, work = parts.PARTS | parts.HIDDEN, options.only.split(","), options.work.absolute()
    unknown = sorted(set(chosen) - known.keys())
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(parts.PARTS)}")
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("AOT_BACKWARD_CACHE", str(work / "cache"))
    if not (work / "passes.pt2").exists():
        parts.made(work)
    found: dict[str, dict[str, Any]] = {}
    for name in chosen:
        calls, path = min(known[name].calls, options.calls or known[name].calls), work / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        if not options.again and old.get("asked") == calls and not old["problems"]:
            found[name] = old
        else:
            found[name] = _run(name, calls, work)
            path.write_text(json.dumps(found[name], indent=1) + "\n")
        print(f"{name}: {'; '.join(found[name]['problems']) or 'flat'}", flush=True)
        if options.docs:  # an interrupted run still leaves a page
            _write(options.docs, found)
    print(f"\n{report.table(COLUMNS, _rows(found))}\n{RULE}")
    sys.exit(1 if any(f["problems"] for f in found.values()) else 0)


def _run(name: str, calls: int, work: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", f"{__package__}.worker", name, str(calls), str(work)]
    samples = []
    # a separate cache: other processes add and remove folders in the shared one
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AOT_BACKWARD_CACHE": str(work / "cache")}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            samples.append(json.loads(line))
            print(
                f"{name}: {samples[-1]['calls']} of {calls} in {samples[-1]['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    ended = [f"it ended with {process.returncode}"] if process.returncode else []
    return {"asked": calls, "samples": samples, "problems": ended or grown(samples)}


def grown(samples: list[dict[str, Any]]) -> list[str]:
    """Return the resources that are not flat."""
    first, last = samples[len(samples) // 5 - 1], samples[-1]
    return [
        f"{what} from {first[what]} to {last[what]}"
        for what, allowed in ALLOWED.items()
        if last[what] - first[what] > allowed
    ]


COLUMNS = ["part", "times", "seconds", "us each", "descriptors", "mappings", "private MiB", "folders", ""]


def _rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, result in found.items():
        shown, samples = (parts.PARTS | parts.HIDDEN)[name].shown, result["samples"]
        if not samples:
            rows.append([shown, "0", *[""] * 6, "; ".join(result["problems"])])
            continue
        first, last = samples[max(0, len(samples) // 5 - 1)], samples[-1]
        span = [f"{first[w]} to {last[w]}" for w in ("descriptors", "mappings")]
        private = f"{first['private'] / 2**20:.1f} to {last['private'] / 2**20:.1f}"
        each = f"{last['seconds'] / max(1, last['calls']) * 1e6:.0f}"
        rows.append(
            [
                *(
                    shown,
                    f"{last['calls']:,}",
                    f"{last['seconds']:.0f}",
                    each,
                    *span,
                    private,
                    f"{first['folders']} to {last['folders']}",
                ),
                "; ".join(result["problems"]) or "flat",
            ]
        )
    return rows


def _write(stem: Path, found: dict[str, dict[str, Any]]) -> None:
    described = report.machine([1])
    rows = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *_rows(found))]
    lines = [
        f"# Endurance, {datetime.date.today().isoformat()}",
        "",
        f"{described['cpu']}, one thread, torch {described['torch']}. Each part runs in a separate process. {RULE}",
        "",
        *rows,
        "",
        "Made by `python -m tests.tools.endurance`. The JSON file of the same name has the figures.",
        "",
    ]
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text("\n".join(lines))
    stem.with_suffix(".json").write_text(
        json.dumps({"machine": described, "rule": RULE, "parts": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
