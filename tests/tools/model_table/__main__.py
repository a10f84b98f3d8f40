"""``python -m tests.tools.model_table [--names mlp,gpt2] [--ways ours,…] [--resume FILE] [--docs STEM]``: the table of
models.


Each model and way is a separate process. Results are written at once; the same command continues an interrupted run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from . import models, one

ROOT = Path(__file__).parents[3]
SHAPES = ("static", "dynamic")
LIMIT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.model_table",
        description="Gradients of whole models, compared with eager, and PyTorch's own ways.",
    )
    parser.add_argument("--names", default=",".join(models.NAMES), help="models, by default all")
    parser.add_argument("--ways", default=",".join(one.WAYS), help=f"by default all: {', '.join(one.WAYS)}")
    parser.add_argument(
        "--resume",
        type=Path,
        default=ROOT / "build" / f"models-{torch.__version__}.jsonl",
        metavar="FILE",
        help="skip rows that FILE has",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="STEM", help="also write all rows of FILE to STEM.md and STEM.json"
    )
    options = parser.parse_args()
    options.resume.parent.mkdir(parents=True, exist_ok=True)
    rows = _read(options.resume)
    done = {(r["model"], r["way"], r["shapes"]) for r in rows}
    asked = [(n, w, s) for n in options.names.split(",") for s in SHAPES for w in options.ways.split(",")]
    with options.resume.open("a") as file:
        for name, way, shapes in asked:
            if (name, way, shapes) in done:
                continue
            row = {"model": name, "way": way, "shapes": shapes, **_verdict(name, way, shapes)}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                f"{name:12} {shapes:8} {way:26} {row['verdict']:8} {row['seconds']:6.1f} s  {row['reason'][:110]}",
                flush=True,
            )
    if options.docs:
        _write(options.docs, rows)
    if any(r["verdict"] != "pass" for r in rows if r["way"] == "ours"):
        sys.exit(1)


def _verdict(name: str, way: str, shapes: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.tools.model_table.one", name, way, shapes]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "refused", "reason": f"not done after {LIMIT_S} s", "seconds": float(LIMIT_S)}
    if done.returncode:
        return {
            "verdict": "crashed",
            "reason": f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}",
            "seconds": 0.0,
        }
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _write(stem: Path, rows: list[dict[str, Any]]) -> None:
    by = {(r["model"], r["shapes"], r["way"]): r for r in rows}
    names = [n for n in models.NAMES if any(r["model"] == n for r in rows)]
    ways = [w for w in one.WAYS if any(r["way"] == w for r in rows)]
    head = "| model | " + " | ".join(f"{w}, {s}" for w in ways for s in SHAPES) + " |"
    lines = [
        "# Whole models",
        "",
        f"torch {torch.__version__}, {datetime.date.today().isoformat()}: `make models`. Ours is loaded in a fresh process without a compiler;",
        "outputs, every gradient and every buffer are compared with eager. Dynamic: the batch (nodes, edges, atoms), checked at two sizes.",
        "",
        "`torch.export joint` is `torch.export.experimental._export_forward_backward`, run by an interpreter. `aot_compile` is that of",
        "`torch.compile(…, fullgraph=True)`. `torch.compiler.precompile` has `capture` and `load`. The last two are stored and loaded in one process",
        "that has a compiler. All three compute only the gradients of the parameters, for a scalar loss of all outputs. *wrong*: with the same seed,",
        f"the loss or a gradient is off by more than {one.PEERS_RELATIVE:g} of its norm (ours: {one.RELATIVE:g}). Different random numbers count as",
        "wrong.",
        "[The first gradient in a fresh process, and changes after the capture](benchmarks/ahead-of-time.md).",
        "",
        head,
        "|" + "---|" * (1 + len(ways) * len(SHAPES)),
    ]
    for n in names:
        cells = [by[n, s, w]["verdict"] if (n, s, w) in by else "not run" for w in ways for s in SHAPES]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    lines += ["", "| way | " + " | ".join(("pass", "refused", "wrong", "crashed")) + " |", "|---|---|---|---|---|"]
    for w in ways:
        counts = [
            sum(r["verdict"] == v for r in rows if r["way"] == w) for v in ("pass", "refused", "wrong", "crashed")
        ]
        lines.append(f"| {w} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "## Why not", ""]
    lines += [
        f"- {r['model']}, {r['shapes']}, {r['way']}: {r['verdict']}: {r['reason']}"
        for r in rows
        if r["verdict"] != "pass"
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
