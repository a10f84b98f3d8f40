"""Parts of sections: lists of facts, tables, lists that fold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .markup import Child, Html, element
from .wording import size_in_words

SHOWN = 12  # items of a long list before the rest is folded: keeps the page short; a guess


def section(name: str, title: str, *children: Child) -> Html:
    return element("section", element("h2", title), children, id=name)


def facts(rows: Iterable[tuple[str, Child]]) -> Html:
    """Return a list of terms and their descriptions; rows without content are omitted."""
    return element("dl", [(element("dt", term), element("dd", value)) for term, value in rows if value], class_="facts")


def table(
    header: Sequence[str], rows: Sequence[Sequence[Child]], numbers: Sequence[int] = (), total: Sequence[Child] = ()
) -> Html:
    """Return a table. ``numbers``: the columns that are right-aligned."""

    def row(cells: Sequence[Child], tag: str = "td") -> Html:
        return element("tr", [element(tag, cell, class_="n" if i in numbers else None) for i, cell in enumerate(cells)])

    foot = element("tfoot", row(total)) if total else None
    return element(
        "div",
        element("table", element("thead", row(header, "th")), element("tbody", map(row, rows)), foot),
        class_="wide",
    )


def folded(items: Sequence[Child], noun: str) -> Child:
    """Return the items; a long list shows the first ones, and the rest on a click."""

    def listed(some: Sequence[Child]) -> list[Child]:
        return [x for i, item in enumerate(some) for x in ((", ", item) if i else (item,))]

    if len(items) <= SHOWN + 3:
        return listed(items)
    rest = element("details", element("summary", f"and {len(items) - SHOWN:,} more {noun}"), listed(items[SHOWN:]))
    return [*listed(items[:SHOWN]), " ", rest]


def code(text: str) -> Html:
    return element("code", text)


def bytes_shown(size: int) -> Html:
    """Return the rounded size, with the exact one as a tooltip."""
    return element("span", size_in_words(size), title=f"{size:,} bytes")


def line(*children: Child) -> Html:
    """Return one line of several."""
    return element("p", children)
