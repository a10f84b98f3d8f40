"""``python docs/site/summary.py [--write]``: the speed figures of README.md and of the start page, from the newest "doors" of docs/benchmarks.

Prints the lines of README.md between ``<!-- speed -->`` and ``<!-- /speed -->``; ``--write`` puts them there. A test compares the two.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
DOORS = ("module", "grad", "step")
_LINES = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", re.DOTALL)


@cache
def measurements(docs: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return every measurement in docs/benchmarks, the oldest first."""
    return [(path, json.loads(path.read_text())) for path in sorted((docs / "benchmarks").glob("*.json"))]


def newest(docs: Path, subject: str) -> tuple[Path, dict[str, Any]]:
    """Return the last file with figures of ``subject``, and these figures."""
    found = [(path, s) for path, d in measurements(docs) if not d.get("quick") for s in d.get("subjects", ()) if s["subject"] == subject]
    if not found:
        raise ValueError(f"docs/benchmarks: expected a file with figures of {subject!r}, got none. Run `python -m tests.tools.benchmarks`.")
    return found[-1]


def seconds(row: dict[str, Any], peer: str) -> float:
    """Return the median of a peer's times; a row of `replay` has nothing else."""
    found = row["times"][peer]
    return float(found["median_s"] if isinstance(found, dict) else found)


def faster(docs: Path) -> dict[str, list[float]]:
    """Return how many times as fast as eager each row of "doors" is, by kind of entry: the faster of the open and the fixed batch."""
    out: dict[str, list[float]] = {door: [] for door in (*DOORS, "replay")}
    for row in newest(docs, "doors")[1]["data"]:
        best = min((seconds(row, p) for p in ("foreach", "fused") if p in row["times"]), default=0.0)
        for door, ratios in out.items():
            ours = [seconds(row, p) for p in (f"{door} open", f"{door} fixed") if p in row["times"]]
            if ours:
                ratios.append((best if door == "step" else seconds(row, "eager")) / min(ours))
    return out


def lines(docs: Path) -> str:
    """Return the lines of README.md."""
    _, found = newest(docs, "doors")
    module, grad, step = (times(geometric_mean(faster(docs)[door])) for door in DOORS)
    models, sizes = {r["model"] for r in found["data"]}, [r["parameters"] for r in found["data"]]
    return (
        f"- **Small models are faster than eager**, because calls cost less. Over {len(models)} models of {min(sizes):,} to {max(sizes):,}\n"
        f"  parameters, forward and backward by a module is {module} times as fast, by a gradient function {grad} times, and a training step is\n"
        f"  {step} times as fast (geometric means). **Larger models gain little**: [figures](docs/performance.md).\n"
    )


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"


def written(readme: str, text: str) -> str:
    """Return ``readme`` with ``text`` as its lines."""
    if not _LINES.search(readme):
        raise ValueError("README.md: expected <!-- speed --> and <!-- /speed -->, got none. Put the two around the figures.")
    return _LINES.sub(lambda _: text, readme)


def main() -> None:
    made = lines(DOCS)
    if "--write" in sys.argv[1:]:
        readme = DOCS.parent / "README.md"
        readme.write_text(written(readme.read_text(), made))
    print(made, end="")


if __name__ == "__main__":
    main()
