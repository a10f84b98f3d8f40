"""Results of a subject, tables, and the description of the machine."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Target:
    """A figure that an issue asks for. ``off_by`` is the distance from the target, "" if it is met."""

    asked: str
    reached: str
    met: bool
    off_by: str

    def __post_init__(self) -> None:
        if self.met:
            self.off_by = ""


@dataclass
class Result:
    """The results of a subject. ``rows`` are the rows of its table; ``data`` has the figures in base units (seconds,
    bytes)."""

    subject: str
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        parts = [
            f"== {self.subject}: {self.title}",
            table(self.columns, self.rows),
            *(f"  {note}" for note in self.notes),
        ]
        return "\n".join(parts)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table aligned with spaces. Columns of figures are right-aligned."""
    widths = [max(len(r[i]) for r in (columns, *rows)) for i in range(len(columns))]
    right = [all(_figure(r[i]) for r in rows) for i in range(len(columns))]
    lines = []
    for row in (columns, *rows):
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join([lines[0], "  " + "  ".join("-" * w for w in widths), *lines[1:]])


def _figure(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] in "+-" and cell[1:2].isdigit())


def machine(threads: Sequence[int]) -> dict[str, Any]:
    import torch

    import aot_backward

    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "version": aot_backward.__version__,
        "threads": list(threads),
        "load_average": list(os.getloadavg()),
    }


def header(described: dict[str, Any]) -> str:
    load = ", ".join(f"{v:.2f}" for v in described["load_average"])
    return (
        f"{described['cpu']}, {described['cores']} cores, {described['system']}, Python {described['python']}, torch {described['torch']}\n"
        f"{described['date']}, threads {described['threads']}, load average at the start {load}"
    )


def targets(results: Sequence[Result]) -> str:
    rows = [[t.asked, t.reached, "met" if t.met else "MISSED", t.off_by] for r in results for t in r.targets]
    return "== targets\n" + table(["asked", "reached", "", "off by"], rows) if rows else ""
