"""``python -m tests.tools.ahead_of_time [--models mlp,conv] [--rounds N] [--docs STEM]``: compare ways to compile
gradients ahead of time.

The first table has the seconds that a fresh process needs for its first gradient, with and without a compiler on its
``PATH``; the ways take turns. The second table has the result of each way after something has changed since the
capture.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import one
from .ways import WAYS

ROOT = Path(__file__).parents[3]
LIMIT_S = 600
_NEAR = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.ahead_of_time", description="Ways to compile gradients ahead of time."
    )
    parser.add_argument("--models", default="mlp,conv,encoder", help="models of the first table")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="processes per way; the ways take turns")
    parser.add_argument("--cases", default=",".join(one.CASES), help="changes after the capture, by default all")
    parser.add_argument("--ways", default=",".join(WAYS), help="by default all ways that this torch has")
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md and STEM.json")
    options = parser.parse_args()
    ways = options.ways.split(",")
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "first": [row for name in options.models.split(",") for row in _first(name, ways, options.rounds)],
        "changed": [_changed(way, case) for case in options.cases.split(",") for way in ways if way != "eager"],
    }
    if options.docs:
        options.docs.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        options.docs.with_suffix(".md").write_text(page(found))
    ours = [r for r in found["changed"] if r["way"] == "ours" and r["verdict"] not in ("eager's", "refused")]
    sys.exit(f"ours: expected eager's numbers or a refusal, got {ours}" if ours else 0)


def _first(name: str, ways: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return, per way, the seconds to compile and the seconds from the start of a process to its gradients, with and
    without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for way in ways:
            (at := Path(folder) / way).mkdir()
            rows.append(
                {"model": name, "way": way, "write": _process("write", way, name, at), "compiler": [], "none": []}
            )
        for _ in range(rounds):
            for row in rows:
                for path in ("compiler", "none"):
                    if "error" in row["write"] or (row[path] and "error" in row[path][-1]):
                        continue
                    row[path].append(
                        _process("first", row["way"], name, Path(folder) / row["way"], compiler=path == "compiler")
                    )
    expected = next((r["compiler"][0] for r in rows if r["way"] == "eager"), None)
    for row in rows:
        for each in (*row["compiler"], *row["none"]):
            if expected and "error" not in each:
                each["right"] = all(abs(each[k] - expected[k]) <= _NEAR * abs(expected[k]) for k in ("loss", "norm"))
        print(
            f"{name:10} {row['way']:28} {_seconds(row['compiler'])} s, without a compiler {_seconds(row['none'])}",
            flush=True,
        )
    return rows


def _process(what: str, way: str, name: str, folder: Path, compiler: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty:
        more = {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/cache", "OMP_NUM_THREADS": "1"} | (
            {} if compiler else {"PATH": f"{empty}/none"}
        )
        argv = [
            sys.executable,
            "-m",
            "tests.tools.ahead_of_time.one",
            what,
            way,
            name,
            *([str(folder)] if what != "changed" else []),
        ]
        start = time.clock_gettime(one.CLOCK)
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, env={**os.environ, **more}
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if "end" in found:
        found["seconds"] = found.pop("end") - start
    return found


def _changed(way: str, case: str) -> dict[str, Any]:
    found = _process("changed", way, case, Path())
    row = {
        "case": case,
        "way": way,
        "verdict": found.get("verdict", "fails"),
        "reason": found.get("reason", found.get("error", "")),
    }
    print(f"{case:45} {way:28} {row['verdict']:8} {row['reason'][:100]}", flush=True)
    return row


def _seconds(found: list[dict[str, Any]]) -> str:
    if not found or "error" in found[-1]:
        return "fails"
    if not all(each.get("right", True) for each in found):
        return "not eager's"
    return f"{statistics.median(each['seconds'] for each in found):.1f}"


def page(found: dict[str, Any]) -> str:
    ways = list(dict.fromkeys(r["way"] for r in found["first"]))
    lines = [
        "# Ahead of time, beside PyTorch's own ways",
        "",
        f"torch {found['torch']}, {found['date']}: `make models`. Two of PyTorch's [three ways to store a backward](../models.md) also compile it",
        "ahead of time: `aot_compile` of `torch.compile(…, fullgraph=True)`, stored with `save_compiled_function`, and `torch.compiler.precompile`,",
        "which torch 2.15 calls a prototype.",
        "",
        "## The first gradient in a fresh process",
        "",
        "This is the time from the start of a process until it has the gradients of all parameters, `import torch` included. Each figure is the",
        f"median of {found['rounds']} processes. The ways ran in turn, with one thread, an empty cache of Inductor, and a load average of",
        f"{found['load']}. Every way but ours also builds the module in that process. *modules* counts `sys.modules` at the end. *not eager's* means",
        "that the loss or the norm of the gradients differs from eager's with the same seed.",
        "",
        "| model | way | compiled in, s | first gradient, s | without g++ on the `PATH` | modules | compiler imported |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in found["first"]:
        last = next((each for each in (*row["compiler"][::-1], *row["none"]) if "error" not in each), None)
        write = (
            "cannot" if "error" in row["write"] else "" if row["way"] == "eager" else f"{row['write']['seconds']:.1f}"
        )
        seen = [str(last["modules"]), ", ".join(f"`{m}`" for m in last["compilers"]) or "no"] if last else ["", ""]
        lines.append(
            f"| {row['model']} | {row['way']} | {write} | {_seconds(row['compiler'])} | {_seconds(row['none'])} | {' | '.join(seen)} |"
        )
    lines += [
        "",
        "## What has changed since the capture",
        "",
        "A program is captured and stored. Another process loads it, changes one thing, and calls it.",
        "",
        "| result | meaning |",
        "|---|---|",
        "| eager's | loss and gradients equal those of eager after the same change |",
        "| refused | the call raises an error |",
        "| differs | other numbers, without an error |",
        "| fails | the program cannot be captured, or the process ends |",
        "",
        "| changed | " + " | ".join(w for w in ways if w != "eager") + " |",
        "|---|" + "---|" * (len(ways) - 1),
    ]
    by = {(r["case"], r["way"]): r for r in found["changed"]}
    for case in dict.fromkeys(r["case"] for r in found["changed"]):
        lines.append(f"| {case} | " + " | ".join(by[case, w]["verdict"] for w in ways if w != "eager") + " |")
    reasons = [
        f"- {r['case']}, {r['way']}: {r['verdict']}: {_code(r['reason'])}" for r in found["changed"] if r["reason"]
    ]
    errors = [
        f"- {r['model']}, {r['way']}, {what}: {_code(each['error'])}"
        for r in found["first"]
        for what, each in (
            ("compiled", r["write"]),
            *(("first gradient", e) for e in r["compiler"]),
            *(("without g++", e) for e in r["none"]),
        )
        if "error" in each
    ]
    return "\n".join([*lines, "", "## Messages", "", *reasons, *errors]) + "\n"


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"


if __name__ == "__main__":
    main()
