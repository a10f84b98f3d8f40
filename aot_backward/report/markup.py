"""Make HTML from untrusted strings: the text and attributes of elements are escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_VOID = frozenset({"meta", "input", "br"})
LONGEST = 1000  # characters of one text from a package, which is untrusted: bounds the page; a guess


@dataclass(frozen=True)
class Html:
    """An element. ``str()`` gives its markup, :mod:`.plain_text` its text. Its children are ``verbatim`` if they are
    markup already."""

    tag: str
    attributes: Mapping[str, str | float | bool | None]
    children: Child
    verbatim: bool = False

    def __str__(self) -> str:
        words = [self.tag]
        for name, value in self.attributes.items():
            name = name.removesuffix("_").replace("_", "-")
            if value is True:
                words.append(name)
            elif value is not None and value is not False:
                words.append(f'{name}="{html.escape(_visible(str(value)))}"')
        opening = f"<{' '.join(words)}>"
        inside = str(self.children) if self.verbatim else joined(self.children)
        return opening if self.tag in _VOID else f"{opening}{inside}</{self.tag}>"


Child = str | Html | Iterable[Any] | None


def clean(text: str) -> str:
    """Return ``text`` with unprintable characters, including direction marks, replaced, and cut to :data:`LONGEST`."""
    printable = _visible(text)
    return printable if len(printable) <= LONGEST else f"{printable[: LONGEST - 1]}…"


def _visible(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return ``<tag …>children</tag>``. ``class_`` becomes class, other underscores hyphens; None and False omit an
    attribute."""
    return Html(tag, attributes, _kept(children))


def _kept(child: Child) -> Child:
    """Return ``child`` with its iterators as tuples, so that it can be read more than once."""
    return child if child is None or isinstance(child, (str, Html)) else tuple(map(_kept, child))


def joined(children: Child) -> str:
    """Return the markup of children in their order. A child that is not :class:`Html` is text."""
    if children is None:
        return ""
    if isinstance(children, Html):
        return str(children)
    if isinstance(children, str):
        return html.escape(clean(children))
    return "".join(map(joined, children))


def raw(tag: str, text: str, **attributes: str) -> Html:
    """Return one of this package's scripts or style sheets, unescaped. It must not contain its own closing tag."""
    assert f"</{tag}" not in text.lower()
    return Html(tag, attributes, text, verbatim=True)


def data(name: str, value: Any) -> Html:
    """Return ``value`` for the script of the page, as JSON that cannot contain markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return raw("script", text, type="application/json", id=name)
