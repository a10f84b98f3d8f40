"""The page's facts as plain text, for a terminal: :func:`text`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aot_backward_runtime.package.archive import Archive

from .entries import entries
from .kernels import kernel_calls
from .markup import Child, Html
from .overview import package
from .storage import libraries

_INDENT = "  "


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str]]


def text(archive: Archive) -> Iterator[str | Table]:
    """Yield the lines and tables that describe the package, its entries, and the needs of its native code. Strings of
    the package are not escaped."""
    yield from _blocks([package(archive), entries(archive)], "")
    yield "\nNative code"
    yield from _blocks([kernel_calls(archive), libraries(archive)], _INDENT)


def _blocks(child: Child, indent: str) -> Iterator[str | Table]:
    for part in _flat(child):
        if isinstance(part, str):
            continue
        if part.tag == "dl":
            pairs = [p for p in _flat(part.children) if isinstance(p, Html)]
            for term, description in zip(pairs[::2], pairs[1::2], strict=True):
                first, *more = _lines(description.children)
                yield f"{indent}{_inline(term)}: {first}".rstrip()
                yield from (f"{indent}{_INDENT}{line}" for line in more)
        elif part.tag == "table":
            header, *rows = [[_inline(cell) for cell in _flat(row.children)] for row in _rows(part)]
            yield Table(header, rows)
        elif part.tag in ("h3", "h4"):
            yield indent + _inline(part) if indent else "\n" + _inline(part)
            indent += _INDENT  # of what follows in the same element
        elif part.tag == "p":
            yield indent + _inline(part)
        elif part.tag != "h2":
            yield from _blocks(part.children, indent)


def _flat(child: Child) -> Iterator[str | Html]:
    """Yield texts and elements in their order."""
    if isinstance(child, (str, Html)):
        yield child
    elif child is not None:
        for part in child:
            yield from _flat(part)


def _lines(description: Child) -> Iterator[str]:
    """Yield the text of a description: what stands before its paragraphs, then each of them, folded ones, too. Several
    paragraphs begin below the term."""
    parts = list(_unfolded(description))
    paragraphs = [_inline(p) for p in parts if isinstance(p, Html) and p.tag == "p"]
    first = "".join(_inline(p) for p in parts if isinstance(p, str) or p.tag != "p")
    yield first if first or len(paragraphs) != 1 else paragraphs.pop()
    yield from paragraphs


def _unfolded(description: Child) -> Iterator[str | Html]:
    for part in _flat(description):
        if isinstance(part, Html) and part.tag == "details":
            _, *rest = _flat(part.children)
            yield from rest if any(isinstance(p, Html) and p.tag == "p" for p in rest) else [part]
        else:
            yield part


def _inline(child: Child) -> str:
    """Return the text without drawings. Of a folded list it returns how many items it has."""
    if isinstance(child, str):
        return child
    if isinstance(child, Html):
        if child.tag in ("svg", "title"):
            return ""
        parts = list(_flat(child.children))
        return _inline(parts[:1] if child.tag == "details" else parts)
    return "".join(map(_inline, child or ()))


def _rows(part: Html) -> Iterator[Html]:
    for inner in _flat(part.children):
        if isinstance(inner, Html):
            yield from [inner] if inner.tag == "tr" else _rows(inner)
