"""``python -m tests.tools.benchmarks.summary [--write]``: the speed figures of README.md, from the newest "doors" and
"sizes" of docs/benchmarks.

Prints the lines of README.md between ``<!-- speed -->`` and ``<!-- /speed -->``; ``--write`` puts them there. A test
compares the two. The site's start page has the same figures.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from . import doors, real_models, sizes

DOCS = Path(__file__).resolve().parents[3] / "docs"
_NAMES = {"lstm": "an LSTM", "gru": "a GRU", "graph": "a graph network"}
_LINES = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", re.DOTALL)


@cache
def measurements(docs: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return every measurement in docs/benchmarks, the oldest first."""
    return [(path, json.loads(path.read_text())) for path in sorted((docs / "benchmarks").glob("2*.json"))]


def newest(docs: Path, subject: str) -> tuple[Path, dict[str, Any]]:
    """Return the last file with figures of ``subject``, and these figures."""
    found = [
        (path, s)
        for path, d in measurements(docs)
        if not d.get("quick")
        for s in d.get("subjects", ())
        if s["subject"] == subject
    ]
    if not found:
        raise ValueError(
            f"docs/benchmarks: expected a file with figures of {subject!r}, got none. Run `python -m tests.tools.benchmarks`."
        )
    return found[-1]


def means(docs: Path) -> dict[str, str]:
    """Return how many times as fast as eager each kind of entry is: geometric means over the rows of "doors"."""
    ratios = [doors.ratios(row) for row in newest(docs, "doors")[1]["data"]]
    kinds = (*doors.PASSES, *doors.STEPS)
    return {kind: times(geometric_mean(r[kind] for r in ratios if kind in r)) for kind in kinds}


def lines(docs: Path) -> str:
    """Return the lines of README.md."""
    _, found = newest(docs, "doors")
    mean = means(docs)
    models, counts = {r["model"] for r in found["data"]}, [r["parameters"] for r in found["data"]]
    of = f"{len(models)} small models, {min(counts)} to {max(counts):,} parameters"
    rows = [row for row in newest(docs, "sizes")[1]["data"] if row["model"] not in real_models.AUTOCAST]
    large = {kind: times(geometric_mean(sizes.ratios(row)[kind] for row in rows)) for kind in sizes.DOORS}
    every = [
        (ratio, f"`{kind}` of {_NAMES.get(row['model'], row['model'])}")
        for row in rows
        for kind, ratio in sizes.ratios(row).items()
    ]
    (least, slowest), (most, fastest) = min(every), max(every)
    millions = max(row["parameters"] for row in rows) / 1e6
    return (
        f"- **{of} (geometric means): gradients from `export_grad` are {mean['grad']} times as fast as eager,\n"
        f"  and `export_step` {mean['step']} times**, because calls cost less; `export_module` {mean['module']} times, but slower than eager for "
        f"models of few operators.\n  **Larger models (up to {millions:.0f} million): `export_grad` {large['grad']}, `export_step` {large['step']}, "
        f"`export_module` {large['module']}**, single cases {least:.2f} ({slowest})\n  to {most:.2f} ({fastest}) ([more](docs/performance.md)).\n"
    )


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"


def written(readme: str, text: str) -> str:
    """Return ``readme`` with ``text`` as its lines."""
    if not _LINES.search(readme):
        raise ValueError(
            "README.md: expected <!-- speed --> and <!-- /speed -->, got none. Put the two around the figures."
        )
    return _LINES.sub(lambda _: text, readme)


def main() -> None:
    made = lines(DOCS)
    if "--write" in sys.argv[1:]:
        readme = DOCS.parent / "README.md"
        readme.write_text(written(readme.read_text(), made))
    print(made, end="")


if __name__ == "__main__":
    main()
