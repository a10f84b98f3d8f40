"""``python -m tests.gpu [--device cpu] [--only native,speed] [--quick] [--docs STEM]``: runs the parts and prints one table last."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from ..benchmarks import report
from .parts import PARTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, by default all: {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="the smallest of each")
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also writes STEM.md and STEM.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU here; --device cpu runs what needs none")
    rows: list[list[str]] = []
    for part in options.only.split(","):
        started = time.perf_counter()
        try:
            rows += [[part, *row] for row in PARTS[part](options.device, options.quick)]
        except Exception as error:  # one part's failure is a row, and the others go on
            rows.append([part, "", f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}", ""])
        print(f"{part}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    named = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    title = f"{named}\n{report.header(report.machine([torch.get_num_threads()]))}"
    columns = ["part", "what", "outcome", "figure"]
    print(f"{title}\n{report.table(columns, rows)}")
    if options.docs:
        lines = [
            "# On a GPU",
            "",
            "```",
            title,
            "```",
            "",
            f"| {' | '.join(columns)} |",
            "|---|---|---|---|",
            *(f"| {' | '.join(r)} |" for r in rows),
        ]
        options.docs.with_suffix(".md").write_text("\n".join(lines) + "\n")
        options.docs.with_suffix(".json").write_text(json.dumps({"gpu": named, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    sys.exit(any(row[2] != "right" for row in rows))


if __name__ == "__main__":
    main()
