"""``python docs/site/summary.py [--write]``: the speed figures of README.md and of the start page, from the newest files in docs/benchmarks.

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


def faster(docs: Path, subject: str, threads: int | None = None) -> dict[str, list[float]]:
    """Return how many times as fast as eager each row is, by door. ``subject`` is "doors" (small models) or "sizes" (real ones)."""
    rows = [r for r in newest(docs, subject)[1]["data"] if threads in (None, r["threads"])]
    if subject == "sizes":  # of minima, as the benchmark reports them
        least = [{p: t["min_s"] for p, t in r["times"].items()} for r in rows]
        return {door: [t["fused" if door == "step" else "eager"] / t[door] for t in least] for door in DOORS}
    out: dict[str, list[float]] = {door: [] for door in (*DOORS, "replay")}
    for row in rows:
        best = min((seconds(row, p) for p in ("foreach", "fused") if p in row["times"]), default=0.0)
        for door, ratios in out.items():
            ours = [seconds(row, p) for p in (f"{door} open", f"{door} fixed") if p in row["times"]]
            if ours:
                ratios.append((best if door == "step" else seconds(row, "eager")) / min(ours))
    return out


def lines(docs: Path) -> str:
    """Return the lines of README.md."""
    _, small = newest(docs, "doors")
    _, real = newest(docs, "sizes")
    words = []
    for subject, found in (("doors", small), ("sizes", real)):
        means = {door: geometric_mean(r) for door, r in faster(docs, subject).items()}
        models, sizes = {r["model"] for r in found["data"]}, [r["parameters"] for r in found["data"]]
        words.append((len(models), _count(min(sizes)), _count(max(sizes)), *(times(means[door]) for door in DOORS)))
    a, b = words
    worst = min((r["times"]["eager"]["min_s"] / r["times"]["grad"]["min_s"], r["model"]) for r in real["data"])
    return (
        f"- **Small models are faster than eager**, because calls cost less. {a[0]} models of {a[1]} to {a[2]} parameters: a module's forward and\n"
        f"  backward is {a[3]} times as fast, a gradient function {a[4]}, a training step {a[5]} (geometric means).\n"
        f"- **Larger models gain little**: {b[0]} models of {b[1]} to {b[2]} parameters reach {b[3]}, {b[4]} and {b[5]} times eager's speed.\n"
        f"  The slowest gradient function reaches {worst[0]:.2f} ({worst[1]}). [Figures](docs/performance.md).\n"
    )


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"


def _count(number: int) -> str:
    return f"{number / 1e6:.0f} million" if number >= 1e6 else f"{number:,}"


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
