"""Tables for people: drawn on a terminal, columns of plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints ``rows`` below ``header``; nothing where there are none."""
    cells = [[str(c) for c in row] for row in rows]
    if not cells:
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        drawn = Table(*map(escape, header), title=escape(title), title_justify="left")
        for row in cells:
            drawn.add_row(*map(escape, row))
        Console().print(drawn)
        return
    widths = [max(len(r[i]) for r in [list(header), *cells]) for i in range(len(header))]
    click.echo(f"\n{title}")
    for row in [list(header), *cells]:
        click.echo("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def size(number: int) -> str:
    """Bytes for people."""
    return f"{number} B" if number < 1000 else f"{number / 1e3:.1f} kB" if number < 1e6 else f"{number / 1e6:.2f} MB"


def count(number: int, what: str, several: str = "") -> str:
    """``3 nodes``, ``1 node``. ``several``: where the plural is not made with an s."""
    return f"{number} {what if number == 1 else several or what + 's'}"
