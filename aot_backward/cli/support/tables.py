"""Tables for people: drawn on a terminal, columns of plain text elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


def say(text: str, *, err: bool = False) -> None:
    """Prints a line in which anybody's words may stand, after an empty one where ``text`` begins so.

    A package's names could else move the cursor, change colours or turn the direction of the text."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    shown = visible(text.removeprefix("\n")).encode(encoding, "backslashreplace").decode(encoding)
    click.echo(f"\n{shown}" if text.startswith("\n") else shown, err=err)


def say_json(value: Any, indent: int | None = 2) -> None:
    """Prints JSON, in which nothing but ASCII stands that can be seen."""
    click.echo(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"))


def visible(text: str) -> str:
    """``text`` on one line, what cannot be seen as Python escapes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints ``rows`` below ``header``; nothing where there are none."""
    cells = [[visible(str(c)) for c in row] for row in rows]
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
    say(f"\n{title}")
    for row in [list(header), *cells]:
        say("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def size(number: int) -> str:
    """Bytes for people."""
    return f"{number} B" if number < 1000 else f"{number / 1e3:.1f} kB" if number < 1e6 else f"{number / 1e6:.2f} MB"


def count(number: int, what: str, several: str = "") -> str:
    """``3 nodes``, ``1 node``. ``several``: where the plural is not made with an s."""
    return f"{number} {what if number == 1 else several or what + 's'}"
