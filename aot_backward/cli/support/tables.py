"""Text output: lines, JSON, and tables, drawn on a terminal and as columns of plain text elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


def say(text: str, *, err: bool = False) -> None:
    """Prints one line with control characters escaped, after an empty line where ``text`` begins with a newline.

    Unescaped, names in a package could move the cursor, change colours or reverse the direction of the text."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    printable = visible(text.removeprefix("\n")).encode(encoding, "backslashreplace").decode(encoding)
    click.echo(f"\n{printable}" if text.startswith("\n") else printable, err=err)


def say_json(value: Any, indent: int | None = 2) -> None:
    """Prints JSON in printable ASCII."""
    click.echo(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"))


def visible(text: str) -> str:
    """``text`` on one line, with characters that are not printable as Python escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints ``rows`` below ``header``, after an empty line; nothing where there are none."""
    cells = [[visible(str(c)) for c in row] for row in rows]
    if not cells:
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Column, Table

        grid = Table(*(Column(escape(label), overflow="fold") for label in header))
        for row in cells:
            grid.add_row(*map(escape, row))
        say("")
        Console().print(grid)
        return
    widths = [max(len(r[i]) for r in [list(header), *cells]) for i in range(len(header))]
    say("")
    for row in [list(header), *cells]:
        say("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def size(number: int) -> str:
    """``41.7 kB``."""
    return f"{number} B" if number < 1000 else f"{number / 1e3:.1f} kB" if number < 1e6 else f"{number / 1e6:.2f} MB"


def count(number: int, noun: str, several: str = "") -> str:
    """``3 nodes``, ``1 node``. ``several``: the plural, where it does not end in s."""
    return f"{number} {noun if number == 1 else several or noun + 's'}"
